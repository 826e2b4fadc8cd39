"""Steps on dense gradients, several parameters to a launch, against torch: in Triton's interpreter, or on a GPU."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import quorem
from quorem import optim

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.dense import foreach, foreach_kernels

pytestmark = pytest.mark.kernels(device="gpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (1000, 7, 1, 5000)
BOUND = 2e-6  # of 20 steps, each rounded by some 2^-24
OPTIMIZERS: dict[str, tuple[type, type, dict[str, object]]] = {
    "sgd": (optim.SGD, torch.optim.SGD, {}),
    "adagrad": (optim.Adagrad, torch.optim.Adagrad, {"initial_accumulator_value": 0.02}),
    "adagrad, lr_decay": (optim.Adagrad, torch.optim.Adagrad, {"lr_decay": 0.3, "eps": 1e-3}),
    "row-wise adagrad": (optim.RowWiseAdagrad, torch.optim.Adagrad, {}),
    "adam": (optim.Adam, torch.optim.Adam, {"betas": (0.8, 0.95)}),
    "lazy adam": (optim.LazyAdam, torch.optim.Adam, {"eps": 1e-3}),
    "amsgrad": (optim.AMSGrad, torch.optim.Adam, {"betas": (0.5, 0.7), "eps": 1e-3}),
}


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of parameters of the launches; without a GPU tensors of the CPU are taken for its own."""
    if DEVICE == "cpu":
        monkeypatch.setattr(foreach, "on_gpu", lambda tensor: type(tensor) in (nn.Parameter, Tensor))
    counts, plain = [], foreach_kernels.launch

    def launch(*arguments, **constants):  # type: ignore[no-untyped-def]
        counts.append(constants["COUNT"])
        plain(*arguments, **constants)

    monkeypatch.setattr(foreach_kernels, "launch", launch)
    return counts


def parameters(sizes: tuple[int, ...]) -> list[nn.Parameter]:
    torch.manual_seed(len(sizes))
    return [nn.Parameter(torch.randn(n).to(DEVICE)) for n in sizes]


def pair(name: str, sizes: tuple[int, ...]) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """quorem's optimizer in float32 and torch's in float64, of equal parameters."""
    ours, theirs, options = OPTIMIZERS[name]
    more = {"amsgrad": True} if name == "amsgrad" else {}
    mine = parameters(sizes)
    exact = [nn.Parameter(p.detach().double()) for p in mine]
    return ours(mine, lr=0.1, **options), theirs(exact, lr=0.1, **options, **more)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def give_gradients(optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    """Equal ones to each, between guards of NaN that no kernel may take."""
    torch.manual_seed(seed)
    for same in zip(*map(params_of, optimizers), strict=True):
        values = torch.randn(same[0].shape)
        for p in same:
            guarded = torch.full((p.numel() + 64,), float("nan"), dtype=p.dtype, device=p.device)
            first = 32 + seed % 2  # aligned to vectors or not
            p.grad = guarded[first : first + p.numel()].view(p.shape).copy_(values)


def steps(optimizers: list[torch.optim.Optimizer], count: int = 20, seed: int = 0) -> None:
    for step in range(count):
        give_gradients(optimizers, 100 * seed + step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * 0.9**step
            optimizer.step()


def assert_close(mine: Tensor, truth: Tensor, name: str, least: float = 0.0) -> None:
    assert mine.isfinite().all() and mine.shape == truth.shape, name
    error = (mine.double().to(truth.device) - truth).norm()
    size = max(float(truth.norm()), least)
    assert error <= BOUND * size, f"{name}: {error:.2e} of {size:.2e}"


def assert_same_run(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Equal parameters, and equal states under equal names."""
    for p, q in zip(params_of(ours), params_of(theirs), strict=True):
        drawn = p.numel() ** 0.5  # its norm at the start: one that ends near zero was rounded on its way there
        assert_close(p.detach(), q.detach(), f"parameter {tuple(p.shape)}", drawn)
        assert ours.state[p].keys() == theirs.state[q].keys()
        for key, value in theirs.state[q].items():
            assert_close(ours.state[p][key], value, f"{key} of {tuple(p.shape)}")


@pytest.mark.parametrize("count", [1, 2, 4, 8, 9])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_torchs(name: str, count: int, launches: list[int]) -> None:
    ours, theirs = pair(name, (SIZES * 3)[:count])
    steps([ours, theirs], 20 if count == 4 or DEVICE == "cuda" else 2)
    assert_same_run(ours, theirs)
    assert launches[:2] == ([8, 1] if count == 9 else [count, count])


def test_a_program_takes_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreach_kernels, "PROGRAMS", 3)
    ours, theirs = pair("amsgrad", (5000, 0, 1536, 1))
    steps([ours, theirs], 3)
    assert_same_run(ours, theirs)


def test_elements_beside_a_parameter_are_left_alone() -> None:
    ends = torch.full((3000,), float("nan"), device=DEVICE)
    inner = ends[64:-64]
    p = nn.Parameter(inner.copy_(torch.ones_like(inner)))
    optimizer = optim.Adagrad([p], lr=0.1)
    give_gradients([optimizer], 0)
    optimizer.step()
    assert ends[:64].isnan().all() and ends[-64:].isnan().all() and ends[64:-64].isfinite().all()


@pytest.mark.parametrize("name", ["sgd", "adagrad, lr_decay", "adam", "amsgrad"])
def test_checkpoints_pass_between_torch_and_quorem(name: str) -> None:
    ours, theirs = pair(name, SIZES)
    steps([ours, theirs], 3)
    for seed in (1, 2):  # there and back: another of each takes up what the other kind has saved
        again, other = pair(name, SIZES)
        for taker, giver in ((again, theirs), (other, ours)):
            taker.load_state_dict(copy.deepcopy(giver.state_dict()))
            for p, q in zip(params_of(taker), params_of(giver), strict=True):
                p.data.copy_(q.data)
            for group in taker.param_groups:
                group["foreach"] = None
        ours, theirs = again, other
        steps([ours, theirs], 3, seed)
    assert_same_run(ours, theirs)


@pytest.mark.parametrize("name", ["adagrad, lr_decay", "amsgrad"])
def test_saved_and_copied_optimizers_go_on_with_the_same_bits(name: str) -> None:
    ours, _ = pair(name, SIZES)
    steps([ours], 3)
    loaded, copied = pair(name, SIZES)[0], copy.deepcopy(ours)
    loaded.load_state_dict(copy.deepcopy(ours.state_dict()))
    for p, q in zip(params_of(loaded), params_of(ours), strict=True):
        p.data.copy_(q.data)
    steps([ours, loaded, copied], 3, seed=1)
    for other in (loaded, copied):
        for p, q in zip(params_of(ours), params_of(other), strict=True):
            assert torch.equal(p, q)
            assert all(torch.equal(value, other.state[q][key]) for key, value in ours.state[p].items())


def test_a_parameter_without_a_gradient_keeps_its_own_count() -> None:
    ours, theirs = pair("adam", SIZES)
    for step in range(6):
        give_gradients([ours, theirs], step)
        for optimizer in (ours, theirs):
            for i, p in enumerate(params_of(optimizer)):
                if step % (i + 1):
                    p.grad = None
            optimizer.step()
    assert_same_run(ours, theirs)
    assert [int(ours.state[p]["step"]) for p in params_of(ours)] == [6, 3, 2, 2]


def test_groups_have_their_own_rates_and_constants(launches: list[int]) -> None:
    def grouped(params: list[nn.Parameter]) -> list[dict[str, object]]:
        return [{"params": params[:2]}, {"params": params[2:], "lr": 0.01, "eps": 0.1}]

    mine = parameters(SIZES)
    exact = [nn.Parameter(p.detach().double()) for p in mine]
    ours, theirs = optim.Adagrad(grouped(mine), lr=0.2), torch.optim.Adagrad(grouped(exact), lr=0.2)
    for step in range(3):
        give_gradients([ours, theirs], step)
        ours.step()
        theirs.step()
    assert_same_run(ours, theirs)
    assert launches == [2] * 6


def transposed(p: Tensor) -> Tensor:
    return torch.randn(p.shape[1], p.shape[0], device=DEVICE).T


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: torch.randn(6, 5, dtype=torch.float64), {}),
        (lambda: torch.randn(6, 5, dtype=torch.bfloat16), {}),
        (lambda: torch.randn(5, 6).T, {}),
        (lambda: torch.randn(6, 5), {"weight_decay": 0.1}),
    ],
    ids=["float64", "bfloat16", "not contiguous", "weight decay"],
)
def test_what_the_kernel_does_not_take_is_left_to_torch(
    make: Callable[[], Tensor], options: dict[str, float], launches: list[int]
) -> None:
    torch.manual_seed(0)
    p, taken = nn.Parameter(make().to(DEVICE)), nn.Parameter(torch.ones(3, device=DEVICE))
    q = nn.Parameter(p.detach().clone())
    ours, theirs = optim.Adam([{"params": [p], **options}, {"params": [taken]}]), torch.optim.Adam([q], **options)
    for _ in range(3):
        q.grad = torch.randn_like(q)
        p.grad, taken.grad = q.grad.clone(), torch.ones_like(taken)
        ours.step()
        theirs.step()
    assert torch.equal(p, q) and launches == [1, 1, 1] and (taken < 1).all()
    assert int(ours.state[p]["step"]) == int(ours.state[taken]["step"]) == 3


def test_a_parameter_may_change_between_the_kernel_and_torch(launches: list[int]) -> None:
    """Its gradient is contiguous in one step and not in the next; the state goes on."""
    p = nn.Parameter(torch.randn(6, 5, device=DEVICE))
    q = nn.Parameter(p.detach().double())
    ours, theirs = optim.AMSGrad([p], lr=0.1), torch.optim.Adam([q], lr=0.1, amsgrad=True)
    for step in range(6):
        p.grad = transposed(p) if step % 2 else torch.randn_like(p)
        q.grad = p.grad.double()
        ours.step()
        theirs.step()
    assert_same_run(ours, theirs)
    assert launches == [1, 1, 1]


def test_tables_with_sparse_gradients_are_updated_beside(launches: list[int]) -> None:
    def model(sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        table = quorem.Embedding(50, 8, quorem.QR(4), sparse=sparse, device=DEVICE)
        return nn.Sequential(table, nn.Linear(8, 3, device=DEVICE))

    mine, exact = model(True), model(False).double()
    exact.load_state_dict({k: v.double() for k, v in mine.state_dict().items()})
    ours, theirs = optim.AMSGrad(mine.parameters()), torch.optim.Adam(exact.parameters(), amsgrad=True)
    for step in range(5):
        ids = torch.arange(step, step + 9, device=DEVICE)
        for m, optimizer in ((mine, ours), (exact, theirs)):
            optimizer.zero_grad()
            m(ids).square().sum().backward()
            optimizer.step()
    ours.flush()
    for (key, a), b in zip(mine.named_parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
    assert launches == [2] * 5
    # torch's foreach takes the steps of either kind
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    theirs.param_groups[0]["foreach"] = True
    theirs.step()
    assert {int(own["step"]) for own in theirs.state.values()} == {6}


def test_a_graph_from_before_the_step_is_refused() -> None:
    p = nn.Parameter(torch.ones(5, device=DEVICE))
    loss = (p**2).sum()
    p.grad = torch.ones_like(p)
    optim.SGD([p], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_in_a_graph_are_counted_there(name: str) -> None:
    ours, theirs = pair(name, SIZES * 3)
    give_gradients([ours, theirs], 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ours.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    theirs.step()
    for step in range(19):
        ours.lr = theirs.param_groups[0]["lr"] = 0.1 * 0.9**step
        graph.replay()
        theirs.step()
    assert_same_run(ours, theirs)


@pytest.mark.gpu
def test_large_parameters_beside_small_ones_on_a_gpu() -> None:
    ours, theirs = pair("amsgrad", (5_000_001, 3, 2**21, 1))
    steps([ours, theirs], 5)
    assert_same_run(ours, theirs)
