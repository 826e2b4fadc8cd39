"""Every scheme is the table that ``to_dense`` says it is: values, and the gradient of each table by name."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import (
    CASES,
    DTYPES,
    FEW,
    OPERATIONS,
    D,
    N,
    assert_near,
    assert_same_backward,
    assert_same_gradients,
    bags_by_torch,
    dense_by_hand,
    fill_,
    twin_of,
)
from torch import Tensor

import quorem
from quorem import Embedding, EmbeddingBag
from quorem.ops import gradients, lookup
from quorem.ops.rows import IdBatch
from quorem.paper.partitions import ExplicitPartition, Partition
from quorem.paper.schemes import Scheme

# Id dtype, padding id.
VARIANTS = {"int64": (torch.int64, None), "int64-padded": (torch.int64, 7), "int32-padded": (torch.int32, N - 1)}
IDS = torch.tensor([[7, 0, N - 1, 7], [59, 31, 7, 12]])
# Bags of none, three, none, one, padding alone, a repeated id, none.
OFFSETS = torch.tensor([0, 0, 3, 3, 4, 6, 11, 11])
BAG_IDS = torch.tensor([4, 7, 59, 12, 7, 7, 33, 4, 4, 59, 0])
BAG_WEIGHTS = torch.tensor([0.5, -1.0, 2.0, 0.25, 1.0, 3.0, 0.0, -0.5, 1.5, 1.0, 0.75])
MODES = {"sum": ("sum", None), "mean": ("mean", None), "max": ("max", None)}
MODES |= {"weighted-sum": ("sum", BAG_WEIGHTS), "weighted-mean": ("mean", BAG_WEIGHTS)}


def check_embedding(module: Embedding, ids: Tensor) -> None:
    """Values and gradients of one lookup, against ``F.embedding`` over the dense table in float64."""
    twin = twin_of(module)
    out = module(ids)
    dense = twin.to_dense()
    expected = F.embedding(ids, dense.flatten(1)).view(*ids.shape, *dense.shape[1:])
    assert_same_backward(module, twin, out, expected)


def check_bags(
    module: EmbeddingBag, ids: Tensor, ends: Tensor, weights: Tensor | None = None, arguments: tuple[Tensor, ...] = ()
) -> None:
    """Values and gradients of bags, against ``F.embedding_bag`` over the dense table in float64.

    ``ends`` are the offsets with the last one; ``arguments`` the same bags in the form to call with, if another.
    """
    twin, dtype = twin_of(module), module.stored.dtype
    sample = None if weights is None else weights.to(dtype).clone().requires_grad_()
    shaped = sample if sample is None or not arguments else sample.view(arguments[0].shape)
    out = module(*(arguments or (ids, ends if module.include_last_offset else ends[:-1])), per_sample_weights=shaped)
    wanted_sample = None if sample is None else sample.detach().double().requires_grad_()
    expected = bags_by_torch(twin.to_dense(), ids.long(), ends.long(), module.mode, wanted_sample, module.padding_idx)
    if module.mode == "max" and dtype in (torch.bfloat16, torch.float16):
        assert out.shape == expected.shape and out.dtype == dtype
        assert_near(out, expected, dtype, "value")
        return  # which of two nearly equal ids takes the gradient depends on how they were rounded
    assert_same_backward(module, twin, out, expected)
    if sample is not None:
        assert_near(sample.grad, wanted_sample.grad, dtype, "per_sample_weights")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_dense_is_the_papers_equation(case: str, variant: str) -> None:
    _, padding = VARIANTS[variant]
    module = fill_(Embedding(N, D, CASES[case], padding_idx=padding, dtype=torch.float64))
    twin = twin_of(module)
    dense, expected = module.to_dense(), dense_by_hand(twin)
    assert_near(dense, expected, torch.float64)
    grad = torch.randn_like(dense)
    dense.backward(grad)
    expected.backward(grad)
    assert_same_gradients(module, twin)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_embedding(case: str, dtype: torch.dtype, variant: str) -> None:
    id_dtype, padding = VARIANTS[variant]
    module = fill_(Embedding(N, D, CASES[case], padding_idx=padding, dtype=dtype))
    check_embedding(module, IDS.to(id_dtype))


@pytest.mark.parametrize("variant", ["int64", "int32-padded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_bag(case: str, mode: str, dtype: torch.dtype, variant: str) -> None:
    id_dtype, padding = VARIANTS[variant]
    name, weights = MODES[mode]
    module = fill_(EmbeddingBag(N, D, CASES[case], mode=name, padding_idx=padding, dtype=dtype))
    check_bags(module, BAG_IDS.to(id_dtype), OFFSETS.to(id_dtype), weights)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_narrow_rows(case: str, dtype: torch.dtype) -> None:
    """Rows of width D times a matrix [D, wide], for every scheme: values, and gradients of rows and matrix."""
    scheme, wide = replace(CASES[case], width=D), D + 8
    options = {"padding_idx": 7, "dtype": dtype}
    module = fill_(Embedding(N, wide, scheme, **options))
    assert module.projections[0].shape == (D, wide) and module.to_dense().shape[-1] == wide
    assert_near(module.to_dense(), dense_by_hand(twin_of(module)), dtype, "to_dense")
    assert_near(module.weight, twin_of(module).to_dense(), dtype, "weight")
    check_embedding(module, IDS)
    for mode, weights in MODES.values():
        check_bags(fill_(EmbeddingBag(N, wide, scheme, mode=mode, **options)), BAG_IDS, OFFSETS, weights)


@pytest.mark.parametrize("case", [case for case in CASES if "path" not in case])
def test_the_truth_is_what_the_ops_compute(case: str) -> None:
    """The plain functions that every fused kernel is held to, called directly; the ops may be fused."""
    module = fill_(EmbeddingBag(N, D, CASES[case], mode="mean", padding_idx=7, dtype=torch.float64))
    stored, layout = module.stored, module.layout
    ids, twin = IDS.view(-1, 1), twin_of(module)
    expected = twin.to_dense()[ids.flatten()].flatten(1)
    out = lookup.lookup(IdBatch(ids), stored, layout)
    assert_near(out.flatten(1), expected, torch.float64, "lookup")
    grad = torch.randn(out.shape, dtype=torch.float64)
    expected.backward(grad.flatten(1))
    by_row = gradients.dense_gradient(*gradients.row_grads(grad, IdBatch(ids), stored, layout), stored)
    assert_near(by_row, twin.stored.grad, torch.float64, "gradient of lookup by row")
    by_table = gradients.backward(grad, IdBatch(ids), stored, layout)
    assert_near(by_table, twin.stored.grad, torch.float64, "gradient of lookup")

    twin.zero_grad()
    for ends in (OFFSETS, OFFSETS[:1]):
        sample = BAG_WEIGHTS.double().requires_grad_()
        expected = bags_by_torch(twin.to_dense(), BAG_IDS[: ends[-1]], ends, "mean", sample[: ends[-1]], 7).flatten(1)
        batch = IdBatch(BAG_IDS, ends, sample.detach(), mean=True)
        out = lookup.lookup(batch, stored, layout)
        assert_near(out.flatten(1), expected, torch.float64, "bag")
        grad = torch.randn(out.shape, dtype=torch.float64)
        rows = gradients.row_grads(grad, batch, stored, layout)
        weights = gradients.sample_weights_backward(grad, batch, stored, layout)
        expected.backward(grad.flatten(1))
        assert_near(gradients.dense_gradient(*rows, stored), twin.stored.grad, torch.float64, "gradient of bag")
        assert_near(weights, sample.grad, torch.float64, "gradient of per_sample_weights")
        twin.zero_grad(set_to_none=False)


# The forms an input may have, for one scheme of each kind.


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor(59),
        torch.arange(N),
        torch.arange(24).view(2, 3, 4),
        torch.arange(48).view(4, 12)[:, ::3],
        torch.arange(24).view(4, 6).T,
        torch.tensor([7]).expand(5),
        torch.empty(0, dtype=torch.int64),
        torch.empty(3, 0, 2, dtype=torch.int32),
    ],
    ids=["scalar", "all", "3-D", "strided", "transposed", "expanded", "none", "none-3-D"],
)
@pytest.mark.parametrize("case", FEW)
def test_ids_of_any_shape(case: str, ids: Tensor) -> None:
    check_embedding(fill_(Embedding(N, D, CASES[case], padding_idx=7)), ids)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", FEW)
def test_bags_in_two_dimensions(case: str, mode: str) -> None:
    name, weights = MODES[mode]
    ids = torch.cat([BAG_IDS, BAG_IDS[:1]])
    weights = None if weights is None else torch.cat([weights, weights[:1]])
    for width in (1, 3, 12):
        module = fill_(EmbeddingBag(N, D, CASES[case], mode=name, padding_idx=7))
        ends = torch.arange(0, 13, width)
        check_bags(module, ids, ends, weights, (ids.view(-1, width),))
        module.zero_grad()
        check_bags(module, ids, ends, weights, (ids.view(-1, width).T.contiguous().T,))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", FEW)
def test_ids_past_the_last_offset_count_for_nothing(case: str, mode: str) -> None:
    """Also where they are out of range. (torch itself pools them for ``max``, and counts them for ``mean``.)"""
    name, weights = MODES[mode]
    module = fill_(EmbeddingBag(N, D, CASES[case], mode=name, padding_idx=7, include_last_offset=True))
    tail = torch.cat([BAG_IDS, torch.tensor([3, 7, N + 1])])
    tail_weights = () if weights is None else (torch.cat([weights, torch.ones(3)]),)
    out = module(tail, OFFSETS, *tail_weights)
    torch.testing.assert_close(out, module(BAG_IDS, OFFSETS, weights))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("case", FEW)
def test_no_bags_and_bags_of_nothing(case: str, mode: str) -> None:
    module = fill_(EmbeddingBag(N, D, CASES[case], mode=mode))
    none = torch.empty(0, dtype=torch.int64)
    shape = module.to_dense().shape[1:]
    assert module(none, none).shape == (0, *shape)
    assert module(BAG_IDS, none).shape == (0, *shape)  # as in torch: no bags, whatever the ids
    assert module(none.view(0, 3)).shape == (0, *shape)
    for out in (module(none, torch.zeros(4, dtype=torch.int64)), module(none.view(4, 0))):
        assert torch.equal(out, torch.zeros(4, *shape))
        out.sum().backward()
    assert not module.stored.grad.any()


@pytest.mark.parametrize("case", FEW)
def test_sparse_gradients(case: str) -> None:
    module = fill_(Embedding(N, D, CASES[case], padding_idx=7, sparse=True))
    check_embedding(module, IDS)
    assert module.stored.grad.is_sparse
    rows = module.stored.grad.coalesce().indices().unique().numel()
    assert rows <= IDS.numel() * module.slots.shape[0] * module.parts.shape[1]
    for mode, weights in (("sum", None), ("mean", None), ("sum", BAG_WEIGHTS)):
        bags = fill_(EmbeddingBag(N, D, CASES[case], mode=mode, padding_idx=7, sparse=True))
        check_bags(bags, BAG_IDS, OFFSETS, weights)
        assert bags.stored.grad.is_sparse


@pytest.mark.parametrize("case", FEW)
def test_non_contiguous_gradients(case: str) -> None:
    module = fill_(Embedding(N, D, CASES[case]))
    twin = twin_of(module)
    for vectors in (module(IDS), twin.to_dense()[IDS]):
        vectors.flatten(2).transpose(0, 2).backward(torch.arange(2.0).expand(vectors[0, 0].numel(), 4, 2))
    assert_same_gradients(module, twin)


# What HotCold may do with its cold ids; with one table a pool is a scheme among others.
COLD = {name: s for name, s in CASES.items() if not name.endswith("feature") and not isinstance(s, quorem.Custom)}
COLD |= {"pool": quorem.Pool(40), "pool of three": quorem.Pool(40, num_partitions=3)}
UNSEEN = torch.tensor([7, 12, 31])  # by no training row: of the rest
COUNTS = torch.arange(N).mul(17).remainder(9).add(1).index_fill(0, UNSEEN, 0)  # with ties


@pytest.mark.parametrize("cold", COLD)
def test_narrow_hot_and_cold_ids(cold: str) -> None:
    scheme = quorem.HotCold(9, cold=COLD[cold], num_rest=20, force=True, width=D)
    options = {"frequencies": COUNTS, "dtype": torch.float64, "padding_idx": 4}
    check_embedding(fill_(Embedding(N, D + 8, scheme, **options)), torch.arange(N).flip(0).view(2, -1))
    for mode, weights in (MODES["mean"], MODES["weighted-sum"], MODES["max"]):
        check_bags(fill_(EmbeddingBag(N, D + 8, scheme, mode=mode, **options)), BAG_IDS, OFFSETS, weights)


@pytest.mark.parametrize(("counts", "num_rest"), [(None, 0), (COUNTS, 20)], ids=["by rank", "by count, rest"])
@pytest.mark.parametrize("cold", COLD)
def test_hot_and_cold_ids(cold: str, counts: Tensor | None, num_rest: int) -> None:
    """Lookups and bags of every dtype with their gradients, and of every number of bits, over every cold scheme."""
    scheme = quorem.HotCold(9, cold=COLD[cold], num_rest=num_rest, force=True)
    every = torch.arange(N).flip(0).view(2, -1)
    for dtype in DTYPES if cold in ("pool", "qr-mult") else (torch.float32, torch.bfloat16):
        options = {"frequencies": counts, "dtype": dtype}
        check_embedding(fill_(Embedding(N, D, scheme, padding_idx=4, **options)), every)
        for mode, weights in (MODES["mean"], MODES["weighted-sum"]):
            module = EmbeddingBag(N, D, scheme, mode=mode, include_last_offset=True, **options)
            check_bags(fill_(module), BAG_IDS, OFFSETS, weights)
        if dtype == torch.float64:
            continue
        for bits in (8, 4):
            module = EmbeddingBag(N, D, scheme, mode="sum", include_last_offset=True, **options)
            quorem.quantize_(fill_(module), bits)
            expected = bags_by_torch(module.to_dense().double(), BAG_IDS, OFFSETS, "sum", None, None)
            assert_near(module(BAG_IDS, OFFSETS), expected, dtype, f"{bits} bits")
            table = quorem.quantize_(fill_(Embedding(N, D, scheme, padding_idx=4, **options)), bits)
            assert_near(table(every), F.embedding(every, table.to_dense().double()), dtype, f"{bits} bits, a lookup")
    if num_rest and counts is not None:
        module = fill_(Embedding(N, D, scheme, frequencies=counts))
        unseen = module(UNSEEN)
        assert torch.equal(unseen, unseen[:1].expand_as(unseen))
        unique = cold != "hash" and not cold.startswith("path")  # networks may give zeros for several
        assert not unique or module.num_duplicates() == num_rest - 1


# Sizes, schemes and ids drawn.


@st.composite
def schemes(draw: st.DrawFn, n: int) -> tuple[Scheme, int]:
    """A scheme that can store ``n`` ids, and a width it can have."""
    k, unit = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    options = {"force": True}
    operation = {"operation": draw(st.sampled_from(OPERATIONS))}
    collisions = draw(st.integers(1, 2 * n))
    if operation["operation"] == "concat" and draw(st.booleans()):
        operation["dims"] = draw(st.lists(st.integers(1, 4), min_size=k, max_size=k))
    dims = operation.get("dims")
    kind = draw(st.sampled_from(["hash", "qr", "generalized", "chinese", "custom", "path"]))
    if kind == "hash":
        return quorem.Hash(collisions, **options), unit
    if kind == "path":
        hidden = draw(st.lists(st.integers(1, 6), max_size=2))
        return quorem.Path(collisions, hidden, num_partitions=max(k, 2), **options), unit
    if kind == "qr":
        operation["dims"] = dims = None if dims is None else (dims * 2)[:2]
        large = draw(st.sampled_from(["remainder", "quotient"]))
        return quorem.QR(collisions, large=large, **operation, **options), sum(dims) if dims else 2 * unit
    width = sum(dims) if dims else k * unit
    if kind == "generalized":
        return quorem.GeneralizedQR(k, **operation, **options), width
    if kind == "chinese":
        return quorem.ChineseRemainder(k, **operation, **options), width
    maps = st.lists(st.integers(0, 6), min_size=n, max_size=n).map(ExplicitPartition)
    closed = st.builds(Partition, st.integers(1, 2 * n), st.integers(1, 2 * n))
    parts = draw(st.lists(maps | closed, min_size=k, max_size=k))
    return quorem.Custom(parts, check=False, **operation, **options), width


@settings(max_examples=150)
@given(st.data())
def test_drawn_tables(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40), "n")
    scheme, width = data.draw(schemes(n), "scheme")
    padding = data.draw(st.none() | st.integers(-n, n - 1), "padding_idx")
    ids = data.draw(st.lists(st.integers(0, n - 1), max_size=12), "ids")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5), "cuts"))
    mode = data.draw(st.sampled_from(["sum", "mean", "max"]), "mode")
    input = torch.tensor(ids, dtype=torch.int64)
    table = fill_(Embedding(n, width, scheme, padding_idx=padding, dtype=torch.float64))
    assert_near(table.to_dense(), dense_by_hand(table), torch.float64)
    check_embedding(table, input)
    bags = fill_(EmbeddingBag(n, width, scheme, mode=mode, padding_idx=padding, dtype=torch.float64))
    check_bags(bags, input, torch.tensor([0, *cuts, len(ids)]))


# Ids where float32, int32 and float64 stop telling integers apart.


@pytest.mark.parametrize("n", [2**24 + 9, 2**31 + 9, 2**40, 2**53 + 9, 2**62])
@pytest.mark.parametrize(
    "scheme",
    [quorem.Hash(4), quorem.GeneralizedQR(4), quorem.ChineseRemainder(4), quorem.GeneralizedQR(8, operation="add")],
    ids=["hash", "generalized4", "chinese4", "generalized8"],
)
def test_ids_past_every_float(scheme: Scheme, n: int) -> None:
    if isinstance(scheme, quorem.Hash):
        scheme = replace(scheme, num_collisions=n // 1001)
    module = fill_(Embedding(n, 1, scheme, dtype=torch.float64))
    spec = module.specs[0]
    edges = [e + d for e in (2**24, 2**31, 2**53, n // 2, n) for d in range(-3, 4)]
    ids = [i for i in edges if 0 <= i < n]
    for i, vector in zip(ids, module(torch.tensor(ids)), strict=True):
        rows = [t[i // p.stride % p.size] for t, p in zip(module.tables(), spec.partitions, strict=True)]
        expected = torch.stack(rows).sum(0) if spec.operation == "add" else torch.stack(rows).prod(0)
        assert_near(vector, expected, torch.float64, str(i))
    with pytest.raises(IndexError, match=rf"id {n} is outside \[0, {n}\) of Embedding"):
        module(torch.tensor([n]))
