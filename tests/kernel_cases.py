"""What the tests of the fused CPU kernels share: tables of many schemes, batches for them, kernels beside the truth."""

from typing import Any

import torch
from row_rules import fresh_rule
from torch import Tensor

from quorem import QR, ChineseRemainder, Custom, Full, GeneralizedQR, Hash, HotCold, Pool, Scheme
from quorem.ops import cpu, state
from quorem.ops.declare import TRUTHS
from quorem.ops.gradients import dense_gradient
from quorem.ops.layout import build
from quorem.ops.rows import IdBatch
from quorem.ops.state import RowRule
from quorem.paper.partitions import ExplicitPartition, Partition
from quorem.paper.schemes.frequency import rank

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CAR = Custom((ExplicitPartition([0, 1, 1, 0, 2, 2, 3, 3]), Partition(1, 2)), operation="add", check=False, force=True)

# scheme, number of ids, padding id
MIX: list[tuple[Scheme, int, int | None]] = [
    (QR(4), 1000, None),
    (QR(4, operation="add"), 5000, 3),
    (QR(60, operation="feature"), 3001, None),
    (Full(), 50, 0),
    (GeneralizedQR(3), 100_000, 99_999),
    (GeneralizedQR(4, num_rows=500, operation="mult"), 40_000, None),
    (ChineseRemainder(3, operation="add"), 30_000, None),
    (Hash(7), 700, 5),
    (CAR, 8, None),
    (Full(), 1, None),
]
GROUPS = Custom((ExplicitPartition([i % 7 for i in range(45)]),), check=False)
HOT_COLD: list[tuple[Scheme, int, int | None]] = [
    (HotCold(5, cold=QR(4), force=True), 400, None),
    (HotCold(40, cold=QR(7), num_rest=30), 500, 3),
    (HotCold(4, cold=QR(4, operation="concat"), num_rest=11), 300, None),
    (HotCold(5, cold=GROUPS, num_rest=10, force=True), 60, None),
    (HotCold(20, cold=QR(4), num_rest=40, force=True), 60, None),
    (HotCold(0, cold=GeneralizedQR(3), num_rest=10), 5000, None),
    (HotCold(70, cold=Pool(300)), 9000, 100),
    (HotCold(5, cold=Pool(300), num_rest=700), 4000, None),
    (HotCold(0, cold=Pool(300)), 1000, None),
    (QR(4), 1000, 0),
]
# Tables by feature: two features read one table, of the pool's and of the others.
HOT_COLD_FEATURES = [0, 1, 2, 3, 6, 4, 7, 5, 6, 8, 9, 9]


class Case:
    """Tables of a mix of schemes, and batches for them."""

    def __init__(self, mix=MIX, width=16, dtype=torch.float32, widths=None, features=None, ranked=False, ranks=None):
        torch.manual_seed(0)
        widths = widths or [width] * len(mix)
        specs = [scheme.spec(n, w) for (scheme, n, _), w in zip(mix, widths, strict=True)]
        if ranked:
            ranks = [rank(torch.randint(0, 50, (s.num_embeddings,)), s) if s.num_own else None for s in specs]
        self.storage = build(specs, [pad for _, _, pad in mix], features, ranks)
        self.layout = self.storage.layout
        shape = (self.storage.num_rows, self.storage.width)
        self.stored = torch.randn(shape, dtype=torch.float64).to(dtype)
        tables = torch.tensor(range(len(mix)) if features is None else features)
        self.n = torch.tensor([n for _, n, _ in mix])[tables]
        self.padding = torch.tensor([-1 if pad is None else pad for _, _, pad in mix])[tables]

    def draw(self, features: Tensor) -> Tensor:
        """Ids of the given features: mostly low ones, the last one and padding among them."""
        n, shape = self.n[features], features.shape
        ids = (torch.rand(shape, dtype=torch.float64) ** 3 * n).long()
        ids = torch.where(torch.rand(shape) < 0.1, n - 1, ids)
        padding = self.padding[features]
        return torch.where((torch.rand(shape) < 0.2) & (padding >= 0), padding, ids)

    def ids(self, size: int, dtype=torch.int64) -> Tensor:
        return self.draw(torch.arange(len(self.n)).expand(size, -1)).to(dtype)

    def bags(self, size: int, longest: int = 5, dtype=torch.int64) -> tuple[Tensor, Tensor]:
        lengths = torch.randint(0, longest + 1, (size * len(self.n),))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        features = torch.arange(len(self.n)).repeat_interleave(size).repeat_interleave(lengths)
        return self.draw(features).to(dtype), offsets

    def grad(self, size: int) -> Tensor:
        shape = (size, len(self.layout.slots), self.storage.width)
        return torch.randn(shape, dtype=torch.float64).to(self.stored.dtype)


def fused(op: str, *args: Any, **options: Any) -> Any:
    """What the compiled kernel gives."""
    result = cpu.kernels()[op](*args, **options)
    assert result is not NotImplemented
    return result


def truth(op: str, *args: Any, **options: Any) -> Any:
    """What plain PyTorch gives."""
    return TRUTHS[op](*args, **options)


def same(name: str, actual: Tensor, expected: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, msg=lambda text: f"{name}: {text}", **tolerance)


def each_once(rows: Tensor, values: Tensor, stored: Tensor) -> Tensor:
    """The dense gradient of row gradients in which no row is repeated."""
    assert len(rows.unique()) == len(rows) and (rows >= 0).all()
    return dense_gradient(rows, values, stored)


def check_lookup(case: Case, ids: Tensor) -> None:
    """A lookup of single ids and its gradients, dense and sparse, against the truth."""
    check(case, IdBatch(ids))


def check_bag(case: Case, ids: Tensor, offsets: Tensor, weighted: bool, mean: bool) -> None:
    """A lookup of bags and its gradients, dense and sparse, against the truth."""
    sample_weights = torch.rand(len(ids)).to(case.stored.dtype) if weighted else None
    check(case, IdBatch(ids, offsets, sample_weights, mean))


def check(case: Case, batch: IdBatch) -> None:
    args = (batch, case.stored, case.layout)
    out = fused("lookup", *args, names="")
    same("out", out, truth("lookup", *args))
    grad = case.grad(len(out))
    expected = truth("backward", grad, *args)
    same("stored", fused("backward", grad, *args), expected)
    for run in (fused, truth):
        same("sparse stored", each_once(*run("row_grads", grad, *args), case.stored), expected)


# The rules with fused versions.
RULES = tuple(rule for rule, entry in state.RULES.items() if entry.fused)
LR = 0.05


def fresh(name: str, case: Case, betas=(0.9, 0.99), lr: float = LR, seed: int | None = None) -> RowRule:
    """A rule before its first step."""
    options = {"betas": betas} if state.RULES[name].lags else {"lr_decay": 0.01} if name != "sgd" else {}
    rule = fresh_rule(name, case.stored, lr, seed, **options)
    if name == "rowwise_adagrad":
        tables = [*case.storage.extents, *(pool.extents for pool in case.storage.pools.values())]
        extents = torch.tensor([[e.base, e.pitch] for table in tables for e in table])
        rule.state = rule.state._replace(extents=extents)
    return rule
