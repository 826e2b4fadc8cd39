"""What the tests of the GPU kernels share: where they run, how near to the truth they come, tables of every kind.

On a GPU where there is one, in Triton's interpreter elsewhere: ``TRITON_INTERPRET`` is set by conftest before Triton is
imported. The interpreter is slow, so it sees smaller batches.
"""

import torch
import torch.nn.functional as F
from row_rules import fresh_rule
from torch import Tensor

import quorem
from quorem import QR, HotCold, Pool, Table, partitions
from quorem.ops.layout import LIMIT
from quorem.ops.rows import IdBatch
from quorem.ops.state import RowRule

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
N = 300  # ids of a table of ``frequency_tables``
PLAIN = ["qr", "k3", "tiny", "sum", "wide", "pad", "map", "cat", "qr k3 tiny", "qr sum"]
FREQUENCY = ["own", "own ranked", "pool", "pool ranked", "shared"]
FEW = FREQUENCY if CUDA else ["pool ranked", "shared"]  # for the slow interpreter
SHAPES = [  # columns, batch, dtype
    (1, 7, torch.float32),
    (3, 63, torch.float64),
    (16, 1, torch.float32),
    (16, 1000 if CUDA else 130, torch.float32),
    (60, 7, torch.bfloat16),
    (100, 7, torch.float16),
    (130, 7, torch.float32),
]
ULPS = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def assert_close(actual: Tensor, truth: Tensor, dtype: torch.dtype, name: str, slack: float = 1) -> None:
    """Relative to the norm: a sum's rounding is relative to its terms, not to itself."""
    assert actual.shape == truth.shape and actual.isfinite().all(), name
    error = (actual.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30)
    assert error <= slack * ULPS[dtype], f"{name}: {error:.2e}"


def every_kind(d: int, n: int = 1000) -> list[quorem.Table]:
    """A table of each kind: products and sums of two to four, one alone, padded, mapped, past 2^31 ids."""
    codes = [partitions.ExplicitPartition(torch.arange(n) % 40), partitions.ExplicitPartition(torch.arange(n) // 40)]
    tables = [
        quorem.Table("qr", n, d, quorem.QR(4)),
        quorem.Table("k3", n, d, quorem.GeneralizedQR(3)),
        quorem.Table("tiny", 7, d, quorem.Full()),
        quorem.Table("sum", n, d, quorem.ChineseRemainder(2, operation="add")),
        quorem.Table("wide", 2**40, d, quorem.ChineseRemainder(4)),
        quorem.Table("pad", n, d, quorem.QR(4, operation="feature"), padding_idx=3),
        quorem.Table("map", n, d, quorem.Custom(codes)),
    ]
    return tables + ([quorem.Table("cat", n, d, quorem.QR(4, operation="concat"))] if d % 2 == 0 else [])


def frequency_tables(d: int, name: str, **options: object) -> list[Table]:
    """Tables where ids have rows of their own, are mixed over a pool, or share rows; perhaps with frequencies."""
    cold = quorem.Custom((partitions.ExplicitPartition([i % 7 for i in range(N - 90)]),), check=False)
    if name == "own":
        return [
            Table("sum", N, d, HotCold(5, cold=QR(4, operation="add"), force=True), **options),
            Table("mult", N, d, HotCold(150, cold=QR(4), num_rest=50, force=True), padding_idx=7, **options),
            Table("cat", N, d, HotCold(70, cold=QR(4, operation="concat"), force=True), **options),
            Table("map", N, d, HotCold(60, cold=cold, num_rest=30, force=True), **options),
            Table("no cold", N, d, HotCold(40, cold=QR(4), num_rest=N - 40, force=True), **options),
            Table("plain", N, d, quorem.ChineseRemainder(3)),
        ]
    if name == "pool":
        return [
            Table("a", N, d, HotCold(9, cold=Pool(70)), **options),
            Table("b", N, d, HotCold(100, cold=Pool(70), num_rest=100), padding_idx=200, **options),
            Table("both", N, d, HotCold(3, cold=Pool(70), force=True), features=("clicked", "seen"), **options),
            Table("no hot", N, d, HotCold(0, cold=Pool(300, 3, name="other"), force=True)),
        ]
    return [
        Table("one", N, d, QR(4), features=("x", "y"), padding_idx=3),
        Table("two", N, d, QR(100, operation="concat"), features=("z", "t", "u")),
        Table("alone", N, d, QR(4)),
    ]


def collection(d: int, dtype: torch.dtype = torch.float32, names: str = "") -> quorem.EmbeddingCollection:
    """A collection of every kind of table, of those named, or of one of FREQUENCY."""
    torch.manual_seed(d)
    if names in FREQUENCY:
        name, *ranked = names.split()
        options = {"frequencies": torch.randperm(N)} if ranked else {}
        tables = frequency_tables(d, name, **options)
    else:
        tables = [table for table in every_kind(d) if not names or table.name in names.split()]
    module = quorem.EmbeddingCollection(tables, device=DEVICE, dtype=dtype)
    torch.nn.init.uniform_(module.stored, -(1000**-0.5), 1000**-0.5)
    return module


def limits(module: quorem.EmbeddingCollection) -> list[int]:
    """The number of ids of each feature."""
    return module.layout.slots[module.layout.spans[:, 0], LIMIT].tolist()


def batch(module: quorem.EmbeddingCollection, b: int, dtype: torch.dtype = torch.int64) -> Tensor:
    ids = torch.stack([torch.randint(min(n, torch.iinfo(dtype).max), (b,)) for n in limits(module)], 1)
    ids[: b // 2] = ids[0]  # hot rows
    ids[b // 3] = torch.tensor(limits(module)).clamp(max=torch.iinfo(dtype).max) - 1
    ids[-1, -1] = -1  # gives zeros and no gradient, as padding does
    return ids.to(DEVICE, dtype)


def jagged(module: quorem.EmbeddingCollection, b: int, weighted: bool = False, mean: bool = False) -> IdBatch:
    lengths = torch.randint(0, 4, (len(limits(module)), b))
    ids = [torch.randint(n, (int(each),)) for n, each in zip(limits(module), lengths.sum(1), strict=True)]
    values, offsets = torch.cat(ids).to(DEVICE), F.pad(lengths.flatten().cumsum(0), (1, 0)).to(DEVICE)
    weights = torch.rand(len(values), dtype=module.stored.dtype, device=DEVICE) if weighted else None
    return IdBatch(values, offsets, weights, mean)


def no_ids(module: quorem.EmbeddingCollection) -> tuple[IdBatch, IdBatch]:
    """A batch of no single ids, and one of three empty bags of each feature."""
    features = len(limits(module))
    ids = torch.empty(0, features, dtype=torch.int64, device=DEVICE)
    offsets = torch.zeros(3 * features + 1, dtype=torch.int64, device=DEVICE)
    return IdBatch(ids), IdBatch(ids.flatten(), offsets, mean=True)


def gradient(module: quorem.EmbeddingCollection, b: int) -> Tensor:
    return torch.randn(b, len(module.layout.slots), module.stored.shape[1], device=DEVICE).to(module.stored.dtype)


def row_rule(name: str, stored: Tensor, lr: float = 0.1, seed: int | None = None) -> RowRule:
    """A rule before its first step; sums of squares are there already."""
    rule = fresh_rule(name, stored, lr, seed, **{"lr_decay": 0.01} if name == "adagrad" else {})
    if "sum" in rule.state._fields:
        rule.state.sum.uniform_(0, 0.1)
    return rule
