"""Training steps of the networks' layers in few launches, against torch: in Triton's interpreter, or on a GPU."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quorem import optim
from quorem.models import DCN, DLRM

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.dense import interactions
from quorem.dense import layers as kernels
from quorem.dense.limits import can_fuse
from quorem.dense.step import FusedStep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "dlrm": lambda: DLRM(nn.Identity(), embedding_dims=(4,) * 5, num_dense=13, bottom=(20, 7), top=(63, 9)),
    "dlrm, raw dense": lambda: DLRM(
        nn.Identity(), embedding_dims=(7,) * 17, num_dense=1, bottom=(), top=(9,), raw_dense=True
    ),
    "dlrm, no dense": lambda: DLRM(nn.Identity(), embedding_dims=(1,) * 3, num_dense=0, top=(5, 1)),
    "dcn": lambda: DCN(nn.Identity(), embedding_dims=(4, 4, 9), num_dense=13, deep=(63, 7, 3), num_cross=3),
    "dcn, one layer": lambda: DCN(nn.Identity(), embedding_dims=(1,), num_dense=0, deep=(1,), num_cross=1),
}
RULES: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.01),
    "quorem's adagrad": lambda p: optim.Adagrad(p, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.5, 0.7), eps=1e-3, amsgrad=True),
}

pytestmark = [pytest.mark.kernels(device="gpu"), pytest.mark.usefixtures("nan_filled")]


def network(name: str) -> nn.Module:
    torch.manual_seed(3)
    model = NETWORKS[name]()
    if isinstance(model, DCN):
        nn.init.normal_(model.cross_bias, std=0.3)
    return model.to(DEVICE)


def batch(model: nn.Module, b: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    dense, vectors = torch.randn(b, model.num_dense), torch.randn(b, sum(model.embedding_dims)) / 2
    return dense.to(DEVICE), vectors.to(DEVICE), torch.randint(2, (b,), dtype=torch.uint8).to(DEVICE)


def plain_step(model: nn.Module, dense: Tensor, vectors: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the vectors in float64, with the gradients of the parameters in ``.grad``."""
    model.zero_grad()
    vectors = vectors.double().requires_grad_()
    loss = F.binary_cross_entropy_with_logits(model.logits(dense.double(), vectors), labels.double())
    loss.backward()
    return loss.detach(), vectors.grad


def assert_close(mine: Tensor, truth: Tensor, name: str, bound: float = 4e-6, terms: float = 0) -> None:
    """Relative to the norm, and to that of the terms where they cancel: a sum's rounding is relative to its terms."""
    assert mine.shape == truth.shape and mine.isfinite().all(), name
    error = float((mine.double() - truth).norm())
    assert error <= bound * float(truth.norm()) + 1e-7 * terms, f"{name}: {error:.2e} of {float(truth.norm()):.2e}"


@pytest.mark.parametrize(("b", "k", "n"), [(1, 1, 1), (5, 13, 63), (128, 367, 33), (5, 429, 7), (17, 64, 130)])
def test_layer(b: int, k: int, n: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(b, k, device=DEVICE), torch.randn(n, k, device=DEVICE), torch.randn(n, device=DEVICE)
    truth = F.linear(x.double(), weight.double(), bias.double()).relu()
    for precision in (kernels.PRECISION, "ieee"):
        assert_close(kernels.layer(x, weight, bias, precision), truth, precision)
    apart = torch.randn(b, k + 5, device=DEVICE)[:, 2:-3]
    truth = F.linear(apart.double(), weight.double(), bias.double()).relu()
    assert_close(kernels.layer(apart, weight, bias, kernels.PRECISION), truth, "rows apart")


@pytest.mark.parametrize(
    ("name", "b"), [("dlrm", 128), ("dcn", 128), *((name, b) for name in NETWORKS for b in (1, 5))]
)
def test_loss_and_every_gradient(name: str, b: int) -> None:
    model = network(name)
    inputs, total = batch(model, b), torch.ones((), dtype=torch.float64, device=DEVICE)
    oracle = copy.deepcopy(model).double()
    gradient = FusedStep(model)(*inputs, total)
    loss, truth = plain_step(oracle, *inputs)
    assert_close(total - 1, loss, "loss")
    assert_close(gradient, truth, "vectors")
    for (parameter, mine), theirs in zip(model.named_parameters(), oracle.parameters(), strict=True):
        assert_close(
            mine.grad, theirs.grad, parameter, terms=float(parameter == "output.bias")
        )  # of sigmoid - label, / B


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["dlrm", "dcn"])
def test_steps_of_an_optimizer_are_torchs(name: str, rule: str) -> None:
    model = network(name)
    start, oracle = copy.deepcopy(model), copy.deepcopy(model).double()
    optimizer, theirs = RULES[rule](list(model.parameters())), RULES[rule](list(oracle.parameters()))
    step, total, losses = FusedStep(model, optimizer), torch.zeros((), dtype=torch.float64, device=DEVICE), 0.0
    for seed in range(3):
        inputs = batch(model, 19, seed)
        if seed == 2:
            for each in (optimizer, theirs):
                each.param_groups[0]["lr"] *= 0.5
        gradient = step(*inputs, total)
        loss, truth = plain_step(oracle, *inputs)
        theirs.step()
        losses += float(loss)
        assert_close(gradient, truth, f"vectors in step {seed}", 2e-5)
    assert float(total) == pytest.approx(losses, rel=1e-6) and int(step.steps) == 3
    assert all(p.grad is None for p in model.parameters())
    for (parameter, p), q, before in zip(
        model.named_parameters(), oracle.parameters(), start.parameters(), strict=True
    ):
        assert_close((p - before).detach(), (q - before).detach(), f"change of {parameter}", 2e-5, float(before.norm()))
        for key in step.averages:
            assert_close(optimizer.state[p][key], theirs.state[q][key], f"{key} of {parameter}", 2e-5)


def test_equal_inputs_give_equal_bits() -> None:
    models = [network("dcn") for _ in range(2)]
    for model in models:
        step = FusedStep(model, RULES["adagrad"](list(model.parameters())))
        for seed in range(2):
            step(*batch(model, 20, seed), torch.zeros((), dtype=torch.float64, device=DEVICE))
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", ["dlrm", "dcn"])
def test_nan_reaches_the_loss(name: str) -> None:
    model = network(name)
    dense, vectors, labels = batch(model, 5)
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    dense[2, 0] = float("nan")
    gradient = FusedStep(model)(dense, vectors, labels, total)
    assert total.isnan() and gradient[2].isnan().any()


@pytest.mark.parametrize(("vectors", "width", "low"), [(26, 16, True), (52, 16, True), (2, 1, False), (31, 33, True)])
def test_pairs_and_their_gradient(vectors: int, width: int, low: bool) -> None:
    torch.manual_seed(0)
    b, count = 3, vectors + low
    x = torch.randn(b, count, width, device=DEVICE)
    first = x[:, 0].contiguous() if low else None
    rest = x[:, int(low) :].contiguous()
    out = interactions.interact(first, rest, first)
    row, column = torch.tril_indices(count, count, -1, device=DEVICE)
    wide = x.double().requires_grad_()
    dots = (wide[:, row] * wide[:, column]).sum(2)
    truth = torch.cat([wide[:, 0], dots], 1) if low else dots
    assert_close(out, truth.detach(), "out")
    grad = torch.randn(out.shape, device=DEVICE)
    truth.backward(grad.double())
    dlow, dvectors = interactions.interact_backward(grad, first, rest, False)
    assert_close(dvectors, wide.grad[:, int(low) :], "vectors")
    if low:
        assert_close(dlow, wide.grad[:, 0] * (x[:, 0] > 0), "low")


def test_what_has_no_fused_version_is_refused() -> None:
    model = network("dlrm")
    with pytest.raises(TypeError, match=r"model \(Linear\) must be a DLRM or a DCN"):
        FusedStep(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"optimizer \(RMSprop\) must be torch.optim's SGD, Adagrad or Adam"):
        FusedStep(model, torch.optim.RMSprop(model.parameters()))
    with pytest.raises(ValueError, match=r"weight_decay \(0.1\) of the optimizer must be 0 or False"):
        FusedStep(model, torch.optim.Adam(model.parameters(), weight_decay=0.1))
    groups = [{"params": [p]} for p in model.parameters()]
    with pytest.raises(ValueError, match=rf"optimizer has {len(groups)} groups but must have one"):
        FusedStep(model, torch.optim.SGD(groups))


def test_wrong_inputs_are_named() -> None:
    model = network("dcn")
    (dense, vectors, labels), total = batch(model, 5), torch.zeros((), dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match=r"dense has shape \(5, 2\) but must be \[B, 13\]"):
        FusedStep(model)(dense[:, :2], vectors, labels, total)
    with pytest.raises(ValueError, match=r"gave shape \(5, 3\) but must give 17 columns"):
        FusedStep(model)(dense, vectors[:, :3], labels, total)
    with pytest.raises(ValueError, match=r"labels has shape \(4,\) but must be \[5\]"):
        FusedStep(model)(dense, vectors, labels[:4], total)


def test_it_is_for_small_batches_on_a_gpu() -> None:
    assert not can_fuse(NETWORKS["dlrm"](), 128)
    assert can_fuse(network("dlrm"), 128) == (DEVICE == "cuda")
    assert not can_fuse(network("dcn"), 10**6) and not can_fuse(nn.Linear(2, 2), 1)
