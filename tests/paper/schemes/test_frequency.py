"""HotCold and Pool: against the table they stand for, by brute force, and at their edges."""

import pytest
import torch
import torch.nn.functional as F
from oracles import fill_
from refusals import refused

from quorem import QR, Embedding, EmbeddingCollection, Full, HotCold, Pool, Table
from quorem.ops import cpu
from quorem.paper.hashing import mixed_ids
from quorem.paper.renumbering import Mixing
from quorem.paper.schemes import Ranks, RawCounts
from quorem.paper.schemes.frequency import places, rank

N, D = 97, 8


def test_ranges_of_a_table():
    spec = HotCold(10, cold=Pool(24), num_rest=40).spec(N, D)
    assert (spec.num_own, spec.num_composed, spec.shapes) == (11, 47, ((11, D),))
    counts = torch.randint(0, 5, (N,))
    lists = rank(counts, spec)
    order = sorted(range(N), key=lambda i: (-int(counts[i]), i))
    assert lists.hot.tolist() == sorted(order[:10]) and lists.cold.tolist() == sorted(order[10:57])
    place = places(spec, lists)
    assert set(place[order[57:]].tolist()) == {10} and sorted(place[order[:57]].tolist()) == [
        *range(10),
        *range(11, 58),
    ]


@pytest.mark.parametrize("fused", [True, False])
def test_a_table_without_cold_ids_does_not_search_the_lists_of_the_next(fused, monkeypatch):
    if not fused:
        monkeypatch.setattr(cpu, "kernels", dict)
    only_hot = Table("hot", 12, D, HotCold(3, cold=Full(), num_rest=9, force=True), frequencies=torch.arange(12.0))
    scheme = HotCold(1, cold=Full(), num_rest=1, force=True)
    others = [Table(f"{i}", 12, D, scheme, frequencies=torch.rand(12)) for i in range(3)]
    module = EmbeddingCollection([only_hot, *others])
    ids = torch.arange(12)[:, None].expand(12, 4)
    torch.testing.assert_close(module(ids)[:, 0], module.to_dense()["hot"])


def tables(pool, **options):
    return [
        Table("user", 60, D, HotCold(5, cold=pool, num_rest=20), **options),
        Table("item", 47, D, HotCold(3, cold=pool)),
        Table("day", 7, D, Full()),
        Table("query", 33, D, HotCold(0, cold=pool, num_rest=1), features=("typed", "clicked")),
    ]


def test_cold_ids_of_all_tables_have_combinations_of_their_own():
    collection = EmbeddingCollection(tables(Pool(40)))
    pairs, others = set(), set()
    for f, (n, hot, rest) in enumerate([(60, 5, 20), (47, 3, 0), (7, 7, 0), (33, 0, 1)]):
        ids = torch.zeros(n, 5, dtype=torch.int64)
        ids[:, f] = torch.arange(n)
        for i, rows in enumerate(collection.row_numbers(ids)[:, f].tolist()):
            rows = tuple(r for r in rows if r >= 0)
            assert len(rows) == (2 if hot <= i < n - rest else 1)
            assert (rows not in pairs) or i > n - rest
            (pairs if len(rows) == 2 else others).add(rows)
    assert len(pairs) == 35 + 44 + 32 and len(others) == 6 + 3 + 7 + 1


def test_a_collection_equals_its_tables_and_shares_rows():
    collection = fill_(EmbeddingCollection(tables(Pool(40), frequencies=torch.arange(60)), dtype=torch.float64))
    assert collection.features == ("user", "item", "day", "typed", "clicked")
    ids = torch.stack([torch.randint(0, n, (50,)) for n in (60, 47, 7, 33, 33)], 1)
    dense = collection.to_dense()
    names = ("user", "item", "day", "query", "query")
    expected = torch.stack([F.embedding(ids[:, f], dense[name]) for f, name in enumerate(names)], 1)
    torch.testing.assert_close(collection(ids), expected)
    weights = torch.randn_like(expected)
    got = torch.autograd.grad((collection(ids) * weights).sum(), collection.stored)[0]
    torch.testing.assert_close(got, torch.autograd.grad((expected * weights).sum(), collection.stored)[0])
    rows = collection.row_numbers(ids)
    summed = F.embedding(rows.clamp(min=0), collection.stored).mul((rows >= 0)[..., None]).sum(-2)
    torch.testing.assert_close(summed, expected)


def test_lists_of_ids_may_be_given_instead_of_frequencies():
    scheme, counts = HotCold(10, cold=QR(4), num_rest=40), torch.randint(0, 9, (N,))
    module = fill_(Embedding(N, D, scheme, frequencies=counts))
    lists = module.ranks_of[0]
    other = Embedding(N, D, scheme, frequencies=Ranks(lists.hot.long(), lists.cold))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.to_dense(), module.to_dense())
    wrong = {
        "frequencies lists 9 hot and 47 cold ids but must list 10 and 47": Ranks(lists.hot[1:], lists.cold),
        r"frequencies.hot must rise and lie in \[0, 97\)": Ranks(lists.hot.flip(0), lists.cold),
        r"frequencies.cold must rise and lie in \[0, 97\)": Ranks(lists.hot, lists.cold + 50),
        "frequencies must not list an id as hot and as cold": Ranks(lists.cold[:10], lists.cold),
    }
    for message, ranks in wrong.items():
        with pytest.raises(ValueError, match=message):
            Embedding(N, D, scheme, frequencies=ranks)
    with pytest.raises(TypeError, match=r"frequencies.hot must be a 1-D tensor of int32 or int64"):
        Embedding(N, D, scheme, frequencies=Ranks(lists.hot.float(), lists.cold))


def test_modules_given_the_same_lists_have_copies():
    hot = torch.tensor([7, 12], dtype=torch.int32)
    table = Table("user", N, D, HotCold(2, cold=QR(4)), frequencies=Ranks(hot, hot[:0]))
    loaded, other = EmbeddingCollection([table]), EmbeddingCollection([table])
    saved = EmbeddingCollection([Table("user", N, D, table.scheme, frequencies=torch.arange(N))])
    loaded.load_state_dict(saved.state_dict())
    assert loaded.ranks_of[0].hot.tolist() == [95, 96]
    assert other.ranks_of[0].hot.tolist() == hot.tolist() == [7, 12]
    assert torch.equal(other.to_dense()["user"][:, None], other(torch.arange(N)[:, None]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16, torch.uint32, torch.uint64, torch.float16])
def test_counts_of_any_dtype(dtype):
    counts = torch.tensor([1, 100, 120, 110]).to(dtype)
    scheme = HotCold(2, cold=QR(4), force=True)
    assert Embedding(4, D, scheme, frequencies=counts).ranks_of[0].hot.tolist() == [2, 3]
    often = RawCounts(torch.tensor([5, 6, 7]).repeat(20), torch.tensor([115, 120, 110]).repeat(20).to(dtype))
    module = Embedding(2**20, D, scheme, frequencies=often, raw_ids=True)
    assert sorted(module.ranks_of[0].hot.tolist()) == sorted(mixed_ids(torch.tensor([5, 6]), 2**20).tolist())


def test_mixing_mixes():
    """Ids that are multiples of 2**20 spread over the rows of a table; an affine renumbering leaves them in few."""
    numbers = torch.arange(2**12) << 20
    counts = torch.bincount(Mixing(40)(numbers) % 64, minlength=64)
    assert counts.float().var() / counts.float().mean() < 2


def counted(frequencies):
    return Embedding(N, D, HotCold(1, cold=Pool(24)), frequencies=frequencies)


test_errors = refused(
    (lambda: HotCold(60, cold=Pool(9), num_rest=50).spec(N, D), ValueError, r"num_hot \(60\) \+ .*50\) must be .*97"),
    (lambda: HotCold(1, cold=3), TypeError, r"cold \(3\) must be a Scheme or a Pool"),
    (lambda: HotCold(1, cold=HotCold(1, cold=Full())), ValueError, "must not be a HotCold itself"),
    (lambda: HotCold(1, cold=QR(4, operation="feature")), ValueError, r"operation \('feature'\) of cold"),
    (lambda: Pool(9, operation="mult"), ValueError, r"operation \('mult'\) must be one of 'add'"),
    (lambda: Embedding(N, D, HotCold(0, cold=Pool(6))), ValueError, r"num_rows \(6\) of pool 'pool' must .* least 23"),
    (lambda: counted(torch.ones(3)), ValueError, r"frequencies has shape \(3,\)"),
    (lambda: counted(torch.full((N,), torch.nan)), ValueError, r"frequencies\[0\] \(nan\) must be at least 0"),
    (lambda: counted(-torch.ones(N)), ValueError, r"frequencies\[0\] \(-1.0\)"),
    (lambda: counted(torch.full((N,), torch.inf)), ValueError, r"frequencies\[0\] \(inf\)"),
    (lambda: Embedding(N, D, QR(4)).row_numbers(torch.tensor([1])), ValueError, "must add rows"),
)
