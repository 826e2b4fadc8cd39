"""Renumbering of ids: bijections, exact for huge n."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quorem import partitions
from quorem.paper.partitions import ExplicitPartition
from quorem.paper.renumbering import Permutation


@given(st.integers(1, 300), st.integers(0, 2**63 - 1))
def test_permutation_is_a_bijection(n: int, seed: int) -> None:
    permutation = Permutation.from_seed(n, seed)
    assert sorted(permutation(torch.arange(n)).tolist()) == list(range(n))
    assert permutation == Permutation.from_seed(n, seed)
    assert (permutation.multiplier == 1) == (n <= 2)


@given(st.integers(1, 2**63 - 1), st.integers(0, 1000), st.data())
def test_permutation_is_exact_for_huge_n(n: int, seed: int, data: st.DataObject) -> None:
    permutation = Permutation.from_seed(n, seed)
    ids = [0, n - 1, *data.draw(st.lists(st.integers(0, n - 1), max_size=5))]
    expected = [(permutation.multiplier * i + permutation.shift) % n for i in ids]
    assert permutation(torch.tensor(ids)).tolist() == expected
    assert math.gcd(permutation.multiplier, n) == 1


def test_permutation_keeps_partitions_complementary_and_moves_neighbours() -> None:
    n = 1000
    permutation = Permutation.from_seed(n, seed=7)
    assert permutation != Permutation.from_seed(n, seed=8)
    parts = partitions.quotient_remainder(n, 40)
    renumbered = [ExplicitPartition(part(permutation(torch.arange(n)))) for part in parts]
    assert partitions.is_complementary(renumbered, n)
    assert permutation(torch.tensor([5], dtype=torch.int32)).dtype == torch.int64


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: Permutation(4, 0, 10), ValueError, r"multiplier \(4\) must be coprime with n \(10\); .* 2"),
        (lambda: Permutation(0, 0, 10), ValueError, r"multiplier \(0\) must be at least 1"),
        (lambda: Permutation(3, 10, 10), ValueError, r"shift \(10\) must be in \[0, 9\]"),
        (lambda: Permutation(3, -1, 10), ValueError, r"shift \(-1\) must be in \[0, 9\]"),
        (lambda: Permutation(2**62 + 3, 0, 10), ValueError, r"multiplier .* must be < 2\*\*63 for n \(10\)"),
        (lambda: Permutation(1.0, 0, 10), TypeError, r"multiplier \(1\.0\) must be an integer"),  # type: ignore[arg-type]
        (lambda: Permutation.from_seed(0, 1), ValueError, r"n \(0\) must be at least 1"),
        (lambda: Permutation.from_seed(10, -1), ValueError, r"seed \(-1\) must be at least 0"),
        (lambda: Permutation.from_seed(10, None), TypeError, r"seed \(None\) must be an integer"),  # type: ignore[arg-type]
    ],
)
def test_permutation_refuses(call: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
