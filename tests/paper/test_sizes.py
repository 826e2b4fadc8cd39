"""Sizes of tables against brute force, and for huge n."""

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import pairwise_coprime

from quorem.paper.sizes import balanced_sizes, coprime_sizes, coprime_sizes_for_rows


def tuples_of_sum(total: int, k: int, at_most: int) -> list[tuple[int, ...]]:
    """Every non-increasing tuple of k positive integers of that sum."""
    if k == 0:
        return [()] if total == 0 else []
    firsts = range(1, min(total, at_most) + 1)
    return [(first, *rest) for first in firsts for rest in tuples_of_sum(total - first, k - 1, first)]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_balanced_sizes_against_brute_force(k: int) -> None:
    for n in range(1, 60):
        total = next(s for s in itertools.count(k) if any(math.prod(t) >= n for t in tuples_of_sum(s, k, s)))
        found = balanced_sizes(n, k)
        assert sum(found) == total and math.prod(found) >= n and len(found) == k
        assert list(found) == sorted(found, reverse=True)


@given(st.integers(1, 2**62), st.integers(1, 70))
def test_balanced_sizes_for_huge_n(n: int, k: int) -> None:
    sizes = balanced_sizes(n, k)
    assert math.prod(sizes) >= n and len(sizes) == k and sizes[0] - sizes[-1] <= 1
    # One row fewer, split as evenly as can be, falls short.
    if n > 1:
        size, larger = divmod(sum(sizes) - 1, k)
        assert (size + 1) ** larger * size ** (k - larger) < n


@pytest.mark.parametrize(("k", "limit"), [(1, 30), (2, 150), (3, 200), (4, 300), (5, 300)])
def test_coprime_sizes_against_brute_force(k: int, limit: int) -> None:
    for n in range(1, limit, 1 if k < 3 else 7):
        for total in itertools.count(k):
            fits = [t for t in tuples_of_sum(total, k, total) if math.prod(t) >= n and pairwise_coprime(t)]
            if fits:
                break
        found = coprime_sizes(n, k)
        assert found in fits and math.prod(found) == max(map(math.prod, fits))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_coprime_sizes_for_rows_against_brute_force(k: int) -> None:
    best = 0
    for rows in range(k, 26):
        best = max([best, *(math.prod(t) for t in tuples_of_sum(rows, k, rows) if pairwise_coprime(t))])
        found = coprime_sizes_for_rows(rows, k)
        assert len(found) == k and sum(found) <= rows and pairwise_coprime(found)
        assert math.prod(found) == best and list(found) == sorted(found, reverse=True)


@given(st.integers(1, 10**12), st.integers(1, 8))
def test_the_two_coprime_searches_agree(n: int, k: int) -> None:
    sizes = coprime_sizes(n, k)
    assert math.prod(sizes) >= n and pairwise_coprime(sizes) and len(sizes) == k
    assert math.prod(coprime_sizes_for_rows(sum(sizes), k)) == math.prod(sizes)
    if sum(sizes) > k:
        assert math.prod(coprime_sizes_for_rows(sum(sizes) - 1, k)) < n


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: balanced_sizes(0, 2), ValueError, r"n \(0\) must be at least 1"),
        (lambda: balanced_sizes(5, 1.5), TypeError, r"k \(1\.5\) must be an integer"),
        (lambda: coprime_sizes(5, 0), ValueError, r"k \(0\) must be at least 1"),
        (lambda: coprime_sizes_for_rows(2, 3), ValueError, r"num_rows \(2\) must be at least 3"),
        (lambda: coprime_sizes_for_rows(2, 0), ValueError, r"k \(0\) must be at least 1"),
    ],
)
def test_refusals(call: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
