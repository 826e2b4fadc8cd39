"""Partitions of the categories 0, ..., n - 1 into buckets (section 3); each bucket has one row of a small table.

Partitions are *complementary* when any two categories fall into different buckets of at least one of them, so
that the buckets together still identify the category. Every family of the paper (Shi et al., KDD 2020) has the
form ``p(i) = (i // stride) % size``; partitions are listed least significant digit first. Ids are int64 throughout.
"""

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_int
from .sizes import balanced_sizes as balanced_sizes
from .sizes import ceil_div
from .sizes import coprime_sizes as coprime_sizes

_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint32, torch.uint16, torch.uint8)


@dataclass(frozen=True)
class Partition:
    """The buckets ``(ids // stride) % size``: one digit of each id, always int64 (section 3).

    A partition does not know n, so ids are not checked: an id past the end silently falls into some bucket.

    Args:
        stride: number of consecutive ids in one bucket.
        size: number of buckets.

    Raises:
        TypeError: if ``stride`` or ``size`` is not an integer or, on a call, ``ids`` is not an integer tensor.
        ValueError: if ``stride`` or ``size`` is not in ``[1, 2**63)``.

    >>> Partition(stride=4, size=3)(torch.arange(10))
    tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    """

    stride: int
    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "stride", check_int("stride", self.stride))
        object.__setattr__(self, "size", check_int("size", self.size))

    def __call__(self, ids: Tensor) -> Tensor:
        return (int64("ids", ids) // self.stride) % self.size


@dataclass(frozen=True, eq=False, init=False, repr=False)
class ExplicitPartition:
    """Buckets from a lookup table: id ``i`` falls into bucket ``index[i]`` (section 3, last paragraph).

    In the paper's example of cars, no two of make, year and type distinguish all four cars, but all three together do.

    >>> make = ExplicitPartition.from_labels(["Ford", "Ford", "Ford", "Kia"])
    >>> year = ExplicitPartition.from_labels([2019, 2019, 2020, 2019])
    >>> kind = ExplicitPartition.from_labels(["SUV", "sedan", "SUV", "SUV"])
    >>> is_complementary([make, year], 4), is_complementary([make, year, kind], 4)
    (False, True)

    Args:
        index: the bucket of each id, integers ``[n]``, copied to the CPU. Unused buckets are allowed.

    Raises:
        TypeError: if ``index`` does not hold integers or, on a call, ``ids`` is not an integer tensor.
        ValueError: if ``index`` is not 1-D, is empty, or holds a negative bucket.
        IndexError: on a call, if an id is outside ``[0, n)``.
    """

    index: Tensor
    size: int

    def __init__(self, index: Tensor | Sequence[int]) -> None:
        index = torch.as_tensor(index, device="cpu")
        if index.dim() != 1 or not len(index):
            raise ValueError(f"index (shape {list(index.shape)}) must be 1-D and not empty")
        index = int64("index", index).clone()
        low, high = (int(bound) for bound in index.aminmax())
        if low < 0:
            raise ValueError(f"index holds bucket {low}; buckets must be >= 0")
        object.__setattr__(self, "index", index)
        object.__setattr__(self, "size", high + 1)

    @classmethod
    def from_labels(cls, labels: Iterable[Hashable]) -> "ExplicitPartition":
        """One bucket for each distinct label, numbered in order of first appearance.

        Args:
            labels: the label of each id.

        >>> ExplicitPartition.from_labels(["Ford", "Ford", "Kia"])
        ExplicitPartition([0, 0, 1], n=3, size=2)
        """
        buckets: dict[Hashable, int] = {}
        return cls([buckets.setdefault(label, len(buckets)) for label in labels])

    def __call__(self, ids: Tensor) -> Tensor:
        ids = int64("ids", ids)
        outside = ids[(ids < 0) | (ids >= len(self.index))]
        if len(outside):
            raise IndexError(f"id ({int(outside[0])}) must be in [0, {len(self.index)})")
        return self.index.to(ids.device)[ids]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExplicitPartition) and torch.equal(self.index, other.index)

    def __hash__(self) -> int:
        return hash((len(self.index), self.size, *self.index[:32].tolist()))

    def __repr__(self) -> str:
        start = ", ".join(map(str, self.index[:8].tolist())) + (", ..." if len(self.index) > 8 else "")
        return f"ExplicitPartition([{start}], n={len(self.index)}, size={self.size})"


def naive(n: int) -> tuple[Partition, ...]:
    """One bucket per category: the full table (section 3, example 1).

    Args:
        n: number of ids.

    >>> naive(10)
    (Partition(stride=1, size=10),)
    """
    return (Partition(1, check_int("n", n)),)


def hashing(n: int, m: int) -> tuple[Partition, ...]:
    """The remainder modulo ``m`` alone: categories collide unless ``m = n`` (section 2, algorithm 1).

    Args:
        n: number of ids.
        m: number of buckets.

    Raises:
        ValueError: if ``m`` is not in ``[1, n]``.

    >>> hashing(10, 4)
    (Partition(stride=1, size=4),)
    """
    return (Partition(1, check_int("m", m, 1, check_int("n", n))),)


def quotient_remainder(n: int, m: int) -> tuple[Partition, ...]:
    """Remainder and quotient modulo ``m`` (section 2, algorithm 2), least significant digit first.

    Args:
        n: number of ids.
        m: number of remainders.

    Raises:
        ValueError: if ``m`` is not in ``[1, n]``.

    >>> quotient_remainder(10, 4)
    (Partition(stride=1, size=4), Partition(stride=4, size=3))
    """
    m = check_int("m", m, 1, check_int("n", n))
    return (Partition(1, m), Partition(m, ceil_div(n, m)))


def generalized_quotient_remainder(n: int, sizes: Sequence[int]) -> tuple[Partition, ...]:
    """The digits of the id in the mixed radix ``sizes`` (section 3, example 3).

    Args:
        n: number of ids.
        sizes: number of buckets of each partition, least significant digit first.

    Raises:
        ValueError: if the product of ``sizes`` is below ``n``, or a stride reaches 2**63.

    >>> generalized_quotient_remainder(24, (4, 3, 2))
    (Partition(stride=1, size=4), Partition(stride=4, size=3), Partition(stride=12, size=2))
    """
    n, sizes = _covering(n, sizes)
    return tuple(Partition(math.prod(sizes[:j]), size) for j, size in enumerate(sizes))


def chinese_remainder(n: int, sizes: Sequence[int]) -> tuple[Partition, ...]:
    """The remainders modulo pairwise coprime ``sizes`` (section 3, example 4).

    Args:
        n: number of ids.
        sizes: number of buckets of each partition, pairwise coprime.

    Raises:
        ValueError: if two of ``sizes`` share a factor, or their product is below ``n``.

    >>> chinese_remainder(30, (5, 3, 2))
    (Partition(stride=1, size=5), Partition(stride=1, size=3), Partition(stride=1, size=2))
    """
    n, sizes = _covering(n, sizes)
    for a, b in itertools.combinations(sizes, 2):
        if (common := math.gcd(a, b)) != 1:
            raise ValueError(f"sizes {sizes} must be pairwise coprime, but gcd({a}, {b}) = {common}")
    return tuple(Partition(1, size) for size in sizes)


def overlapping_quotient_remainder(n: int, sizes: Sequence[int]) -> tuple[Partition, ...]:
    """Mixed-radix digits that overlap, so that rows are used even if the tables are larger than ``n`` requires.

    This family is not in the paper. Strides s_1 = 1, s_2, ..., s_k grow by integer factors of at most m_j, until
    s_k m_k >= n. The last digit does not wrap, so it fixes a block of s_k ids, which spans at most m_(k-1) quotients by
    s_(k-1), so the digit before it fixes a block of s_(k-1) ids, and so on: the partitions are complementary.

    Args:
        n: number of ids.
        sizes: number of buckets of each partition, least significant digit first.

    Raises:
        ValueError: if the product of ``sizes`` is below ``n``.

    >>> [p.stride for p in overlapping_quotient_remainder(10**6, (1000, 1000, 1000))]
    [1, 25, 1000]
    """
    n, sizes = _covering(n, sizes)
    *lower, last = sizes
    strides, rest = [1], ceil_div(n, last)  # rest: least factor from the newest stride to s_k
    for j, size in enumerate(lower):
        low = ceil_div(rest, math.prod(lower[j + 1 :]))  # the factors above can supply no more
        high = min(size, max(low, balanced_sizes(rest, len(lower) - j)[0]))
        # Of the factors near the even share, take the one that overshoots least: a small s_k uses more rows of table k.
        near = range(max(low, high - min(high // 2, 999)), high + 1)
        factor = min(reversed(near), key=lambda f: f * ceil_div(rest, f))
        strides.append(strides[-1] * factor)
        rest = ceil_div(rest, factor)
    return tuple(map(Partition, strides, sizes))


def are_digits(parts: Sequence[Partition | ExplicitPartition], n: int) -> bool:
    """Whether the buckets of each number below ``n`` are its digits, least significant first.

    >>> are_digits(quotient_remainder(10, 4), 10), are_digits(chinese_remainder(12, (4, 3)), 12)
    (True, False)
    """
    place = 1
    for part in parts:
        if not isinstance(part, Partition) or part.stride != place:
            return False
        place *= part.size
    return place >= n


def is_complementary(parts: Sequence[Partition | ExplicitPartition], n: int) -> bool:
    """Whether any two of the ``n`` categories differ in some partition (section 3, definition 1); exact.

    Args:
        parts: the partitions.
        n: number of ids.

    Raises:
        ValueError: if ``n`` is not in ``[1, 2**31]``, or an ``ExplicitPartition`` does not map ``n`` ids.

    >>> is_complementary(quotient_remainder(10, 4), 10), is_complementary(hashing(10, 4), 10)
    (True, False)
    """
    n = check_int("n", n, 1, 2**31)  # so that n * n fits in int64
    for j, part in enumerate(parts):
        if isinstance(part, ExplicitPartition) and len(part.index) != n:
            raise ValueError(f"parts[{j}] maps {len(part.index)} ids; an ExplicitPartition must map n ({n})")
    if math.prod(part.size for part in parts) < n:
        return False
    ids = torch.arange(n, device="cpu")
    key = torch.zeros_like(ids)  # the position of an id's buckets so far among all that occur, so below n
    for part in parts:
        bucket = part(ids) if part.size <= n else torch.unique(part(ids), return_inverse=True)[1]
        key = torch.unique(key * n + bucket, return_inverse=True)[1]
    return int(key.max()) == n - 1


def _covering(n: int, sizes: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """``n`` and ``sizes``, checked to give at least ``n`` combinations of buckets."""
    n, sizes = check_int("n", n), tuple(check_int(f"sizes[{j}]", size) for j, size in enumerate(sizes))
    if not sizes or math.prod(sizes) < n:
        raise ValueError(f"the product of sizes {sizes} ({math.prod(sizes)}) must be >= n ({n})")
    return n, sizes


def int64(name: str, values: Tensor) -> Tensor:
    """``values`` as int64, so that arithmetic on int32 ids cannot overflow; floats and bools are refused."""
    if not isinstance(values, Tensor) or values.dtype not in _ID_DTYPES:
        got = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name} ({got}) must be an integer tensor")
    return values.to(torch.int64)
