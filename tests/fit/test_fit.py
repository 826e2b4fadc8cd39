"""Fits of trained tables: exact where a scheme can hold the table, the least squares of an oracle where not."""

from dataclasses import replace

import pytest
import torch
from fit_cases import FITTED, buckets_of, compose, fitted, made_by, noise, uneven
from oracles import CASES, D, N, fill_
from torch import Tensor

import quorem.fit.target
from quorem import QR, ChineseRemainder, Custom, Embedding, EmbeddingBag, Full, GeneralizedQR, Hash, HotCold, Pool
from quorem.fit import fit_
from quorem.paper.partitions import ExplicitPartition, Partition
from quorem.paper.schemes import Scheme

# Products of four tables, or in which few combinations of buckets occur: alternation need not find them.
# test_solvers compares its error with that of many starts.
STUCK = ("generalized-rows-mult", "chinese-rows-mult", "mixed-mult", "generalized4-mult")


@pytest.mark.parametrize("frequencies", [None, uneven(N)], ids=["even", "uneven"])
@pytest.mark.parametrize("case", [name for name in FITTED if "feature" not in name and name not in STUCK])
def test_what_a_scheme_can_hold_is_recovered(case: str, frequencies: Tensor | None) -> None:
    """Ids of frequency zero too, since nothing else is nearer to the rest."""
    spec = FITTED[case].spec(N, D)
    dense = made_by(spec)
    torch.testing.assert_close(compose(fitted(spec, dense, frequencies), spec), dense, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("operation", "collisions", "k"),
    [*(("add", collisions, k) for collisions in (None, 4) for k in (2, 3, 4)), ("mult", None, 2), ("mult", None, 3)],
)
@pytest.mark.parametrize("family", [GeneralizedQR, ChineseRemainder])
def test_recovered_on_full_and_sparse_grids(family: type, k: int, collisions: int | None, operation: str) -> None:
    """With rows to spend, few of the combinations of buckets occur."""
    spec = family(k, num_collisions=collisions, operation=operation).spec(1000, 3)
    dense = made_by(spec).float()
    tables = fitted(spec, dense, uneven(1000))
    torch.testing.assert_close(compose(tables, spec), dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["hash", "explicit", "qr-concat", "generalized-dims", "mixed-concat", "mixed-feature"])
def test_means_over_buckets(case: str) -> None:
    spec = FITTED[case].spec(N, D)
    dense, frequencies = noise(N, D), uneven(N)
    columns = dense.split([width for _, width in spec.shapes], 1) if spec.operation == "concat" else [dense] * 3
    for table, bucket, rows in zip(fitted(spec, dense, frequencies), buckets_of(spec), columns, strict=False):
        for b in range(len(table)):
            ids = (bucket == b).nonzero()[:, 0]
            weights = frequencies[ids].double() if frequencies[ids].any() else torch.ones(len(ids))
            expected = (rows[ids] * weights[:, None]).sum(0) / weights.sum() if len(ids) else torch.zeros(len(table[b]))
            torch.testing.assert_close(table[b], expected.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("operation", ["add", "mult", "concat"])
def test_ids_that_never_occur_move_nothing_but_what_is_theirs(operation: str) -> None:
    """Quotient 3 never occurs: the rest is fitted as if it were not there, and its rows to what they can be."""
    spec, three = QR(4, operation=operation).spec(40, 2), QR(3, operation=operation, force=True).spec(30, 2)
    dense = noise(40, 2) + 3
    frequencies = torch.arange(40.0).add(1)
    frequencies[30:] = 0
    tables = fitted(spec, dense, frequencies)
    alone = fitted(three, dense[:30], frequencies[:30])
    torch.testing.assert_close(compose(tables, spec)[:30], compose(alone, three), rtol=1e-4, atol=1e-4)
    remainder, row = tables[0], tables[1][3]
    if operation == "concat":
        expected = dense[30:, 1:].mean(0)
    elif operation == "add":
        expected = (dense[30:] - remainder).mean(0)
    else:
        expected = (dense[30:] * remainder).sum(0) / remainder.square().sum(0)
    torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-3)


def test_parts_that_frequencies_do_not_join_keep_the_fit_without_them() -> None:
    """Ids 0 to 4 and 15 to 19 occur, in no common bucket; what lies between them is decided by the ids that do not."""
    spec = QR(2, operation="add").spec(20, 1)
    dense = made_by(spec)
    frequencies = torch.zeros(20)
    frequencies[:5] = frequencies[15:] = 1
    torch.testing.assert_close(compose(fitted(spec, dense, frequencies), spec), dense)


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize("case", ["qr-mult", "qr-add", "generalized3-mult", "chinese3-add", "hash"])
def test_entries_of_any_size(case: str, size: float) -> None:
    spec = FITTED[case].spec(N, D)
    dense = (made_by(spec) * size).float()
    torch.testing.assert_close(compose(fitted(spec, dense), spec) / size, dense / size, rtol=1e-5, atol=1e-5)
    dense = made_by(spec) * size**6  # in float64
    torch.testing.assert_close(compose(fitted(spec, dense), spec) / size**6, dense / size**6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operation", ["add", "mult", "concat"])
def test_half_precision(operation: str, dtype: torch.dtype) -> None:
    """The largest table makes up for the rounding of the others; columns of zeros stay zeros."""
    spec = QR(4, operation=operation).spec(N, D)
    dense = made_by(spec)
    dense[:, 3] = 0
    tables = fitted(spec, dense.to(dtype))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(compose(tables, spec).double(), dense, rtol=4 * eps, atol=4 * eps * float(dense.std()))
    assert not compose(tables, spec)[:, 3].any()


@pytest.mark.parametrize("scheme", [QR(4), QR(4, large="quotient"), GeneralizedQR(3)], ids=str)
def test_the_largest_table_holds_the_scale(scheme: Scheme) -> None:
    for operation in ("add", "mult"):
        spec = replace(scheme, operation=operation).spec(1000, 3)
        tables = fitted(spec, 100 * noise(1000, 3) + 50)
        tables.pop(max(range(len(tables)), key=lambda j: len(tables[j])))
        for table in tables:
            if operation == "add":
                assert table.mean(0).abs().max() < 1e-9
            else:
                torch.testing.assert_close(table.square().mean(0), torch.ones(3, dtype=torch.float64))
                assert (table.sum(0) >= 0).all()


def test_full_tables_are_copied() -> None:
    dense = noise(N, D).index_fill(0, torch.tensor([3]), torch.nan)
    for scheme in (Full(), QR(4)):
        spec = scheme.spec(N, D) if isinstance(scheme, Full) else scheme.spec(3, D)
        rows = dense[: spec.num_embeddings]
        assert torch.equal(compose(fitted(spec, rows), spec).nan_to_num(), rows.nan_to_num())


def test_unused_buckets_are_zero() -> None:
    spec = Custom([ExplicitPartition([0, 4, 0, 4])], check=False, force=True).spec(4, 2)
    assert fitted(spec, torch.ones(4, 2))[0][:, 0].tolist() == [1, 0, 0, 0, 1]


@pytest.mark.parametrize("cold", [QR(4), QR(4, operation="add"), Hash(3), QR(2, operation="concat")], ids=str)
@pytest.mark.parametrize("num_rest", [0, 5])
@pytest.mark.parametrize("counted", [False, True])
def test_hot_ids_keep_their_vectors_and_cold_ones_are_fitted(cold: Scheme, num_rest: int, counted: bool) -> None:
    scheme = HotCold(8, cold, num_rest)
    frequencies = torch.randperm(N, generator=torch.Generator().manual_seed(1)) + 1 if counted else None
    source = fill_(Embedding(N, D, scheme, frequencies=frequencies, dtype=torch.float64))
    trained = source.weight.detach().clone()
    table = Embedding.from_pretrained(trained, scheme, frequencies=frequencies)
    torch.testing.assert_close(table.weight, trained, rtol=1e-9, atol=1e-9)
    if num_rest:
        order = torch.arange(N) if frequencies is None else frequencies.argsort(descending=True)
        trained[order[-num_rest:]] += noise(num_rest, D)
        rest = table.fit_(trained, torch.arange(N) + 1.0).weight[order[-num_rest:]]
        weights = order[-num_rest:].double().add(1)[:, None]
        mean = (trained[order[-num_rest:]] * weights).sum(0) / weights.sum()
        torch.testing.assert_close(rest, mean.expand(num_rest, D))


def test_a_pool_of_one_table_is_fitted() -> None:
    scheme = HotCold(8, Pool(20), num_rest=3)
    source = fill_(Embedding(N, D, scheme, dtype=torch.float64))
    table = Embedding.from_pretrained(source.weight, scheme)
    torch.testing.assert_close(table.weight, source.weight, rtol=1e-9, atol=1e-9)


def test_a_module_gives_its_table_and_options() -> None:
    trained = torch.nn.Embedding(N, D, padding_idx=3)
    table = Embedding.from_pretrained(trained, freeze=False)
    assert table.padding_idx == 3 and table.stored.requires_grad and torch.equal(table.weight, trained.weight)
    bags = torch.nn.EmbeddingBag(N, D, mode="sum", include_last_offset=True)
    fitted_bags = EmbeddingBag.from_pretrained(bags, QR(4))
    assert fitted_bags.mode == "sum" and fitted_bags.include_last_offset and not fitted_bags.stored.requires_grad
    with pytest.raises(TypeError, match=r"embeddings \(ReLU\) must be a Tensor, or a module with a weight"):
        Embedding.from_pretrained(torch.nn.ReLU())
    with pytest.raises(ValueError, match=r"embeddings has shape \(3,\) but must be 2-D"):
        table.fit_(torch.ones(3))
    dense = torch.ones(N, D)
    for wrong in (dense.to_sparse(), dense.long(), dense.to(torch.complex64)):
        with pytest.raises(TypeError, match=r"embeddings \(torch.*\) must be a dense tensor of floating-point numbers"):
            table.fit_(wrong)


def test_a_table_on_the_meta_device_is_left_alone() -> None:
    spec = QR(4).spec(N, D)
    tables = [torch.empty(s, device="meta") for s in spec.shapes]
    fit_(tables, spec, torch.empty(N, D, device="meta"))
    assert [(table.device.type, tuple(table.shape)) for table in tables] == [("meta", shape) for shape in spec.shapes]


ONES = torch.ones(N)


@pytest.mark.parametrize(
    ("dense", "frequencies", "message"),
    [
        (torch.zeros(N, D - 1), None, r"dense has shape \(60, 11\) but must be .* \(60, 12\)"),
        (noise(N, D).index_fill(0, torch.tensor([7]), torch.nan), None, r"must be finite, but row 7 is \[nan, nan"),
        (noise(N, D), torch.ones(3), r"frequencies has shape \(3,\) but must be \[num_embeddings\] \(60\)"),
        (noise(N, D), ONES.index_fill(0, torch.tensor([2]), torch.inf), r"frequencies\[2\] \(inf\) must be at least 0"),
        (noise(N, D), ONES.long().index_fill(0, torch.tensor([2]), -1), r"frequencies\[2\] \(-1\) must be at least 0"),
        (noise(N, D), torch.zeros(N), r"frequencies \(all 0\) must have one above 0"),
        (noise(N, D), ONES.bool(), r"frequencies \(torch.bool\) must hold integers or floats"),
    ],
)
def test_refusals(dense: Tensor, frequencies: Tensor | None, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fitted(QR(4).spec(N, D), dense, frequencies)
    with pytest.raises(ValueError, match=r"scheme \(Path\(.*\) must not be path-based"):
        fitted(CASES["path-mlp"].spec(N, D), noise(N, D))


def test_the_padding_row_counts_for_nothing() -> None:
    """Whatever it holds: the others are fitted as by weights of zero and one."""
    dense = noise(N, D) + 2
    holed = dense.index_fill(0, torch.tensor([7]), torch.nan)
    others = torch.arange(N) != 7
    for case in ("hash", "qr-add", "qr-mult", "generalized3-mult", "mixed-concat"):
        spec = FITTED[case].spec(N, D)
        vectors = compose(fitted(spec, holed, padding_idx=7 - N), spec)
        expected = compose(fitted(spec, dense, others.float()), spec)
        torch.testing.assert_close(vectors[others], expected[others], rtol=0.01, atol=0.01)
    (stored,) = fitted(Hash(4).spec(N, D), holed, padding_idx=7)
    torch.testing.assert_close(stored[7], dense[[22, 37, 52]].mean(0))


def test_the_size_of_blocks_and_columns_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = ["hash", "qr-add", "qr-mult", "qr-quotient-mult", "chinese2-add", "generalized3-add", "mixed-mult"]
    wide = Custom((Partition(20, 3), Partition(1, 20)), operation="add", force=True)
    schemes = [FITTED[case] for case in cases]
    specs = [scheme.spec(N, 3) for scheme in (wide, *schemes)]
    dense, frequencies = noise(N, 3) + 2, torch.arange(1.0, N + 1)
    expected = [fitted(spec, dense, frequencies) for spec in specs]
    for numbers in (7, 40):
        monkeypatch.setattr(quorem.fit.target, "BLOCK_NUMBERS", numbers)
        monkeypatch.setattr(quorem.fit, "MEMORY", 0)  # a column at a time
        for spec, tables in zip(specs, expected, strict=True):
            vectors = compose(fitted(spec, dense, frequencies), spec)
            torch.testing.assert_close(vectors, compose(tables, spec), rtol=0.01, atol=0.01)
