"""The compiled CPU kernels against ``ops.reference`` and ``ops.rules``, on memory that starts as NaN."""

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from quorem import QR, ChineseRemainder, Custom, Full, GeneralizedQR, Hash, Scheme
from quorem.ops import cpu, layout, lookup, reference, replay, update
from quorem.partitions import ExplicitPartition, Partition

pytest.importorskip("numba")
from quorem.ops.cpu import compiled, threads

pytestmark = pytest.mark.kernels(device="cpu")

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [1, 7, 63, 1000]
CAR = Custom((ExplicitPartition([0, 1, 1, 0, 2, 2, 3, 3]), Partition(1, 2)), operation="add", check=False, force=True)

# (scheme, number of ids, padding id); with a width of W each
MIX: list[tuple[Scheme, int, int | None]] = [
    (QR(4), 1000, None),
    (QR(4, operation="add", permute=7), 5000, 3),
    (QR(60, operation="feature"), 3001, None),
    (Full(permute=1), 50, 0),
    (GeneralizedQR(3), 100_000, 99_999),
    (GeneralizedQR(4, num_rows=500, operation="mult"), 40_000, None),
    (ChineseRemainder(3, operation="add"), 30_000, None),
    (Hash(7), 700, 5),
    (CAR, 8, None),
    (Full(), 1, None),
]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh memory holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def many_threads(monkeypatch):
    """Four threads for any amount of work."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "GRAIN", 1)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Case:
    """Tables of a mix of schemes, and batches for them."""

    def __init__(self, mix=MIX, width=16, dtype=torch.float32, widths=None):
        torch.manual_seed(0)
        widths = widths or [width] * len(mix)
        self.specs = [scheme.spec(n, w) for (scheme, n, _), w in zip(mix, widths, strict=True)]
        self.laid = layout.build(self.specs, [pad for _, _, pad in mix])
        self.integers = (self.laid.slots, self.laid.parts, self.laid.maps, self.laid.spans)
        self.weight = torch.randn(self.laid.num_rows, self.laid.width, dtype=torch.float64).to(dtype)
        self.n = torch.tensor([n for _, n, _ in mix])
        self.padding = torch.tensor([-1 if pad is None else pad for _, _, pad in mix])

    def _draw(self, features: Tensor) -> Tensor:
        """Ids of the given features: mostly low ones, the last one and padding among them."""
        n, shape = self.n[features], features.shape
        ids = (torch.rand(shape, dtype=torch.float64) ** 3 * n).long()
        ids = torch.where(torch.rand(shape) < 0.1, n - 1, ids)
        pad = self.padding[features]
        return torch.where((torch.rand(shape) < 0.2) & (pad >= 0), pad, ids)

    def ids(self, size: int, dtype=torch.int64) -> Tensor:
        return self._draw(torch.arange(len(self.n)).expand(size, -1)).to(dtype)

    def bags(self, size: int, longest: int = 5, dtype=torch.int64) -> tuple[Tensor, Tensor]:
        lengths = torch.randint(0, longest + 1, (size * len(self.n),))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        features = torch.arange(len(self.n)).repeat_interleave(size).repeat_interleave(lengths)
        return self._draw(features).to(dtype), offsets

    def grad(self, size: int) -> Tensor:
        return torch.randn(size, len(self.laid.slots), self.laid.width, dtype=torch.float64).to(self.weight.dtype)


def same(gradient: str, actual: Tensor, expected: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, msg=lambda text: f"{gradient}: {text}", **tolerance)


def check_lookup(case: Case, ids: Tensor) -> None:
    out = torch.ops.quorem.lookup(ids, case.weight, *case.integers, names="")
    same("out", out, reference.lookup(ids, case.weight, *case.integers))
    grad = case.grad(len(ids))
    dense = torch.ops.quorem.lookup_backward(grad, ids, case.weight, *case.integers)
    rows, values = reference.lookup_row_grads(grad, ids, case.weight, *case.integers)
    expected = reference.accumulate(rows, values, case.weight)
    same("weight", dense, expected)
    rows, values = torch.ops.quorem.lookup_row_grads(grad, ids, case.weight, *case.integers)
    same("sparse weight", each_once(rows, values, case.weight), expected)


def each_once(rows: Tensor, values: Tensor, weight: Tensor) -> Tensor:
    """The dense gradient of row gradients in which no row is repeated."""
    assert len(rows.unique()) == len(rows) and (rows >= 0).all()
    return reference.accumulate(rows, values, weight)


def check_bag(case: Case, ids: Tensor, offsets: Tensor, weighted: bool, mean: bool) -> None:
    sample = torch.rand(len(ids)).to(case.weight.dtype) if weighted else None
    args = (ids, offsets, sample, case.weight, *case.integers)
    out = torch.ops.quorem.bag(*args, mean=mean, names="")
    same("out", out, reference.bag(*args, mean=mean))
    grad = case.grad(len(out))
    dense = torch.ops.quorem.bag_backward(grad, *args, mean=mean)
    expected = reference.accumulate(*reference.bag_row_grads(grad, *args, mean=mean), case.weight)
    same("weight", dense, expected)
    same("sparse weight", each_once(*torch.ops.quorem.bag_row_grads(grad, *args, mean=mean), case.weight), expected)
    args = (grad, ids, offsets, case.weight, *case.integers)
    dsample = torch.ops.quorem.bag_sample_weights_backward(*args, mean=mean)
    same("sample_weights", dsample, reference.bag_sample_weights_grad(*args, mean=mean).to(dsample.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_lookup(dtype, size):
    case = Case(dtype=dtype)
    check_lookup(case, case.ids(size))
    check_lookup(case, case.ids(size, torch.int32))


@pytest.mark.parametrize("width", [1, 3, 4, 16, 60, 100])
def test_lookup_of_any_width(width):
    case = Case(width=width)
    check_lookup(case, case.ids(100))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 16, 32, 48])
def test_lookup_streamed_past_the_caches(dtype, width, monkeypatch):
    from quorem.ops.cpu import launch

    monkeypatch.setattr(launch, "STREAMED", 0)
    case = Case(width=width, dtype=dtype)
    check_lookup(case, case.ids(100))


def test_lookup_of_mixed_widths():
    case = Case([(QR(4), 1000, None), (QR(4, operation="add"), 500, 1), (Full(), 60, None)], widths=[16, 64, 24])
    assert case.laid.width == 8
    check_lookup(case, case.ids(130))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_bag(dtype, weighted, mean):
    case = Case(dtype=dtype, width=20)
    for size in (1, 7, 63):
        check_bag(case, *case.bags(size), weighted, mean)
    check_bag(case, *case.bags(7, dtype=torch.int32), weighted, mean)


def test_bags_longer_than_a_block():
    case = Case(MIX[:3], width=20)
    lengths = torch.tensor([0, 1, 63, 64, 65, 0, 128, 300, 1000] * 3)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = case._draw(torch.arange(3).repeat_interleave(9).repeat_interleave(lengths))
    check_bag(case, ids, offsets, weighted=True, mean=True)


def test_ids_past_the_last_offset_count_for_nothing():
    case = Case(MIX[:2])
    ids, offsets = case.bags(5)
    ids = torch.cat([ids, torch.tensor([10**9, -5])])
    out = torch.ops.quorem.bag(ids, offsets, None, case.weight, *case.integers, mean=True, names="")
    expected = torch.ops.quorem.bag(ids[:-2], offsets, None, case.weight, *case.integers, mean=True, names="")
    assert torch.equal(out, expected)
    grad = case.grad(5)
    args = (grad, ids, offsets, case.weight, *case.integers)
    assert torch.equal(torch.ops.quorem.bag_sample_weights_backward(*args, mean=True)[-2:], torch.zeros(2))


@pytest.mark.parametrize("scheme", [Hash(2**24), ChineseRemainder(3, num_rows=50_000), QR(2**20)])
def test_ids_past_two_to_the_31(scheme):
    n = 2**40
    case = Case([(scheme, n, None)], width=4)
    ids = torch.randint(2**31, n, (500, 1))
    check_lookup(case, torch.cat([ids, torch.tensor([[n - 1], [2**31], [2**32], [2**33 + 1]])]))


@settings(max_examples=60)
@given(st.data())
def test_division_is_exact(data):
    n = data.draw(st.sampled_from([2**31, 2**40, 2**52, 2**52 + 1, 2**60]))
    sizes = data.draw(st.lists(st.integers(2, 2000), min_size=1, max_size=3))
    strides = data.draw(st.lists(st.integers(1, n - 1), min_size=len(sizes), max_size=len(sizes)))
    parts = tuple(Partition(stride, size) for stride, size in zip(strides, sizes, strict=True))
    case = Case([(Custom(parts, operation="add", check=False), n, None)], width=1)
    near = [q * d + e for d in [*sizes, *strides] for q in (1, n // d // 2, n // d - 1, n // d) for e in (-1, 0, 1)]
    ids = torch.tensor([[i] for i in [*near, 0, n - 1] if 0 <= i < n])
    check_lookup(case, ids)


@pytest.mark.parametrize("value", [0, 999])
def test_equal_ids(value):
    case = Case(MIX[:2])
    ids = torch.full((1000, 2), value)
    check_lookup(case, ids)
    check_bag(case, ids.T.flatten(), torch.arange(0, 2001, 10), weighted=False, mean=True)


def test_empty_batches():
    case = Case()
    check_lookup(case, torch.empty(0, len(case.n), dtype=torch.int64))
    check_bag(case, torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), weighted=True, mean=True)
    offsets = torch.zeros(3 * len(case.n) + 1, dtype=torch.int64)
    check_bag(case, torch.empty(0, dtype=torch.int64), offsets, weighted=False, mean=True)


def test_layouts_in_memory():
    case = Case(MIX[:3])
    wide = case.ids(90)
    check_lookup(case, wide[::3])
    check_lookup(case, wide.T.contiguous().T)
    strided = torch.stack([case.weight, torch.full_like(case.weight, torch.nan)], 1)[:, 0]
    args = (wide, strided, *case.integers)
    assert torch.equal(torch.ops.quorem.lookup(*args, names=""), reference.lookup(wide, case.weight, *case.integers))
    grad = torch.ones(1).expand(90, len(case.laid.slots), 16)
    expected = reference.accumulate(*reference.lookup_row_grads(grad, wide, case.weight, *case.integers), case.weight)
    same("weight", torch.ops.quorem.lookup_backward(grad, *args), expected)


def test_nan_and_infinity_pass_through():
    case = Case([(QR(4), 100, None)], width=5, dtype=torch.bfloat16)
    case.weight[3], case.weight[4], case.weight[26] = torch.nan, torch.inf, 1e38
    ids = torch.arange(100)[:, None]
    out = torch.ops.quorem.lookup(ids, case.weight, *case.integers, names="")
    torch.testing.assert_close(out, reference.lookup(ids, case.weight, *case.integers), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("value", [-1, 50, 2**31 - 1])
def test_ids_out_of_range(value, dtype):
    case = Case([(QR(4), 1000, None), (Full(), 50, None)])
    names = "table user\ntable day"
    ids = case.ids(200, dtype)
    ids[150, 1] = value
    with pytest.raises(IndexError, match=rf"id {value} is outside \[0, 50\) of table day"):
        torch.ops.quorem.lookup(ids, case.weight, *case.integers, names=names)
    offsets = torch.arange(0, 401, 5)
    args = (ids.T.flatten(), offsets, None, case.weight, *case.integers)
    with pytest.raises(IndexError, match=rf"id {value} is outside \[0, 50\) of table day"):
        torch.ops.quorem.bag(*args, mean=False, names=names)


def test_invalid_ids_get_no_gradient():
    case = Case([(QR(4), 1000, None)])
    ids = torch.tensor([[5], [10**12], [-7], [999]])
    grad = case.grad(4)
    dense = torch.ops.quorem.lookup_backward(grad, ids, case.weight, *case.integers)
    assert torch.equal(dense, torch.ops.quorem.lookup_backward(grad[[0, 3]], ids[[0, 3]], case.weight, *case.integers))


@pytest.mark.parametrize("mix", [MIX, MIX[:1]], ids=["many slots", "one slot"])
def test_threads_change_no_bit(mix, monkeypatch, many_threads):
    case = Case(mix)
    ids, grad = case.ids(1000), case.grad(1000)
    bag_ids, offsets = case.bags(300)
    sample = torch.rand(len(bag_ids))

    def run() -> list[Tensor]:
        rest = (case.weight, *case.integers)
        weight, sum_ = case.weight.clone(), torch.zeros_like(case.weight)
        step, lr = torch.tensor(0), torch.tensor(0.1, dtype=torch.float64)
        options = {"rule": "adagrad", "hyper": [0.0, 1e-10]}
        torch.ops.quorem.lookup_update_(grad, ids, weight, lr, [sum_, step], *case.integers, **options)
        rows = torch.randint(0, len(weight), (2000,), generator=torch.Generator().manual_seed(0))
        torch.ops.quorem.rows_update_(rows, torch.ones(2000, 16), weight, lr, [sum_, step], **options)
        return [
            torch.ops.quorem.lookup(ids, *rest, names=""),
            torch.ops.quorem.lookup_backward(grad, ids, *rest),
            each_once(*torch.ops.quorem.lookup_row_grads(grad, ids, *rest), case.weight),
            torch.ops.quorem.bag(bag_ids, offsets, sample, *rest, mean=True, names=""),
            torch.ops.quorem.bag_backward(grad[:300], bag_ids, offsets, sample, *rest, mean=True),
            torch.ops.quorem.bag_sample_weights_backward(grad[:300], bag_ids, offsets, *rest, mean=True),
            weight,
            sum_,
        ]

    several = run()
    again = run()
    torch.set_num_threads(1)
    alone = run()
    names = ("lookup", "weight", "sparse weight", "bag", "bag weight", "sample_weights", "updated", "state")
    for name, a, b, c in zip(names, several, again, alone, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c), name


def test_calls_from_several_threads(many_threads):
    case = Case()
    batches = [case.ids(200) for _ in range(8)]
    expected = [reference.lookup(ids, case.weight, *case.integers) for ids in batches]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda ids: torch.ops.quorem.lookup(ids, case.weight, *case.integers, names=""), batches)
        for out, ref in zip(found, expected, strict=True):
            same("out", out, ref)


def rule_state(rule: str, weight: Tensor, laid: layout.Layout) -> tuple[list[Tensor], list[float]]:
    """State and constants of a rule, as ``ops.update`` lists them."""
    number, step = reference.accumulator(weight), torch.tensor(0)
    zeros = [torch.zeros(weight.shape, dtype=number) for _ in range(3 if "amsgrad" in rule else 2)]
    if rule == "sgd":
        return [], []
    if rule == "adagrad":
        return [zeros[0], step], [0.01, 1e-10]
    if rule == "rowwise_adagrad":
        extents = torch.tensor([[e.base, e.pitch] for feature in laid.extents for e in feature])
        return [zeros[0][:, 0].clone(), step, extents], [0.01, 1e-10]
    if rule.startswith("lazy"):
        return [*zeros, step], [0.9, 0.99, 1e-8]
    hyper = replay.constants(0.9, 0.99, 1e-8, weight.dtype, rule == "amsgrad")
    last = torch.zeros(len(weight), dtype=torch.int32)
    return [*zeros, last, *replay.empty_times(step, hyper, weight.dtype)], hyper


RULES = ["sgd", "adagrad", "rowwise_adagrad", "adam", "amsgrad", "lazy_adam", "lazy_amsgrad"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_updates(rule, dtype):
    mix = [MIX[0], MIX[1], MIX[4], MIX[8]]
    case = Case(mix, dtype=dtype, widths=[16, 48, 16, 32])
    state, hyper = rule_state(rule, case.weight, case.laid)
    lr = torch.tensor(0.05, dtype=torch.float64)
    weight = case.weight

    def take(name: str, *before: Tensor | None, after: tuple[Tensor, ...] = case.integers, **options: object) -> None:
        """One op, fused and by its reference; both go on from what the reference makes of the state."""
        copies = [(weight.clone(), [t.clone() for t in state]) for _ in range(2)]
        for run, (target, own) in zip((getattr(torch.ops.quorem, name), update._bodies[name]), copies, strict=True):
            rate = [] if "catch_up" in name else [lr]
            run(*before, target, *rate, own, *after, rule=rule, hyper=hyper, **options)
            if "catch_up" in name:  # which rows it brings up to date beyond those that valid ids read is left open
                update._bodies["rows_catch_up_"](None, target, own, rule=rule, hyper=hyper)
        (fused, fused_state), (expected, expected_state) = copies
        same(f"{name} weight", fused, expected)
        for i, (a, b) in enumerate(zip(fused_state, expected_state, strict=True)):
            same(f"{name} state[{i}]", a, b)
        weight.copy_(expected)
        for old, new in zip(state, expected_state, strict=True):
            old.copy_(new)

    for step in range(12):
        clip = {"clip_value": 0.2} if step % 3 == 1 else {}
        scale = {"loss_scale": torch.tensor(4.0)} if step % 4 == 2 else {}
        ids, grad = case.ids(40), case.grad(40)
        if step == 6:
            grad[3] = torch.inf  # overflowed, where there is a loss scale
        if rule in ("adam", "amsgrad"):
            take("lookup_catch_up_", ids)
        take("lookup_update_", grad, ids, **clip, **scale)
        ids, offsets = case.bags(15)
        sample = torch.rand(len(ids)).to(dtype)
        if rule in ("adam", "amsgrad"):
            take("bag_catch_up_", ids, offsets)
        take("bag_update_", case.grad(15), ids, offsets, sample, mean=step % 2 == 0, **clip, **scale)
        rows = torch.randint(-1, len(case.weight), (30,))
        values = torch.randn(30, case.laid.width).to(reference.accumulator(case.weight))
        take("rows_update_", rows, values, after=(), **clip)
        if rule in ("adam", "amsgrad"):
            take("rows_catch_up_", torch.randint(0, len(case.weight), (20,)), after=())
    if rule in ("adam", "amsgrad"):
        take("rows_catch_up_", None, after=())


def test_catch_up_reaches_every_row_that_is_read():
    case = Case(MIX[:2])
    state, hyper = rule_state("amsgrad", case.weight, case.laid)
    options = {"rule": "amsgrad", "hyper": hyper}
    *_, last, step, _, _ = state
    lr, ids = torch.tensor(0.1, dtype=torch.float64), case.ids(100)
    for batch in (ids, case.ids(3), case.ids(3)):
        torch.ops.quorem.lookup_update_(case.grad(len(batch)), batch, case.weight, lr, state, *case.integers, **options)
    assert (last[last > 0] < step).any()
    torch.ops.quorem.lookup_catch_up_(ids, case.weight, state, *case.integers, **options)
    rows, valid = reference.rows_of(ids, *case.integers[:3])
    assert (last[rows[valid]] == step).all()


def test_updates_take_gradients_from_the_weight_as_it_was():
    case = Case([(QR(2, operation="mult", force=True), 4, None)], width=1)
    case.weight[:] = torch.tensor([[2.0], [3.0], [5.0], [7.0]])  # remainder 0, 1; quotient 0, 1
    ids, grad = torch.tensor([[0], [0], [3]]), torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    lr = torch.tensor(1.0, dtype=torch.float64)
    torch.ops.quorem.lookup_update_(grad, ids, case.weight, lr, [], *case.integers, rule="sgd", hyper=[])
    assert case.weight.flatten().tolist() == [2 - 11 * 5, 3 - 100 * 7, 5 - 11 * 2, 7 - 100 * 3]


def test_what_is_not_supported_falls_back():
    case = Case(MIX[:2])
    ids = case.ids(20)
    expected = reference.lookup(ids, case.weight, *case.integers)
    assert torch.equal(torch.ops.quorem.lookup(ids.short(), case.weight, *case.integers, names=""), expected)
    grad = case.grad(20)
    dense = torch.ops.quorem.lookup_backward(grad.double(), ids, case.weight, *case.integers)
    same("weight", dense, torch.ops.quorem.lookup_backward(grad, ids, case.weight, *case.integers))
    stored = torch.empty(2, *reversed(case.weight.shape)).transpose(1, 2)  # neither is contiguous
    weight, sum_ = stored[0].copy_(case.weight), stored[1].zero_()
    lr, options = torch.tensor(0.1, dtype=torch.float64), {"rule": "adagrad", "hyper": [0.0, 1e-10]}
    torch.ops.quorem.lookup_update_(grad, ids, weight, lr, [sum_, torch.tensor(0)], *case.integers, **options)
    fused, state = case.weight.clone(), [torch.zeros_like(case.weight), torch.tensor(0)]
    torch.ops.quorem.lookup_update_(grad, ids, fused, lr, state, *case.integers, **options)
    same("weight", weight, fused)
    same("sum", sum_, state[0])


def test_arguments_that_do_not_fit_reach_no_kernel():
    case = Case(MIX[:2])
    ids, grad = case.ids(20), case.grad(20)
    with pytest.raises((IndexError, RuntimeError)):  # the reference's own, for want of a column
        torch.ops.quorem.lookup(ids[:, :1], case.weight, *case.integers, names="")
    one = torch.ones(1, 1, 1)
    dense = torch.ops.quorem.lookup_backward(one, ids, case.weight, *case.integers)
    same("weight", dense, torch.ops.quorem.lookup_backward(torch.ones_like(grad), ids, case.weight, *case.integers))
    bag_ids, offsets = case.bags(4)
    falling = offsets.flip(0)
    args = (bag_ids, falling, None, case.weight, *case.integers)
    assert cpu.kernels()["bag"](*args, mean=True, names="") is NotImplemented
    assert cpu.kernels()["bag"](bag_ids, offsets + 10**9, *args[2:], mean=True, names="") is NotImplemented


@pytest.mark.parametrize("op", ["rows_update_", "rows_catch_up_"])
def test_rows_out_of_range(op):
    case = Case(MIX[:2])
    state, hyper = rule_state("adam", case.weight, case.laid)
    rows = torch.tensor([0, len(case.weight)])
    more = (torch.ones(2, 16),) if op == "rows_update_" else ()
    lr = (torch.tensor(0.1, dtype=torch.float64),) if op == "rows_update_" else ()
    with pytest.raises(IndexError, match=rf"rows \({len(case.weight)}\) must be below the number of rows"):
        getattr(torch.ops.quorem, op)(rows, *more, case.weight, *lr, state, rule="adam", hyper=hyper)


@pytest.mark.parametrize("hindrance", ["missing", "disabled"])
def test_without_numba_the_reference_runs(hindrance, monkeypatch):
    case = Case(MIX[:2])
    ids = case.ids(10)
    if hindrance == "missing":
        for name in [name for name in sys.modules if name.startswith("quorem.ops.cpu.launch")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "numba", None)
        monkeypatch.setitem(sys.modules, "numba.core", None)
        for launcher in ("launch", "launch_update"):
            monkeypatch.delattr(cpu, launcher)
    else:
        monkeypatch.setattr("numba.core.config.DISABLE_JIT", 1)
    cpu.kernels.cache_clear()
    try:
        assert cpu.kernels() == {}
        out = torch.ops.quorem.lookup(ids, case.weight, *case.integers, names="")
        assert torch.equal(out, reference.lookup(ids, case.weight, *case.integers))
        with pytest.raises(IndexError, match="id 1000 is outside"):
            torch.ops.quorem.lookup(torch.tensor([[1000, 0]]), case.weight, *case.integers, names="")
    finally:
        monkeypatch.undo()
        cpu.kernels.cache_clear()
    assert "lookup" in cpu.kernels()


def test_a_kernel_is_kept_under_the_stamp_of_all_its_sources(tmp_path, monkeypatch):
    from quorem.ops.cpu import forward

    names = [name for name, _, _ in compiled._stamp()]
    assert {"vector.py", "rows.py", "forward.py", "backward.py", "update.py", "catch_up.py"} <= set(names)
    assert forward.lookup._cache._cache_file._source_stamp == compiled._stamp()


def test_kernels_survive_a_fork():
    """In a process of its own, since a test runner may have threads that a fork would lose."""
    code = """
        import os, torch
        from quorem import QR, Embedding
        from quorem.ops.cpu import threads
        threads.GRAIN = 1
        torch.set_num_threads(2)
        table = Embedding(1000, 16, QR(4))
        ids = torch.arange(1000)
        with torch.no_grad():
            expected = table(ids)
            child = os.fork()
            if child == 0:
                os._exit(0 if torch.equal(table(ids), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


SCHEMES = st.sampled_from(
    [
        Full(),
        Full(permute=3),
        Hash(3),
        QR(3, operation="mult"),
        QR(5, operation="add", permute=1),
        QR(4, operation="concat", large="quotient"),
        QR(2, operation="feature"),
        GeneralizedQR(3, operation="add"),
        ChineseRemainder(2, operation="mult"),
    ]
)


@settings(max_examples=40)
@given(st.data())
def test_random_collections(data):
    features = data.draw(st.integers(1, 4))
    mix = []
    for _ in range(features):
        n = data.draw(st.integers(1, 200))
        mix.append((data.draw(SCHEMES), n, data.draw(st.none() | st.integers(0, n - 1))))
    widths = data.draw(st.lists(st.sampled_from([2, 4, 6, 16, 20]), min_size=features, max_size=features))
    case = Case(mix, widths=widths)
    check_lookup(case, case.ids(data.draw(st.integers(0, 70)), data.draw(st.sampled_from([torch.int32, torch.int64]))))
    ids, offsets = case.bags(data.draw(st.integers(0, 9)), data.draw(st.integers(0, 90)))
    check_bag(case, ids, offsets, data.draw(st.booleans()), data.draw(st.booleans()))


@pytest.mark.parametrize("bag", [False, True])
def test_dual_numbers_are_refused_without_a_gradient_too(bag):
    case = Case(MIX[:1])
    ids = case.ids(3)
    with torch.no_grad(), forward_ad.dual_level():
        weight = forward_ad.make_dual(case.weight, torch.ones_like(case.weight))
        with pytest.raises(NotImplementedError, match="jvp"):
            if bag:
                lookup.bag(ids[:, 0], torch.arange(4), None, weight, *case.integers, mean=True)
            else:
                lookup.lookup(ids, weight, *case.integers)


def test_lookup_names_what_it_registers():
    assert set(cpu.kernels()) <= set(lookup._bodies) | set(update._bodies)
