"""Partitions of the categories 0, ..., n - 1 into buckets (section 3); a bucket is a row of a small table.

Partitions are *complementary* when any two categories fall into different buckets of at least one of them, so
that the buckets together still name the category. Every family of the paper (Shi et al., KDD 2020) is one
closed form, ``p(i) = (i // stride) % size``, listed least significant digit first. Ids stay int64 throughout.
"""

import itertools
import math
import random
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import INT64_MAX, check_int

_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Partition:
    """The buckets ``(ids // stride) % size``: one digit of each id, always int64 (section 3).

    Ids are not checked against n, which a partition does not know: one past the end would alias silently.

    Raises:
        TypeError: if ``stride`` or ``size`` is not an integer or, on a call, ``ids`` not an integer tensor.
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
        return (_int64("ids", ids) // self.stride) % self.size


@dataclass(frozen=True, eq=False, init=False, repr=False)
class ExplicitPartition:
    """Buckets looked up in a map: id ``i`` falls into bucket ``index[i]`` (section 3, its last paragraph).

    The paper's cars: no two of make, year and type tell these four apart, but all three do.

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
        index = _int64("index", index).clone()
        low, high = (int(bound) for bound in index.aminmax())
        if low < 0:
            raise ValueError(f"index holds bucket {low}; buckets must be >= 0")
        object.__setattr__(self, "index", index)
        object.__setattr__(self, "size", high + 1)

    @classmethod
    def from_labels(cls, labels: Iterable[Hashable]) -> "ExplicitPartition":
        """One bucket for each distinct label, numbered in order of first appearance."""
        buckets: dict[Hashable, int] = {}
        return cls([buckets.setdefault(label, len(buckets)) for label in labels])

    def __call__(self, ids: Tensor) -> Tensor:
        ids = _int64("ids", ids)
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


@dataclass(frozen=True)
class Permutation:
    """The bijection ``i -> (multiplier * i + shift) % n``, to renumber ids before they are partitioned.

    Two integers, because n stored ones would outweigh the table that the partitions make small. It is affine: it
    renumbers ids but does not mix them (ids a fixed distance apart stay a fixed distance apart); ``Mixing`` does.

    Raises:
        ValueError: if ``multiplier`` and ``n`` share a factor, ``shift`` is not in ``[0, n)``, or
            ``multiplier * (n - 1) + shift`` overflows int64.

    >>> Permutation(multiplier=3, shift=1, n=10)(torch.arange(10))
    tensor([1, 4, 7, 0, 3, 6, 9, 2, 5, 8])
    """

    multiplier: int
    shift: int
    n: int

    def __post_init__(self) -> None:
        n, multiplier = check_int("n", self.n), check_int("multiplier", self.multiplier)
        shift = check_int("shift", self.shift, 0, n - 1)
        if (common := math.gcd(multiplier, n)) != 1:
            raise ValueError(f"multiplier ({multiplier}) must be coprime with n ({n}); their gcd is {common}")
        if multiplier * (n - 1) + shift > INT64_MAX:
            raise ValueError(f"multiplier ({multiplier}) * (n - 1) + shift must be < 2**63 for n ({n})")
        for name, value in (("multiplier", multiplier), ("shift", shift), ("n", n)):
            object.__setattr__(self, name, value)

    @classmethod
    def from_seed(cls, n: int, seed: int) -> "Permutation":
        """The permutation that ``seed`` draws; ``multiplier=1``, a rotation, only where no other fits."""
        n, draw = check_int("n", n), random.Random(check_int("seed", seed, 0))
        high = min(n, INT64_MAX // n)
        start = draw.randrange(2, high) if high > 2 else 2
        candidates = itertools.chain(range(start, high), range(2, min(start, high)))
        multiplier = next((m for m in candidates if math.gcd(m, n) == 1), 1)
        return cls(multiplier, draw.randrange(min(n, 2**63 - multiplier * (n - 1))), n)

    def __call__(self, ids: Tensor) -> Tensor:
        return (_int64("ids", ids) * self.multiplier + self.shift) % self.n


@dataclass(frozen=True)
class Mixing:
    """A bijection of ``[0, 2**bits)`` that mixes: ids with a pattern come out without one.

    Three rounds of a shift by half the bits and an odd factor; ``MIXING_FACTORS`` are fixed, so that every device,
    file and version mixes alike. Each step can be undone, which makes it a bijection.

    Raises:
        ValueError: if ``bits`` is not in ``[1, 62]``.

    >>> sorted(Mixing(4)(torch.arange(16)).tolist()) == list(range(16))
    True
    """

    bits: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_int("bits", self.bits, 1, 62))

    @classmethod
    def covering(cls, n: int) -> "Mixing":
        """The smallest one over at least ``n`` numbers.

        >>> Mixing.covering(1000)
        Mixing(bits=10)
        """
        return cls(max(1, (check_int("n", n, 1) - 1).bit_length()))

    def __call__(self, ids: Tensor) -> Tensor:
        return mix(_int64("ids", ids), torch.tensor(self.bits, device=ids.device))


MIXING_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)  # odd, below 2**62


def mix(numbers: Tensor, bits: Tensor) -> Tensor:
    """``Mixing(bits)`` of ``numbers``, each by its own number of bits; 0 bits leave a number as it is."""
    shift, mask = bits // 2 + 1, (torch.ones_like(bits) << bits) - 1
    mixed = numbers & mask
    for factor in MIXING_FACTORS:
        mixed = ((mixed ^ (mixed >> shift)) * factor) & mask
    mixed = mixed ^ (mixed >> shift)
    return torch.where(bits > 0, mixed, numbers)


def naive(n: int) -> tuple[Partition, ...]:
    """A bucket for every category: the full table (section 3, example 1).

    >>> naive(10)
    (Partition(stride=1, size=10),)
    """
    return (Partition(1, check_int("n", n)),)


def hashing(n: int, m: int) -> tuple[Partition, ...]:
    """The remainder modulo ``m`` alone: categories collide, unless ``m = n`` (section 2, algorithm 1).

    Raises:
        ValueError: if ``m`` is not in ``[1, n]``.

    >>> hashing(10, 4)
    (Partition(stride=1, size=4),)
    """
    return (Partition(1, check_int("m", m, 1, check_int("n", n))),)


def quotient_remainder(n: int, m: int) -> tuple[Partition, ...]:
    """Remainder and quotient modulo ``m`` (section 2, algorithm 2), least significant digit first.

    Raises:
        ValueError: if ``m`` is not in ``[1, n]``.

    >>> quotient_remainder(10, 4)
    (Partition(stride=1, size=4), Partition(stride=4, size=3))
    """
    m = check_int("m", m, 1, check_int("n", n))
    return (Partition(1, m), Partition(m, _ceil_div(n, m)))


def generalized_quotient_remainder(n: int, sizes: Sequence[int]) -> tuple[Partition, ...]:
    """The digits of the id in the mixed radix ``sizes`` (section 3, example 3).

    Raises:
        ValueError: if the product of ``sizes`` is below ``n``, or a stride reaches 2**63.

    >>> generalized_quotient_remainder(24, (4, 3, 2))
    (Partition(stride=1, size=4), Partition(stride=4, size=3), Partition(stride=12, size=2))
    """
    n, sizes = _covering(n, sizes)
    return tuple(Partition(math.prod(sizes[:j]), size) for j, size in enumerate(sizes))


def chinese_remainder(n: int, sizes: Sequence[int]) -> tuple[Partition, ...]:
    """The remainders modulo pairwise coprime ``sizes`` (section 3, example 4).

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
    """Mixed-radix digits that overlap, so that tables larger than ``n`` needs are used (not in the paper).

    With sizes (1000, 1000, 1000) and n = 10**6 the third digit of the generalized family is always 0. Here
    the strides s_1 = 1, s_2, ..., s_k grow by integer factors s_(j+1) / s_j <= m_j, until s_k * m_k >= n.
    Complementary: the last digit does not wrap, so it fixes a block of s_k ids. That block spans at most
    m_(k-1) consecutive quotients by s_(k-1), so the digit before fixes a block of s_(k-1) ids, and so on.

    Table j uses min(m_j, ceil(n / s_j)) of its rows: more than half of min(m_j, m_k, n), and often all, since
    s_k < 2 n / m_k unless n <= m_k (no factor is more than what was missing, so s_k overshoots less than twice).
    Equal to ``generalized_quotient_remainder`` when the product of ``sizes`` is ``n``.

    Raises:
        ValueError: if the product of ``sizes`` is below ``n``.

    >>> [p.stride for p in overlapping_quotient_remainder(10**6, (1000, 1000, 1000))]
    [1, 25, 1000]
    """
    n, sizes = _covering(n, sizes)
    *lower, last = sizes
    strides, rest = [1], _ceil_div(n, last)  # rest: the factor from the newest stride to s_k, at least
    for j, size in enumerate(lower):
        low = _ceil_div(rest, math.prod(lower[j + 1 :]))  # the digits above can take no more
        high = min(size, max(low, balanced_sizes(rest, len(lower) - j)[0]))
        # Near the even share, the factor that overshoots least: a smaller s_k uses more rows of table k.
        near = range(max(low, high - min(high // 2, 999)), high + 1)
        factor = min(reversed(near), key=lambda f: f * _ceil_div(rest, f))
        strides.append(strides[-1] * factor)
        rest = _ceil_div(rest, factor)
    return tuple(map(Partition, strides, sizes))


def balanced_sizes(n: int, k: int) -> tuple[int, ...]:
    """The ``k`` sizes of smallest sum whose product reaches ``n``, largest first: O(k n^(1/k)) (section 4).

    >>> balanced_sizes(1000, 3), balanced_sizes(1001, 3)
    ((10, 10, 10), (11, 10, 10))
    """
    n, k = check_int("n", n), check_int("k", k)
    root = 0
    for bit in reversed(range(n.bit_length() // k + 1)):
        if (root | 1 << bit) ** k <= n:
            root |= 1 << bit
    # For a given sum the product is largest when sizes differ by at most one (AM-GM): only root and root + 1.
    larger = next(j for j in range(k + 1) if (root + 1) ** j * root ** (k - j) >= n)
    return (root + 1,) * larger + (root,) * (k - larger)


def coprime_sizes(n: int, k: int) -> tuple[int, ...]:
    """The ``k`` pairwise coprime sizes of smallest sum whose product reaches ``n``, largest first.

    Sizes of 1 are allowed, any number of them. Among equal sums, the largest product. Exact.

    >>> coprime_sizes(1000, 3), coprime_sizes(10**6, 2)
    ((13, 11, 7), (1001, 1000))
    """
    n, k = check_int("n", n), check_int("k", k)
    rows = itertools.count(sum(balanced_sizes(n, k)))
    return next(filter(None, (_largest_product(total, k, n) for total in rows)))


def coprime_sizes_for_rows(num_rows: int, k: int) -> tuple[int, ...]:
    """The ``k`` pairwise coprime sizes of largest product whose sum is at most ``num_rows``, largest first.

    Raises:
        ValueError: if ``num_rows`` is below ``k``.

    >>> coprime_sizes_for_rows(30, 3), coprime_sizes_for_rows(6, 2)
    ((11, 10, 9), (3, 2))
    """
    k = check_int("k", k)
    rows = check_int("num_rows", num_rows, k)
    best = _largest_product(rows, k, 1)  # never empty: (rows - k + 1, 1, ..., 1) is coprime
    while _even_product(rows := rows - 1, k) > math.prod(best):
        best = _largest_product(rows, k, math.prod(best) + 1) or best
    return best


def is_complementary(parts: Sequence[Partition | ExplicitPartition], n: int) -> bool:
    """Whether any two of the ``n`` categories differ in some partition (section 3, definition 1). Exact.

    Raises:
        ValueError: if ``n`` is below 1, or an ``ExplicitPartition`` does not map ``n`` ids.

    >>> is_complementary(quotient_remainder(10, 4), 10), is_complementary(hashing(10, 4), 10)
    (True, False)
    """
    n = check_int("n", n)
    for j, part in enumerate(parts):
        if isinstance(part, ExplicitPartition) and len(part.index) != n:
            raise ValueError(f"parts[{j}] maps {len(part.index)} ids; an ExplicitPartition must map n ({n})")
    if math.prod(part.size for part in parts) < n:
        return False
    ids = torch.arange(n, device="cpu")
    key, span = torch.zeros_like(ids), 1  # the buckets so far as one mixed-radix number in [0, span)
    for part in parts:
        bucket, size = part(ids), part.size
        if size > n:
            bucket, size = _ranks(bucket)
        if span * size > INT64_MAX:
            key, span = _ranks(key)
        key, span = key.mul_(size).add_(bucket), span * size
    if span <= 8 * n:  # marking the keys seen is faster than sorting, and takes no more memory
        return int(torch.zeros(span, dtype=torch.bool, device="cpu").scatter_(0, key, True).sum()) == n
    key = key.sort().values
    return not bool((key[1:] == key[:-1]).any())


def _ranks(values: Tensor) -> tuple[Tensor, int]:
    """The same grouping with the smallest numbers: rank among the distinct values, and how many there are."""
    distinct, rank = torch.unique(values, return_inverse=True)
    return rank, len(distinct)


def _largest_product(rows: int, k: int, floor: int) -> tuple[int, ...]:
    """The ``k`` pairwise coprime sizes of sum ``rows`` and largest product; empty if all are below ``floor``.

    Branch and bound, largest size first: the rest of the sum yields at most the product of its even split.
    """
    best: tuple[int, ...] = ()

    def extend(sizes: tuple[int, ...], product: int, rest: int, left: int) -> None:
        nonlocal best, floor
        if not left:
            best, floor = sizes, product + 1
            return
        largest = min(rest - left + 1, sizes[-1] if sizes else rest)
        for size in range(_ceil_div(rest, left), largest + 1):
            if product * size * _even_product(rest - size, left - 1) < floor:
                return  # larger sizes leave a less even split: their bound is lower still
            if math.gcd(size, product) == 1:
                extend((*sizes, size), product * size, rest - size, left - 1)

    extend((), 1, rows, k)
    return best


def _even_product(rows: int, k: int) -> int:
    """The largest product of ``k`` integers of sum ``rows``: their even split."""
    size, larger = divmod(rows, max(k, 1))
    return (size + 1) ** larger * size ** (k - larger) if k else 1


def _covering(n: int, sizes: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """``n`` and ``sizes``, checked to give at least ``n`` combinations of buckets."""
    n, sizes = check_int("n", n), tuple(check_int(f"sizes[{j}]", size) for j, size in enumerate(sizes))
    if not sizes or math.prod(sizes) < n:
        raise ValueError(f"the product of sizes {sizes} ({math.prod(sizes)}) must be >= n ({n})")
    return n, sizes


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _int64(name: str, values: Tensor) -> Tensor:
    """Widened before any arithmetic, so that int32 ids cannot overflow; floats and bools are refused."""
    if not isinstance(values, Tensor) or values.dtype not in _ID_DTYPES:
        got = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name} ({got}) must be an integer tensor")
    return values.to(torch.int64)
