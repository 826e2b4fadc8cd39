"""``EmbeddingCollection``: any mix of schemes equals its tables one by one, single-hot and jagged."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import CASES, DTYPES, D, N, assert_near, assert_same_backward, bags_by_torch, dense_by_hand, fill_, twin_of
from refusals import refused
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quorem import QR, EmbeddingCollection, Full, GeneralizedQR, Hash, HotCold, Path, Pool, Table
from quorem.paper.schemes import Scheme

# Equal widths: a fallback, two path groups (one of two members), padding, feature generation, a map.
EQUAL = [
    Table("a", N, D, CASES["qr-mult"], padding_idx=7),
    Table("b", 9, D, Full()),
    Table("c", N, D, CASES["path-mlp"], padding_idx=0),
    Table("d", N, D, CASES["generalized3-feature"]),
    Table("e", N, D, CASES["mixed-mult"]),
    Table("f", 2 * N, D, Path(6, (5,), force=True)),
    Table("g", N, D, CASES["path-levels"]),
    Table("h", N, D, CASES["generalized-dims"]),
    Table("i", N, D, Hash(4)),
]
UNEQUAL = [
    Table("a", N, 8, QR(4, operation="concat", dims=(6, 2))),
    Table("b", 30, 6, GeneralizedQR(3, operation="add"), padding_idx=-1),
    Table("c", N, 4, Path(4, (3,), force=True)),
    Table("d", N, 2, QR(4, operation="feature")),
    Table("e", N, 8, Path(6, (), force=True)),
    Table("f", 5, 10, Full()),
]
POOL = HotCold(9, cold=Pool(64), num_rest=20, force=True)
NARROW = [  # two widths, full rows, a pool of each width, networks and several vectors
    Table("a", N, D, QR(4, width=4, force=True), padding_idx=3),
    Table("b", N, D),
    Table("c", N, D, replace(POOL, width=4)),
    Table("d", N, D, replace(POOL, width=2)),
    Table("e", N, D, Path(4, hidden=(5,), width=4, force=True)),
    Table("f", N, D, QR(4, operation="feature", width=2, force=True)),
]
MIXES = {
    "narrow": NARROW,
    "equal": EQUAL,
    "unequal": UNEQUAL,
    "one": EQUAL[:1],
    "one-path": EQUAL[2:3],
    "features": EQUAL[3:4],
}
BATCH = 4


def limits(tables: list[Table]) -> Tensor:
    return torch.tensor([table.num_embeddings for table in tables])


def single(tables: list[Table], batch: int = BATCH) -> Tensor:
    """Ids ``[B, F]``: the last of each table, the padding of each that has one, and others."""
    ids = torch.arange(batch * len(tables)).view(batch, len(tables)) * 7 % limits(tables)
    if batch:
        ids[0] = limits(tables) - 1
        ids[-1] = torch.tensor([table.padding_idx or 0 for table in tables]) % limits(tables)
    return ids


def jagged(tables: list[Table], lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Ids ``[V]`` and offsets ``[F * B + 1]`` of bags with ``lengths`` ``[F, B]``."""
    feature = torch.arange(len(tables)).repeat_interleave(lengths.sum(1))
    ids = torch.arange(len(feature)) * 11 % limits(tables)[feature]
    return ids, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])


def join(tables: list[Table], vectors: list[Tensor]) -> Tensor:
    """The features' vectors side by side: ``[B, F', D]``, or ``[B, sum D]`` where widths differ."""
    flat = torch.cat([v.flatten(1) for v in vectors], 1)
    dims = {table.embedding_dim for table in tables}
    return flat.unflatten(1, (-1, dims.pop())) if len(dims) == 1 else flat


def check(tables: list[Table], dtype: torch.dtype, arguments: tuple[Tensor, ...], **options: object) -> None:
    """Values, the gradient of each table and network by name, and of the weights."""
    module = fill_(EmbeddingCollection(tables, dtype=dtype, **options))
    twin = twin_of(module)
    ids, *rest = arguments
    sample = rest[1].to(dtype).clone().requires_grad_() if len(rest) == 2 else None
    wanted = None if sample is None else sample.detach().double().requires_grad_()
    vectors = []
    for f, dense in enumerate(twin.to_dense().values()):
        if not rest:
            vectors.append(dense[ids[:, f].long()])
            continue
        batch = (len(rest[0]) - 1) // len(tables)
        ends = rest[0][f * batch : (f + 1) * batch + 1].long()
        own = slice(int(ends[0]), int(ends[-1]))
        weights = None if wanted is None else wanted[own]
        vectors.append(bags_by_torch(dense, ids[own].long(), ends - ends[0], module.mode, weights, twin.padding[f]))
    expected = join(tables, vectors)
    out = module(ids, *rest[:1], *(() if sample is None else (sample,)))
    assert_same_backward(module, twin, out, expected)
    if sample is not None:
        assert_near(sample.grad, wanted.grad, dtype, "per_sample_weights")


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_single_hot(mix: str, dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    check(MIXES[mix], dtype, (single(MIXES[mix]).to(id_dtype),))


@pytest.mark.parametrize("mix", MIXES)
def test_ids_in_any_memory_order(mix: str) -> None:
    ids = single(MIXES[mix])
    for same in (ids.T.contiguous().T, torch.stack([ids] * 2, 2)[:, :, 1]):
        check(MIXES[mix], torch.float32, (same,))


def test_ids_by_feature() -> None:
    module = fill_(EmbeddingCollection([Table("a", 9, 4), Table("b", 9, 4, QR(2))], mode="sum"))
    a, b = torch.tensor([[1, 2], [3, 4]]), torch.tensor([5, 6, 7])
    assert torch.equal(module({"b": b, "a": b + 1}), module(torch.stack([b + 1, b], 1)))
    expected = module(torch.cat([a.flatten(), b]), torch.tensor([0, 2, 4, 5, 7]))
    for first in (a, (a.flatten(), torch.tensor([0, 2, 4]))):
        assert torch.equal(module({"a": first, "b": (b, torch.tensor([0, 1, 3]))}), expected)
    raw = fill_(EmbeddingCollection([Table("a", 9, 4, raw_ids=True), Table("b", 9, 4, QR(2))]))
    unsigned = (b - 7).view(torch.uint64)
    assert torch.equal(raw({"a": unsigned, "b": b}), raw(torch.stack([b - 7, b], 1)))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_jagged(mix: str, dtype: torch.dtype, mode: str, weighted: bool) -> None:
    tables = MIXES[mix]
    lengths = torch.arange(len(tables) * BATCH).view(-1, BATCH) * 3 % 5  # empty bags among them
    ids, offsets = jagged(tables, lengths)
    weights = (torch.linspace(-1, 2, len(ids)),) if weighted else ()
    check(tables, dtype, (ids, offsets, *weights), mode=mode)


@pytest.mark.parametrize("mix", MIXES)
def test_sparse(mix: str) -> None:
    tables = MIXES[mix]
    check(tables, torch.float32, (single(tables),), sparse=True)
    check(tables, torch.float32, jagged(tables, torch.full((len(tables), BATCH), 2)), sparse=True)
    module = EmbeddingCollection(tables, sparse=True)
    for arguments in ((single(tables),), jagged(tables, torch.full((len(tables), BATCH), 2))):
        module.zero_grad()
        module(*arguments).sum().backward()
        assert module.stored.grad.is_sparse


@pytest.mark.parametrize("mix", MIXES)
def test_no_rows_no_bags_and_bags_of_nothing(mix: str) -> None:
    tables = MIXES[mix]
    check(tables, torch.float32, (single(tables, 0),))
    for batch in (0, 3):
        check(tables, torch.float32, jagged(tables, torch.zeros(len(tables), batch, dtype=torch.int64)))


@settings(max_examples=25)
@given(st.data())
def test_drawn_bags(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 4), "batch")
    tables = data.draw(st.lists(st.sampled_from(EQUAL), min_size=1, max_size=5, unique=True), "tables")
    row = st.lists(st.integers(0, 4), min_size=batch, max_size=batch)
    lengths = data.draw(st.lists(row, min_size=len(tables), max_size=len(tables)), "lengths")
    ids, offsets = jagged(tables, torch.tensor(lengths))
    mode = data.draw(st.sampled_from(["sum", "mean"]), "mode")
    check(tables, torch.float64, (ids, offsets, torch.linspace(-1, 1, len(ids))), mode=mode)


@pytest.mark.parametrize("mix", [mix for mix in MIXES if mix != "narrow"])  # by hand there are no pools
def test_to_dense_by_name(mix: str) -> None:
    module = fill_(EmbeddingCollection(MIXES[mix], dtype=torch.float64))
    dense = module.to_dense()
    assert list(dense) == [table.name for table in MIXES[mix]]
    for f, values in enumerate(dense.values()):
        assert_near(values, dense_by_hand(module, f), torch.float64)


@pytest.mark.parametrize("bad", [-1, 9, 59])
def test_ids_out_of_range_name_their_table(bad: int) -> None:
    module = EmbeddingCollection(EQUAL)
    match = rf"id {bad} is outside \[0, 9\) of table b"
    ids = single(EQUAL)
    ids[2, 1] = bad
    with pytest.raises(IndexError, match=match):
        module(ids)
    ids, offsets = jagged(EQUAL, torch.full((len(EQUAL), 2), 2))
    ids[6] = bad
    with pytest.raises(IndexError, match=match):
        module(ids, offsets)
    with pytest.raises(IndexError, match=match):
        module(ids, offsets, torch.ones(len(ids)))


TWO = EmbeddingCollection(EQUAL[:2])
IDS, OFFSETS = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])


def by_name(first: object) -> dict[str, object]:
    """Ids by feature."""
    return dict(zip(TWO.features, (first, IDS), strict=True))


test_refusals = refused(
    (lambda: TWO(IDS), ValueError, r"ids has shape \(3,\) but must be \[B, 2\] without offsets"),
    (lambda: TWO(IDS[None]), ValueError, r"ids has shape \(1, 3\) but must be \[B, 2\] without offsets"),
    (lambda: TWO(IDS[None, :2], OFFSETS), ValueError, r"ids has shape \(1, 2\) but must be 1-D with offsets"),
    (lambda: TWO(IDS[None, :2].float()), TypeError, r"ids dtype \(torch.float32\) must be torch.int32 or"),
    (lambda: TWO([[1, 2]]), TypeError, r"ids \(list\) must be a Tensor"),
    (lambda: TWO(IDS[None, :2], None, torch.ones(1, 2)), ValueError, "per_sample_weights must be None without off"),
    (lambda: TWO(IDS, OFFSETS[:2]), ValueError, "offsets has 2 entries but must have a multiple of 2 plus one"),
    (lambda: TWO(IDS, OFFSETS[:0]), ValueError, "offsets has 0 entries but must have a multiple of 2 plus one"),
    (lambda: TWO(IDS, torch.tensor([0, 2, 4])), ValueError, r"offsets\[-1\] \(4\) must be at most the number"),
    (lambda: TWO(IDS, OFFSETS, torch.ones(2)), ValueError, r"per_sample_weights \(2,\) must have the shape of ids"),
    (lambda: TWO(IDS, OFFSETS, IDS), TypeError, r"per_sample_weights \(torch.int64\) must be a floating-point Ten"),
    (lambda: TWO({"a": IDS, "c": IDS}), ValueError, r"missing \['.'\], unknown \['c'\]"),
    (lambda: TWO(by_name(IDS[:2])), ValueError, r"ids\['.'\] has 3 bags but must have 2, as the others"),
    (lambda: TWO(by_name((IDS, OFFSETS[:2]))), ValueError, r"ids\['.'\]\[1\] must end with the number of val"),
    (lambda: TWO(by_name((IDS, OFFSETS, IDS))), TypeError, r"ids\['.'\] \(tuple\) must be a Tensor"),
    (lambda: TWO(by_name((IDS[None], OFFSETS))), ValueError, r"ids\['.'\] has shape \(1, 3\) but must be \[B\]"),
    (lambda: TWO(by_name(IDS), OFFSETS), ValueError, "offsets must be None where ids are given by feature"),
    (lambda: TWO.row_numbers(IDS[None]), ValueError, r"ids has shape \(1, 3\) but must be \[B, 2\]"),
    (lambda: EmbeddingCollection([]), ValueError, "tables must hold at least one Table"),
    (lambda: EmbeddingCollection(Table("a", 9, 4)), TypeError, r"tables \(Table\) must be a sequence of Table"),
    (lambda: EmbeddingCollection([("a", 9)]), TypeError, r"tables \(\('a', 9\)\) must be Table objects"),
    (lambda: EmbeddingCollection([EQUAL[0]] * 2), ValueError, r"names of tables \('a'\) must be unique"),
    (lambda: EmbeddingCollection(EQUAL, mode="max"), ValueError, r"mode \('max'\) must be one of 'mean', 'sum'"),
    (lambda: EmbeddingCollection([Table("", 9, 4)]), ValueError, r"name of a table \(''\) must not be empty"),
    (lambda: Table("a\nb", 9, 4), ValueError, r"name \('a\\nb'\) must be a string of one line"),
    (lambda: Table("a", 9, 4, "QR"), TypeError, r"scheme \('QR'\) must be a Scheme"),
)


def test_inputs_on_another_device_are_refused() -> None:
    module = EmbeddingCollection([Table("a", 50, 4, QR(4))], mode="sum")
    ids, offsets = torch.tensor([0, 1]), torch.tensor([0, 2])
    for name, arguments in (
        ("ids", (ids[:, None].to("meta"),)),
        ("offsets", (ids, offsets.to("meta"))),
        ("per_sample_weights", (ids, offsets, torch.ones(2, device="meta"))),
    ):
        with pytest.raises(ValueError, match=f"{name} is on meta but must be on cpu, where the tables are"):
            module(*arguments)


def test_lists_of_ids_are_in_memory_once():
    """What a plan counts is all that there is, also after a state is loaded."""
    counts = torch.randint(0, 9, (500,), generator=torch.Generator().manual_seed(0))
    scheme = HotCold(20, cold=Pool(64), num_rest=200)
    made = [EmbeddingCollection([Table("a", 500, 16, scheme, frequencies=counts)]) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    for collection in (*made, copy.deepcopy(made[1])):
        for ids in collection.ranks_of[0]:
            assert ids.untyped_storage().data_ptr() == collection.ranks.untyped_storage().data_ptr()


class CountOps(TorchDispatchMode):
    """Counts every operator that reaches a backend: on a GPU, the launches."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.parametrize("scheme", [QR(4), QR(4, operation="concat"), Path(4, (4,))], ids=["mult", "concat", "path"])
def test_a_batch_takes_as_many_launches_for_fifty_tables_as_for_two(scheme: Scheme, jagged: bool) -> None:
    """The paper's public reference code has a Python loop over the tables: 26 to 52 launches a batch."""
    counts = []
    for features in (2, 50):
        model = EmbeddingCollection([Table(f"t{f}", 200 + f, 4, scheme) for f in range(features)])
        ids = torch.arange(8 * features).view(8, features) % 200
        arguments = (ids.flatten(), torch.arange(8 * features + 1)) if jagged else (ids,)
        with CountOps() as counter:
            model(*arguments).sum().backward()
        counts.append(counter.count)
    assert counts[0] == counts[1]
