"""Which rows of ``stored`` an id reads, and which ids are valid: the index arithmetic that the GPU kernels share.

A program of most kernels handles one slot, so the integers of the layout are scalars and branches on them are uniform.
``lookup_kernel`` handles many slots at a time, and has a vector of each integer. Tables of fewer than 2^31 ids, which
are nearly all, use 32-bit divisions; the others use 64-bit ones.

With ``RowFlags.owned``, some ids have rows of their own, or are mixed over a pool: ``number_of`` says which, and gives
the number that the partitions divide. ``levels`` are those of ``ranks``, 0 if no table has lists of hot and cold ids.

Arguments that belong together are one tuple, and constants one frozen dataclass. A None in a tuple is a constant too.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...paper.renumbering import MIXING_FACTORS
from .. import layout
from ..rows import IdBatch
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


class DeviceBatch(NamedTuple):
    """The ids of an op, as kernels take them."""

    ids: Tensor
    offsets: Tensor | None
    sample_weights: Tensor | None
    size: int  # B: ids or bags of a feature
    stride: int  # distance between two ids of one feature

    @staticmethod
    def of(batch: IdBatch, size: int) -> "DeviceBatch":
        """A contiguous batch of ``size`` ids or bags of each feature."""
        return DeviceBatch(*batch[:3], size, batch.stride)


class DeviceLayout(NamedTuple):
    """A layout on the GPU, int64, as most kernels take it."""

    slots: Tensor
    parts: Tensor
    maps: Tensor  # with the words of ``ranks``


@dataclass(frozen=True)
class RowFlags:
    """Constants of ``number_of`` and ``row_of``."""

    owned: bool
    levels: int


@triton.jit
def slot_at(slots, s):
    """Where the integers of slot ``s`` begin."""
    return slots + s * SLOT_COLUMNS


@triton.jit
def part_at(parts, pair):
    """Where the integers of a pair ``s * K + k`` of slot and partition begin."""
    return parts + pair * PART_COLUMNS


@triton.jit
def is_valid(ids, slot):
    """Which ids are inside the table of ``slot`` and not its padding."""
    return (ids >= 0) & (ids < tl.load(slot + LIMIT)) & (ids != tl.load(slot + PADDING))


@triton.jit
def permuted(ids, multiplier, shift, limit):
    """The number (int64) that a table's permutation gives an id."""
    return (ids.to(tl.int64) * multiplier + shift) % limit


@triton.jit
def bucket_of(i, stride, size, limit):
    """p(i) = (i // stride) % size of unsigned numbers below ``limit``; a division that changes nothing is skipped."""
    if stride > 1:
        i = i // stride
    if (limit - 1) // stride >= size:
        i = i % size
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
def number_of(ids, slot, maps, FLAGS: tl.constexpr):
    """What ``row_of`` takes: of valid ids, their rows among the table's own, or what the partitions divide (int64); and
    which of them have rows of their own."""
    LEVELS: tl.constexpr = FLAGS.levels
    number = ids.to(tl.int64)
    place, is_own = number, number < 0
    if FLAGS.owned:
        own, rest, limit = tl.load(slot + OWN), tl.load(slot + REST), tl.load(slot + LIMIT)
        if LEVELS > 0:
            hot_words, cold_words = tl.load(slot + HOT), tl.load(slot + COLD)
            if rest < limit:
                number = rank_of(number, number >= 0, maps, hot_words, cold_words, own, rest, limit, LEVELS, True)
            else:
                number = rank_of(number, number >= 0, maps, hot_words, cold_words, own, rest, limit, LEVELS, False)
        place = place_of(number, own, rest, limit)
        is_own = place < own
        number = tl.where(is_own, 0, place - own)
    multiplier, shift = tl.load(slot + MULTIPLIER), tl.load(slot + SHIFT)
    if (multiplier != 1) | (shift != 0):
        number = permuted(number, multiplier, shift, tl.load(slot + COMPOSED))
    if FLAGS.owned:
        bits = tl.load(slot + BITS)
        if bits > 0:
            number = mixed(number + tl.load(slot + OFFSET), bits)
    return tl.where(is_own, place, number), is_own


@triton.jit
def row_of(number, is_own, slot, part, k, maps, FLAGS: tl.constexpr):
    """Rows of ``stored`` (int64) that valid ids read through the k-th partition of a slot, and whether they have it.

    ``number`` and ``is_own`` come from ``number_of``. Rows of ids' own are the first part of a slot that has some.
    """
    base, start, bound = tl.load(part + BASE), tl.load(part + MAP), tl.load(slot + COMPOSED).to(tl.int64)
    stride, size = tl.load(part + STRIDE), tl.load(part + SIZE)
    own_part = tl.full((), 0, tl.int1)
    if FLAGS.owned:
        own_part = (k == 0) & (tl.load(slot + OWN) > 0)
        bits = tl.load(slot + BITS)
        if bits > 0:
            bound = tl.full((), 1, tl.int64) << bits
    used = (is_own == own_part) & (number >= 0) & (base >= 0)
    bucket = number
    if own_part == 0:
        dividend = tl.where(used, number, 0)
        if start >= 0:
            bucket = tl.load(maps + start + dividend, mask=used, other=0)
        else:
            if bound < 2147483648:
                small = bucket_of(dividend.to(tl.uint32), stride.to(tl.uint32), size.to(tl.uint32), bound.to(tl.uint32))
                bucket = small.to(tl.int64)
            else:
                bucket = bucket_of(dividend, stride, size, bound)
    return base + bucket * tl.load(part + PITCH), used


@triton.jit
def read_ids(batch, n, slot):
    """The n-th ids that a slot reads, -1 past the last, and which of them there are."""
    feature = tl.load(slot + FEATURE)
    if batch.offsets is not None:
        position = tl.load(batch.offsets + feature * batch.size) + n
        inside = position < tl.load(batch.offsets + (feature + 1) * batch.size)
    else:
        position = n * batch.stride + feature
        inside = n < batch.size
    return tl.load(batch.ids + position, mask=inside, other=-1), inside


@triton.jit
def bags_at(batch, feature, n):
    """Where the ids of a feature's n-th bags begin, and how many they are; none past the last bag."""
    bag = feature * batch.size + n
    start = tl.load(batch.offsets + bag, mask=n < batch.size, other=0)
    return start, tl.load(batch.offsets + bag + 1, mask=n < batch.size, other=0) - start


def row_dtype(stored: Tensor) -> torch.dtype:
    """The dtype in which the kernels list rows."""
    return torch.int32 if stored.shape[0] < 2**31 else torch.int64
