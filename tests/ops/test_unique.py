"""Distinct values of segments, and positions in rising lists: compiled, plain, and by brute force."""

import pickle

import pytest
import torch

from quorem.ops import search as searching
from quorem.ops import unique as finding
from quorem.ops.search import Searcher, search
from quorem.ops.unique import unique_by_segment


@pytest.fixture(params=["compiled", "plain"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(finding, "compiled", lambda *_: None)
        monkeypatch.setattr(searching, "compiled", lambda *_: None)
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("sizes", [[0], [1], [5, 0, 7, 1], [300, 2, 41], [0, 0, 9]])
def test_distinct_values_of_each_segment(version: str, dtype: torch.dtype, sizes: list[int]) -> None:
    bounds = [sum(sizes[:s]) for s in range(len(sizes) + 1)]
    values = torch.randint(-20, 20, (bounds[-1],)).to(dtype)
    unique = unique_by_segment(values, bounds)
    assert torch.equal(unique.values[unique.inverse], values.long())
    parts = unique.values.split(unique.counts)
    for s, part in enumerate(parts):
        first = sum(unique.counts[:s])
        segment = slice(bounds[s], bounds[s + 1])
        assert sorted(part.tolist()) == sorted(set(values[segment].tolist()))
        assert all(first <= i < first + len(part) for i in unique.inverse[segment].tolist())


def test_distinct_values_of_64_bits(version: str) -> None:
    values = torch.tensor([-(2**63), 2**63 - 1, -1, 2**62, -(2**63), -1]).repeat(50)
    unique = unique_by_segment(values, [0, len(values)])
    assert unique.counts == [4] and torch.equal(unique.values[unique.inverse], values)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("limit", "size"), [(1, 1), (10, 0), (10, 3), (1000, 1000), (10**6, 5000), (2**31 - 1, 17)])
def test_positions_in_a_rising_list(version: str, dtype: torch.dtype, limit: int, size: int) -> None:
    ordered = torch.randint(0, limit, (size,)).unique().to(dtype) if size < limit else torch.arange(limit).to(dtype)
    ids = torch.cat([torch.randint(0, limit, (500,)), ordered[:100].long(), torch.tensor([0, limit - 1])]).to(dtype)
    below, inside = Searcher()(ordered, ids)
    members = set(ordered.tolist())
    assert inside.tolist() == [i in members for i in ids.tolist()]
    assert below.tolist() == torch.searchsorted(ordered, ids).tolist() == search(ordered, ids)[0].tolist()


def test_a_list_that_changes_is_searched_anew() -> None:
    searcher, ordered, ids = Searcher(), torch.arange(0, 4000, 4), torch.arange(4000)
    assert searcher(ordered, ids)[1].sum() == 1000
    ordered.add_(1)
    assert torch.equal(searcher(ordered, ids)[1], ids % 4 == 1)
    assert torch.equal(pickle.loads(pickle.dumps(searcher))(ordered, ids)[1], ids % 4 == 1)
