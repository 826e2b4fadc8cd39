"""Which rows of ``stored`` an id reads, and which ids are valid: the index arithmetic that the GPU kernels share.

A program of most kernels handles one slot, so the integers of the layout are scalars and branches on them are uniform.
``lookup_kernel`` handles many slots at a time, and has a vector of each integer. Tables of fewer than 2^31 ids without
a permutation, which are nearly all, use 32-bit divisions; the others use 64-bit ones.

With the constant OWNED, some ids have rows of their own, or are mixed over a pool: ``number_of`` says which, and gives
the number that the partitions divide. LEVELS is that of ``ranks``, 0 if no table has lists of hot and cold ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...paper.renumbering import MIXING_FACTORS
from .. import layout
from .ranks import rank_of

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.float32, torch.float16: tl.float32}

# A kernel can read a global constant only if it is a ``tl.constexpr``.
SLOT_COLUMNS, PART_COLUMNS = tl.constexpr(layout.SLOT_COLUMNS), tl.constexpr(layout.PART_COLUMNS)
FEATURE, OPERATION, LIMIT = map(tl.constexpr, (layout.FEATURE, layout.OPERATION, layout.LIMIT))
MULTIPLIER, SHIFT, PADDING = map(tl.constexpr, (layout.MULTIPLIER, layout.SHIFT, layout.PADDING))
STRIDE, SIZE, BASE = map(tl.constexpr, (layout.STRIDE, layout.SIZE, layout.BASE))
PITCH, MAP, PRODUCT = map(tl.constexpr, (layout.PITCH, layout.MAP, layout.MULT))
OWN, REST, COMPOSED = map(tl.constexpr, (layout.OWN, layout.REST, layout.COMPOSED))
OFFSET, BITS, HOT, COLD = map(tl.constexpr, (layout.OFFSET, layout.BITS, layout.HOT, layout.COLD))
FACTOR0, FACTOR1, FACTOR2 = map(tl.constexpr, MIXING_FACTORS)


@triton.jit
def slot_at(slots, s):
    """Where the integers of slot ``s`` begin."""
    return slots + s * SLOT_COLUMNS


@triton.jit
def part_at(parts, pair):
    """Where the integers of a pair ``s * K + k`` of slot and partition begin."""
    return parts + pair * PART_COLUMNS


@triton.jit
def mask_if(condition, mask):
    """``mask`` if the scalar ``condition`` holds, else an empty one. (``condition & mask`` fails in the interpreter of
    Triton 3.9.)"""
    return tl.where(condition, mask, False)


@triton.jit
def is_valid(ids, slot):
    """Which ids are inside the table of ``slot`` and not its padding."""
    return (ids >= 0) & (ids < tl.load(slot + LIMIT)) & (ids != tl.load(slot + PADDING))


@triton.jit
def permuted(ids, multiplier, shift, limit):
    """The number (int64) that a table's permutation gives an id."""
    return (ids.to(tl.int64) * multiplier + shift) % limit


@triton.jit
def bucket_of(i, stride, size, limit, UNIFORM: tl.constexpr):
    """p(i) = (i // stride) % size of unsigned numbers below ``limit``.

    With UNIFORM, stride, size and limit are scalars, and a division that would change nothing is skipped.
    """
    if UNIFORM:
        if stride > 1:
            i = i // stride
        if (limit - 1) // stride >= size:
            i = i % size
    else:
        i = i // stride % size
    return i


@triton.jit
def mixed(x, bits):
    """``renumbering.mixed_numbers`` of numbers below 2**bits, int32 where bits are below 32."""
    one = tl.full((), 1, x.dtype)
    shift, mask = bits // 2 + 1, (one << bits) - 1
    for n in tl.static_range(3):
        factor = tl.full((), FACTOR0 if n == 0 else (FACTOR1 if n == 1 else FACTOR2), tl.int64).to(x.dtype)
        x = ((x ^ (x >> shift)) * factor) & mask
    return x ^ (x >> shift)


@triton.jit
def place_of(ranks, own, rest, limit):
    """The place of valid ids in their table: the hot ids first, then the rest in one place, then the composed ids."""
    has_rest = (rest < limit).to(ranks.dtype)
    place = tl.where(ranks < own - has_rest, ranks, ranks + has_rest)
    return tl.where(ranks >= rest, own - has_rest, place)


@triton.jit
def number_of(ids, slot, maps, OWNED: tl.constexpr, LEVELS: tl.constexpr):
    """What ``row_of`` takes: of valid ids, their rows among the table's own, or what the partitions divide; and
    which of them have rows of their own. Without OWNED, the ids themselves, twice."""
    if OWNED:
        own, rest, limit = tl.load(slot + OWN), tl.load(slot + REST), tl.load(slot + LIMIT)
        rank = ids.to(tl.int64)
        if LEVELS > 0:
            hot_words, cold_words = tl.load(slot + HOT), tl.load(slot + COLD)
            if rest < limit:
                rank = rank_of(rank, rank >= 0, maps, hot_words, cold_words, own, rest, limit, LEVELS, True)
            else:
                rank = rank_of(rank, rank >= 0, maps, hot_words, cold_words, own, rest, limit, LEVELS, False)
        place = place_of(rank, own, rest, limit)
        is_own = place < own
        number = tl.where(is_own, 0, place - own)
        multiplier, shift = tl.load(slot + MULTIPLIER), tl.load(slot + SHIFT)
        if (multiplier != 1) | (shift != 0):
            number = permuted(number, multiplier, shift, tl.load(slot + COMPOSED))
        bits = tl.load(slot + BITS)
        if bits > 0:
            number = mixed(number + tl.load(slot + OFFSET), bits)
        return tl.where(is_own, place, number), is_own
    else:
        return ids, ids


@triton.jit
def row_of(number, is_own, slot, part, k, maps, OWNED: tl.constexpr):
    """Rows of ``stored`` (int64) that valid ids read through the k-th partition, and whether they have it: each id by
    itself if OWNED, else the slot. ``number`` and ``is_own`` come from ``number_of``."""
    if OWNED:
        return owned_row_of(number, is_own, slot, part, k, maps)
    else:
        return plain_row_of(number, slot, part, maps)


@triton.jit
def owned_row_of(number, is_own, slot, part, k, maps):
    """``row_of`` where some ids have rows of their own: these are the first part of a slot."""
    base, start, bits = tl.load(part + BASE), tl.load(part + MAP), tl.load(slot + BITS)
    stride, size = tl.load(part + STRIDE), tl.load(part + SIZE)
    own_part = (k == 0) & (tl.load(slot + OWN) > 0)
    used = (is_own == own_part) & (number >= 0)
    used = used & (base >= 0)
    bound = tl.load(slot + COMPOSED)
    if bits > 0:
        bound = tl.full((), 1, tl.int64) << bits
    bucket = number
    if own_part == 0:
        dividend = tl.where(used, number, 0)
        if start >= 0:
            bucket = tl.load(maps + start + dividend, mask=used, other=0)
        else:
            if bound < 2147483648:
                small = bucket_of(
                    dividend.to(tl.uint32), stride.to(tl.uint32), size.to(tl.uint32), bound.to(tl.uint32), True
                )  # fmt: skip
                bucket = small.to(tl.int64)
            else:
                bucket = bucket_of(dividend, stride, size, bound, False)
    return base + bucket * tl.load(part + PITCH), used


@triton.jit
def if_used(used, mask, OWNED: tl.constexpr):
    """``mask`` ``[T]`` or ``[T, C]`` where ids have a partition, ``used`` as ``row_of`` gives it."""
    if OWNED:
        if len(mask.shape) == 2:
            return used[:, None] & mask
        else:
            return used & mask
    else:
        return mask_if(used, mask)


@triton.jit
def plain_row_of(ids, slot, part, maps):
    """``row_of`` where ids read rows by partitions alone."""
    limit, multiplier, shift = tl.load(slot + LIMIT), tl.load(slot + MULTIPLIER), tl.load(slot + SHIFT)
    stride, size, base, start = (
        tl.load(part + STRIDE), tl.load(part + SIZE), tl.load(part + BASE), tl.load(part + MAP)
    )  # fmt: skip
    plain = (multiplier == 1) & (shift == 0)
    if start >= 0:
        i = ids.to(tl.int64)
        if plain == 0:
            i = permuted(i, multiplier, shift, limit)
        bucket = tl.load(maps + start + i, mask=i < limit, other=0)
    else:
        if plain & (limit < 2147483648):
            small = bucket_of(
                ids.to(tl.uint32), stride.to(tl.uint32), size.to(tl.uint32), limit.to(tl.uint32), True
            )  # fmt: skip
            bucket = small.to(tl.int64)
        else:
            bucket = bucket_of(permuted(ids, multiplier, shift, limit), stride, size, limit, False)
    return base + bucket * tl.load(part + PITCH), base >= 0


@triton.jit
def read_ids(ids, offsets, n, slot, B, id_stride, JAGGED: tl.constexpr):
    """The n-th ids that a slot reads, -1 past the last, and which of them there are."""
    feature = tl.load(slot + FEATURE)
    if JAGGED:
        position = tl.load(offsets + feature * B) + n
        inside = position < tl.load(offsets + (feature + 1) * B)
    else:
        position = n * id_stride + feature
        inside = n < B
    return tl.load(ids + position, mask=inside, other=-1), inside


def row_dtype(stored: Tensor) -> torch.dtype:
    """The dtype in which the kernels list rows."""
    return torch.int32 if stored.shape[0] < 2**31 else torch.int64
