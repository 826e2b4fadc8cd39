"""Section 3: the definition by brute force, the families with and without their conditions, huge ids."""

import copy
import itertools
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import definition_1, pairwise_coprime
from refusals import refused

from quorem import partitions
from quorem.paper.partitions import ExplicitPartition, Partition
from quorem.paper.renumbering import Mixing
from quorem.paper.sizes import balanced_sizes, coprime_sizes, coprime_sizes_for_rows

# Partition


@given(
    st.integers(1, 2**63 - 1), st.integers(1, 2**63 - 1), st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20)
)
def test_partition_is_exact_on_all_of_int64(stride: int, size: int, ids: list[int]) -> None:
    assert Partition(stride, size)(torch.tensor(ids)).tolist() == [i // stride % size for i in ids]


INTEGERS = [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_ids_become_int64_before_they_are_divided(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 1], [99, 127]], dtype=dtype).t()
    buckets = Partition(1, 2**40)(ids)
    assert buckets.dtype == torch.int64 and buckets.tolist() == ids.tolist()
    assert Partition(2**31 - 1, 2**40)(torch.tensor([0, 2**31 - 1], dtype=torch.int32)).tolist() == [0, 1]


@pytest.mark.parametrize("bits", [1, 2, 7, 20, 62])
def test_mixing_has_an_inverse(bits: int) -> None:
    ids, mixing = torch.randint(2**bits, (1000,)), Mixing(bits)
    assert torch.equal(mixing.inverse(mixing(ids)), ids) and int(mixing(ids).max()) < 2**bits


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
def test_calls_keep_the_shape_of_ids(shape: tuple[int, ...]) -> None:
    ids = torch.ones(shape, dtype=torch.int64)
    for function in (Partition(1, 2), ExplicitPartition([4, 5]), Mixing(2)):
        assert function(ids).shape == shape


def test_partition_is_a_value() -> None:
    assert Partition(1, 4) == Partition(stride=1, size=4) != Partition(4, 1)
    assert len({Partition(1, 4), Partition(1, 4)}) == 1
    with pytest.raises(AttributeError):
        Partition(1, 4).size = 5  # type: ignore[misc]
    part = Partition(torch.tensor(3), torch.tensor(4))  # type: ignore[arg-type]
    assert type(part.stride) is int and part == Partition(3, 4)


@pytest.mark.parametrize("function", [Partition(1, 2), ExplicitPartition([0, 1]), Mixing(1)])
@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (torch.tensor([0.0]), r"ids \(torch.float32\) must be an integer tensor"),
        (torch.tensor([True]), r"ids \(torch.bool\) must be an integer tensor"),
        ([0, 1], r"ids \(list\) must be an integer tensor"),
        (torch.arange(2).numpy(), r"ids \(ndarray\) must be an integer tensor"),
    ],
)
def test_calls_refuse_ids(function: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        function(ids)


# ExplicitPartition


def test_explicit_partition_looks_up_with_gaps() -> None:
    part = ExplicitPartition([5, 0, 5, 2])
    assert part.size == 6
    assert part.index.dtype == torch.int64
    assert part(torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)).tolist() == [[2, 5], [0, 5]]
    assert ExplicitPartition([2**62]).size == 2**62 + 1


def test_explicit_partition_from_labels() -> None:
    assert ExplicitPartition.from_labels(["Kia", "Ford", "Kia", ("any", 1)]).index.tolist() == [0, 1, 0, 2]


def test_explicit_partition_is_a_value() -> None:
    index = torch.arange(100, dtype=torch.int32) % 7
    part, same = ExplicitPartition(index), ExplicitPartition(index.tolist())
    other = ExplicitPartition(index.flip(0))
    assert part == same and hash(part) == hash(same)
    assert part != other and part != Partition(1, 7) and part != "part"
    assert pickle.loads(pickle.dumps(part)) == part == copy.deepcopy(part)
    with pytest.raises(AttributeError):
        part.size = 3  # type: ignore[misc]
    wide = torch.arange(100)
    kept = ExplicitPartition(wide)
    wide.zero_()
    assert kept.size == 100 and kept.index[99] == 99


def test_explicit_partition_is_real_inside_a_meta_context() -> None:
    with torch.device("meta"):
        part = ExplicitPartition([0, 1, 1])
        assert partitions.is_complementary([part, Partition(1, 2), Partition(2, 2)], 3)
    assert part.index.tolist() == [0, 1, 1]


@pytest.mark.parametrize("bad", [-1, 3, 2**40])
def test_explicit_partition_refuses_ids_out_of_range(bad: int) -> None:
    with pytest.raises(IndexError, match=rf"id \({bad}\) must be in \[0, 3\)"):
        ExplicitPartition([0, 1, 2])(torch.tensor([0, bad]))


# Families


@pytest.mark.parametrize("n", [2**24 + 1, 2**31 + 1, 2**53 + 1, 2**62 + 1])
def test_quotient_and_remainder_restore_huge_ids(n: int) -> None:
    m = math.isqrt(n) + 1
    ids = [0, 1, m - 1, m, n // 3, n - 2, n - 1]
    remainder, quotient = (part(torch.tensor(ids)) for part in partitions.quotient_remainder(n, m))
    assert [q * m + r for q, r in zip(quotient.tolist(), remainder.tolist(), strict=True)] == ids
    assert int(quotient.max()) == partitions.quotient_remainder(n, m)[1].size - 1


digits = partitions.generalized_quotient_remainder


test_refusals = refused(
    (lambda: Partition(0, 4), ValueError, r"stride \(0\) must be at least 1"),
    (lambda: Partition(1, -2), ValueError, r"size \(-2\) must be at least 1"),
    (lambda: Partition(2**63, 1), ValueError, r"stride \(9223372036854775808\) must be .* < 2\*\*63"),
    (lambda: Partition(1.0, 4), TypeError, r"stride \(1\.0\) must be an integer"),
    (lambda: Partition(1, True), TypeError, r"size \(True\) must be an integer"),
    (lambda: Partition(1, "4"), TypeError, r"size \('4'\) must be an integer"),
    (lambda: ExplicitPartition([]), ValueError, r"index \(shape \[0\]\) must be 1-D and not empty"),
    (lambda: ExplicitPartition([[0, 1]]), ValueError, r"index \(shape \[1, 2\]\) must be 1-D"),
    (lambda: ExplicitPartition([0, -1]), ValueError, r"index holds bucket -1; buckets must be >= 0"),
    (lambda: ExplicitPartition([0.5]), TypeError, r"index \(torch.float32\) must be an integer tensor"),
    (lambda: ExplicitPartition([True]), TypeError, r"index \(torch.bool\) must be an integer tensor"),
    (lambda: partitions.naive(0), ValueError, r"n \(0\) must be at least 1"),
    (lambda: partitions.naive(10.0), TypeError, r"n \(10\.0\) must be an integer"),
    (lambda: partitions.hashing(10, 0), ValueError, r"m \(0\) must be in \[1, 10\]"),
    (lambda: partitions.hashing(10, True), TypeError, r"m \(True\) must be an integer"),
    (lambda: partitions.quotient_remainder(10, 11), ValueError, r"m \(11\) must be in \[1, 10\]"),
    (lambda: digits(10, [3, 3]), ValueError, r"the product of sizes \(3, 3\) \(9\) must be >= n \(10\)"),
    (lambda: digits(1, []), ValueError, r"the product of sizes \(\)"),
    (lambda: digits(4, [4, 0]), ValueError, r"sizes\[1\] \(0\) must be at least 1"),
    (lambda: digits(4, [2**40] * 3), ValueError, r"stride \(\d+\) must be .* < 2\*\*63"),
    (lambda: partitions.chinese_remainder(6, [2, 3.0]), TypeError, r"sizes\[1\] \(3\.0\) must be"),
    (lambda: partitions.chinese_remainder(10, [5, 4, 6]), ValueError, r"sizes \(5, 4, 6\) .* gcd\(4, 6\) = 2"),
    (lambda: partitions.overlapping_quotient_remainder(10, [3, 3]), ValueError, r"the product of sizes \(3, 3\)"),
    (lambda: partitions.is_complementary([Partition(1, 2)], 0), ValueError, r"n \(0\) must be in \[1, 2147483648\]"),
    (
        lambda: partitions.is_complementary([Partition(1, 9), ExplicitPartition([0, 1])], 3),
        ValueError,
        r"parts\[1\] maps 2 ids; an ExplicitPartition must map n \(3\)",
    ),
)


# The overlapping extension


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.data())
def test_overlapping_is_complementary_and_uses_its_tables(sizes: list[int], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, min(math.prod(sizes), 3000)))
    parts = partitions.overlapping_quotient_remainder(n, sizes)
    assert [part.size for part in parts] == sizes
    assert parts[-1].stride * parts[-1].size >= n
    for low, high in itertools.pairwise(parts):
        assert high.stride % low.stride == 0 and high.stride // low.stride <= low.size
    assert partitions.is_complementary(parts, n)
    for part in parts:
        used = len(part(torch.arange(n)).unique())
        assert used == min(part.size, -(-n // part.stride))
        assert 2 * used > min(part.size, sizes[-1], n)


@given(st.integers(1, 2**62), st.integers(1, 8), st.integers(0, 10**6))
def test_overlapping_stays_exact_for_huge_n(n: int, k: int, spare: int) -> None:
    sizes = [size + spare for size in partitions.balanced_sizes(n, k)]
    parts = partitions.overlapping_quotient_remainder(n, sizes)
    assert parts[-1].stride * parts[-1].size >= n
    assert all(b.stride // a.stride <= a.size for a, b in itertools.pairwise(parts))
    assert 2 * -(-n // parts[-1].stride) > min(sizes[-1], n)


# Complementary


@given(st.integers(1, 24), st.data())
def test_is_complementary_against_the_definition(n: int, data: st.DataObject) -> None:
    # Sizes up to 2**62, whose products are past int64.
    buckets = st.integers(0, 3) | st.sampled_from([7, 1000, 2**40, 2**62])
    explicit = st.lists(buckets, min_size=n, max_size=n).map(ExplicitPartition)
    strides = st.integers(1, 6)
    closed = st.builds(Partition, strides, st.integers(1, 6) | st.sampled_from([2**33, 2**62]))
    parts = data.draw(st.lists(explicit | closed, min_size=1, max_size=4))
    assert partitions.is_complementary(parts, n) == definition_1(parts, n)


def test_one_collision_among_many_is_found() -> None:
    n = 10**5
    index = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    assert partitions.is_complementary([ExplicitPartition(index)], n)
    index[5] = index[n - 7]
    assert not partitions.is_complementary([ExplicitPartition(index)], n)
    spread = ExplicitPartition(index * 2**40)
    assert not partitions.is_complementary([spread, Partition(10, 1), Partition(n, 2)], n)
    assert partitions.is_complementary([spread, Partition(10, 100)], n)


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


test_refused_sizes = refused(
    (lambda: balanced_sizes(0, 2), ValueError, r"n \(0\) must be at least 1"),
    (lambda: balanced_sizes(5, 1.5), TypeError, r"k \(1\.5\) must be an integer"),
    (lambda: coprime_sizes(5, 0), ValueError, r"k \(0\) must be at least 1"),
    (lambda: coprime_sizes_for_rows(2, 3), ValueError, r"num_rows \(2\) must be at least 3"),
    (lambda: coprime_sizes_for_rows(2, 0), ValueError, r"k \(0\) must be at least 1"),
)
