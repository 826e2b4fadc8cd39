"""What only a GPU shows: ids out of range, CUDA graphs, the compiler, deterministic mode; run by ``pytest -m gpu``."""

import subprocess
import sys
import warnings
from typing import Literal

import pytest
import torch
from torch import Tensor

import quorem
from quorem import optim

pytestmark = pytest.mark.gpu


def collection(**options: object) -> quorem.EmbeddingCollection:
    torch.manual_seed(0)
    tables = [
        quorem.Table("user", 5000, 16, quorem.QR(4)),
        quorem.Table("item", 900, 16, quorem.GeneralizedQR(3, operation="add")),
        quorem.Table("shop", 300, 16, quorem.Path(4, (8,), force=True)),
        quorem.Table("day", 7, 16, quorem.Full()),
    ]
    return quorem.EmbeddingCollection(tables, device="cuda", **options)  # type: ignore[arg-type]


def batch(b: int = 200) -> Tensor:
    return torch.stack([torch.randint(n, (b,), device="cuda") for n in (5000, 900, 300, 7)], 1)


def test_an_id_out_of_range_warns_and_gives_zeros() -> None:
    module, ids = collection(), batch()
    ids[3, 0], ids[4, 2] = 5000, -1
    with pytest.warns(UserWarning, match="2 ids out of range in table user, table item"):
        out = module(ids)
    assert not out[3, 0].any() and not out[4, 2].any() and out[3, 1].any()
    out.sum().backward()
    clean = ids.clone()
    clean[3, 0], clean[4, 2] = 0, 0
    dense = module.to_dense()
    truth = dense["user"][clean[:, 0]] * (torch.arange(200, device="cuda") != 3)[:, None]
    torch.testing.assert_close(out[:, 0], truth)
    assert module.warn_invalid_ids() == 2


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_an_id_out_of_range_is_left_out_of_its_bag(mode: Literal["sum", "mean", "max"]) -> None:
    table = quorem.EmbeddingBag(50, 4, quorem.QR(4), mode=mode, device="cuda")
    torch.nn.init.uniform_(table.stored, -2, -1)
    table.stored.data[-4:] = 1  # the remainders: vectors are negative, so that a vector of zeros would be the maximum
    ids = torch.tensor([3, 50, 7, -1, 9], device="cuda")
    with pytest.warns(UserWarning, match="2 ids out of range"):
        out = table(ids, torch.tensor([0, 3], device="cuda"))
    expected = table(ids[[0, 2, 4]], torch.tensor([0, 2], device="cuda"))
    torch.testing.assert_close(out, expected)
    assert (out < 0).all()


def test_trust_says_nothing_and_gives_zeros() -> None:
    module, ids = collection(on_invalid_id="trust"), batch()
    ids[3, 0] = 5000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not module(ids)[3, 0].any()
    assert int(module.invalid_ids) == 0


def test_raise_stops_the_process_with_a_device_assert() -> None:
    program = (
        "import torch, quorem\n"
        "table = quorem.Embedding(10, 4, quorem.Full(), device='cuda', on_invalid_id='raise')\n"
        "table(torch.tensor([1, 11], device='cuda'))\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "out of range" in done.stderr + done.stdout


@pytest.mark.parametrize("rule", [optim.SGD, optim.Adagrad, optim.RowWiseAdagrad, optim.Adam, optim.AMSGrad])
def test_steps_in_a_graph_equal_steps_on_the_cpu(rule: type) -> None:
    module = collection()
    twin = collection().cpu()
    twin.load_state_dict(module.state_dict())
    for each in (module, twin):
        optim.apply_in_backward(each, rule, lr=0.01)
    batches = [batch() for _ in range(6)]
    grad = torch.randn(200, 4, 16, device="cuda")
    ids = batches[0].clone()

    def step() -> None:
        module(ids).backward(grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for each in batches[1:]:
        ids.copy_(each)
        graph.replay()
    for each in batches:
        twin(each.cpu()).backward(grad.cpu())
    for (name, mine), (_, truth) in zip(module.named_tables(), twin.named_tables(), strict=True):
        torch.testing.assert_close(
            mine.cpu(), truth, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_compiles_whole() -> None:
    module, ids = collection(on_invalid_id="trust"), batch()
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(compiled(ids), module(ids))
    compiled(ids).square().sum().backward()
    mine, module.stored.grad = module.stored.grad, None
    module(ids).square().sum().backward()
    torch.testing.assert_close(mine, module.stored.grad)


def test_deterministic_mode_gives_the_same_bits_twice() -> None:
    module, ids = collection(on_invalid_id="trust"), batch(5000)
    grad = torch.randn(5000, 4, 16, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        gradients = []
        for _ in range(2):
            module.stored.grad = None
            module(ids).backward(grad)
            gradients.append(module.stored.grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("rule", [optim.Adagrad, optim.AMSGrad])
def test_what_is_remembered_of_steps_is_of_their_tensors(rule: type) -> None:
    """Other optimizers, batch sizes and modules, whose tensors may lie where freed ones lay, start afresh."""
    module = collection()
    start = module.stored.detach().clone()
    ids = [batch(b) for b in (200, 64, 200, 64, 7)]

    def trained() -> Tensor:
        with torch.no_grad():
            module.stored.copy_(start)
        optimizer = optim.apply_in_backward(module, rule, lr=0.05)
        for rows in ids * 3:
            module(rows).square().sum().backward()
        optimizer.flush()
        optimizer.remove()
        module.zero_grad()
        return module.stored.detach().clone()

    first = trained()
    for _ in range(3):
        torch.testing.assert_close(trained(), first, rtol=1e-4, atol=1e-5)
    other = collection()
    with torch.no_grad():
        other.stored.copy_(start)
        for mine, theirs in zip(other.parameters(), module.parameters(), strict=True):
            if mine is not other.stored:
                mine.copy_(theirs)
    module = other
    torch.testing.assert_close(trained(), first, rtol=1e-4, atol=1e-5)
