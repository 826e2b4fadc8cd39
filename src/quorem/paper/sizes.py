"""Sizes of tables: the smallest sum whose product reaches n, or the largest product for a given number of rows."""

import itertools
import math

from ..checks import check_int


def balanced_sizes(n: int, k: int) -> tuple[int, ...]:
    """The ``k`` sizes of smallest sum whose product reaches ``n``, largest first: O(k n^(1/k)) (section 4).

    Args:
        n: what the product must reach.
        k: number of sizes.

    >>> balanced_sizes(1000, 3), balanced_sizes(1001, 3)
    ((10, 10, 10), (11, 10, 10))
    """
    n, k = check_int("n", n), check_int("k", k)
    root = 0
    for bit in reversed(range(n.bit_length() // k + 1)):
        if (root | 1 << bit) ** k <= n:
            root |= 1 << bit
    # For a given sum, the product is largest when sizes differ by at most one (AM-GM): only root and root + 1 occur.
    larger = next(j for j in range(k + 1) if (root + 1) ** j * root ** (k - j) >= n)
    return (root + 1,) * larger + (root,) * (k - larger)


def coprime_sizes(n: int, k: int) -> tuple[int, ...]:
    """The ``k`` pairwise coprime sizes of smallest sum whose product reaches ``n``, largest first.

    Sizes of 1 are allowed, any number of them. Among equal sums, the product is the largest. The search is exact.

    Args:
        n: what the product must reach.
        k: number of sizes.

    >>> coprime_sizes(1000, 3), coprime_sizes(10**6, 2)
    ((13, 11, 7), (1001, 1000))
    """
    n, k = check_int("n", n), check_int("k", k)
    rows = itertools.count(sum(balanced_sizes(n, k)))
    return next(filter(None, (_largest_product(total, k, n) for total in rows)))


def coprime_sizes_for_rows(num_rows: int, k: int) -> tuple[int, ...]:
    """The ``k`` pairwise coprime sizes of largest product whose sum is at most ``num_rows``, largest first."""
    k = check_int("k", k)
    rows = check_int("num_rows", num_rows, k)
    best = _largest_product(rows, k, 1)  # never empty: (rows - k + 1, 1, ..., 1) is coprime
    while _even_product(rows := rows - 1, k) > math.prod(best):
        best = _largest_product(rows, k, math.prod(best) + 1) or best
    return best


def _largest_product(rows: int, k: int, floor: int) -> tuple[int, ...]:
    """The ``k`` pairwise coprime sizes of sum ``rows`` and largest product; empty if all are below ``floor``.

    Branch and bound, largest size first: the remaining sum contributes at most the product of its even split.
    """
    best: tuple[int, ...] = ()

    def extend(sizes: tuple[int, ...], product: int, rest: int, left: int) -> None:
        nonlocal best, floor
        if not left:
            best, floor = sizes, product + 1
            return
        largest = min(rest - left + 1, sizes[-1] if sizes else rest)
        for size in range(ceil_div(rest, left), largest + 1):
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


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)
