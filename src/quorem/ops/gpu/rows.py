"""Which rows of ``stored`` an id reads, and which ids are valid: the index arithmetic that the GPU kernels share.

A kernel finds the integers of a slot in ``HostLayout.table`` ``[columns, S]``: ``slot`` is the address of one slot's
first integer, or of T slots', and column c is at ``slot + S * c``. ``place_at`` turns ids into what the partitions
divide; ``row_read`` and ``row_of_part`` find rows. Tables of fewer than 2^31 ids, which are nearly all, are divided by
multiplications of 32 bits; the others by 64-bit divisions.

Arguments that belong together are one tuple, and constants one frozen dataclass. A None in a tuple is a constant too.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...paper.renumbering import MIXING_FACTORS
from .. import layout
from ..rows import IdBatch
from ..words import DIGIT

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.float32, torch.float16: tl.float32}

# A kernel can read a global constant only if it is a ``tl.constexpr``.
SLOT_COLUMNS, PART_COLUMNS = tl.constexpr(layout.SLOT_COLUMNS), tl.constexpr(layout.PART_COLUMNS)
FEATURE, OPERATION, LIMIT = map(tl.constexpr, (layout.FEATURE, layout.OPERATION, layout.LIMIT))
PADDING, PRODUCT = tl.constexpr(layout.PADDING), tl.constexpr(layout.MULT)
STRIDE, SIZE, BASE = map(tl.constexpr, (layout.STRIDE, layout.SIZE, layout.BASE))
PITCH, MAP = map(tl.constexpr, (layout.PITCH, layout.MAP))
OWN, REST = tl.constexpr(layout.OWN), tl.constexpr(layout.REST)
OFFSET, BITS, HOT, COLD = map(tl.constexpr, (layout.OFFSET, layout.BITS, layout.HOT, layout.COLD))
# Columns of a part in ``HostLayout.table`` after those of the layout: by what numbers are divided by stride and size.
BY_STRIDE, BY_SIZE, SHIFTS = map(tl.constexpr, range(layout.PART_COLUMNS, layout.PART_COLUMNS + 3))
TABLE_PART_COLUMNS = tl.constexpr(layout.PART_COLUMNS + 3)
FACTOR0, FACTOR1, FACTOR2 = map(tl.constexpr, MIXING_FACTORS)
DIGIT_BITS = tl.constexpr(DIGIT)  # of ``words``, in which the rank of an id is found


class DeviceBatch(NamedTuple):
    """The ids of an op, as kernels take them."""

    ids: Tensor
    offsets: Tensor | None
    sample_weights: Tensor | None
    size: int  # B: ids or bags of a feature
    stride: int  # distance between two ids of one feature

    @staticmethod
    def of(batch: IdBatch, num_features: int) -> "DeviceBatch":
        """The batch with contiguous tensors."""
        ids, offsets, weights = batch.ids.contiguous(), batch.offsets, batch.sample_weights
        if offsets is None:
            return DeviceBatch(ids, None, weights, *ids.shape)
        weights = None if weights is None else weights.contiguous()
        return DeviceBatch(ids, offsets.contiguous(), weights, (offsets.shape[0] - 1) // num_features, 1)


@triton.jit
def part_at(parts, pair):
    """Where the integers of a pair ``s * K + k`` of slot and partition begin."""
    return parts + pair * PART_COLUMNS


@triton.jit
def is_valid(ids, slot, S: tl.constexpr):
    """Which ids are inside the table of ``slot`` and not its padding."""
    return (ids >= 0) & (ids < tl.load(slot + S * LIMIT)) & (ids != tl.load(slot + S * PADDING))


@triton.jit
def mixed(x, bits):
    """``renumbering.mixing_rounds`` of numbers below 2**bits, int32 where bits are below 32."""
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
def num_bits(x):
    """How many bits of each uint32 are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24  # compilers know this form, and use one instruction


@triton.jit
def below(ids, listed, maps, start, LEVELS: tl.constexpr):
    """How many entries of a list are below each id, and whether the id is in it; the words are at ``start``.

    If the word of an id is not stored, the next stored word is taken: all entries below the id lie before it.
    """
    position = start.to(tl.int64) + (ids >> (DIGIT_BITS * LEVELS))
    inside = listed
    for level in tl.static_range(LEVELS):
        word = tl.load(maps + position, mask=listed, other=0)
        digit = ((ids >> (DIGIT_BITS * (LEVELS - 1 - level))) & 31).to(tl.uint32)
        bits = word.to(tl.uint32)
        lower = tl.where(inside, (tl.full((), 1, tl.uint32) << digit) - 1, 0).to(tl.uint32)
        position = (word >> 32) + num_bits(bits & lower).to(tl.int64)
        inside = inside & (((bits >> digit) & 1) == 1)
    return position.to(ids.dtype), inside


@triton.jit
def rank_of(ids, valid, maps, hot_words, cold_words, own, rest, limit, LEVELS: tl.constexpr, RESTED: tl.constexpr):
    """The ranks of valid ids: hot ids in the order of their list, then cold ones, then the rest, which have one rank.

    Ids of tables without lists are ranks already. ``hot_words`` to ``limit`` come from the slot: scalars or ``[T]``.
    Without RESTED, no table has a rest.
    """
    listed = valid & (hot_words >= tl.zeros_like(ids))  # masks of vectors, as Triton 3.9's interpreter needs
    below_hot, is_hot = below(ids, listed, maps, hot_words, LEVELS)
    cold = own + ids - below_hot
    if RESTED:
        has_rest = tl.zeros_like(ids) + rest < limit
        hot = own - has_rest.to(ids.dtype)
        below_cold, is_cold = below(ids, listed & has_rest, maps, cold_words, LEVELS)
        cold = tl.where(has_rest, tl.where(is_cold, hot + below_cold, rest), cold)
    return tl.where(listed, tl.where(is_hot, below_hot, cold), ids)


@triton.jit
def bucket_at(i, part, S: tl.constexpr):
    """p(i) = (i // stride) % size of the numbers ``i``."""
    size = tl.load(part + S * SIZE)
    if i.dtype == tl.int32:
        shifts = tl.load(part + S * SHIFTS)
        quotient = divided(i, tl.load(part + S * BY_STRIDE), shifts & 31)
        return quotient - divided(quotient, tl.load(part + S * BY_SIZE), shifts >> 5) * size
    else:
        stride = tl.load(part + S * STRIDE)
        return (i.to(tl.uint64) // stride.to(tl.uint64) % size.to(tl.uint64)).to(tl.int64)  # shorter than signed ones


@triton.jit
def divided(i, multiplier, shift):
    """int32 numbers over a divisor, whose multiplier and shift ``host.reciprocals`` gives."""
    doubled = i.to(tl.uint32) << 1
    return (tl.umulhi(doubled, multiplier.to(tl.uint32)) >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit
def place_at(ids, valid, slot, maps, S: tl.constexpr, FLAGS: tl.constexpr):
    """What the partitions of a slot divide, for valid ids, and the rows that ids have of their own, -1 for none."""
    i = tl.where(valid, ids, 0).to(slot.dtype.element_ty)
    own_row = i * 0 - 1
    if FLAGS.owned:
        own, rest, limit = tl.load(slot + S * OWN), tl.load(slot + S * REST), tl.load(slot + S * LIMIT)
        if FLAGS.levels > 0:
            hot_words, cold_words = tl.load(slot + S * HOT), tl.load(slot + S * COLD)
            i = rank_of(i, valid, maps, hot_words, cold_words, own, rest, limit, FLAGS.levels, FLAGS.rested)
        place = i
        if FLAGS.rested:
            place = place_of(i, own, rest, limit)
        own_row = place
        if FLAGS.pitched:
            own_row = place * tl.load(slot + S * (SLOT_COLUMNS + 2))
        own_row = tl.where(place < own, own_row + tl.load(slot + S * (SLOT_COLUMNS + 1)), -1)
        i = tl.where(place < own, 0, place - own)
    if FLAGS.mixed:
        bits = tl.load(slot + S * BITS)
        i = tl.where(bits > 0, mixed(i + tl.load(slot + S * OFFSET), bits), i)
    return i, own_row


@triton.jit
def composed_row(i, valid, slot, maps, k, S: tl.constexpr, FLAGS: tl.constexpr):
    """The rows of the numbers ``i`` by the k-th partition, -1 where there is none."""
    part = slot + S * (SLOT_COLUMNS + 3 + TABLE_PART_COLUMNS * k)
    base, bucket = tl.load(part + S * BASE), bucket_at(i, part, S)
    if FLAGS.mapped:
        start = tl.load(part + S * MAP).to(tl.int64)
        entry = tl.load(maps + start + i, mask=valid & (start >= tl.zeros_like(i)), other=0)
        bucket = tl.where(start >= 0, entry.to(slot.dtype.element_ty), bucket)
    if FLAGS.pitched:
        bucket = bucket * tl.load(part + S * PITCH)
    return tl.where(base >= 0, base + bucket, -1)


@triton.jit
def row_read(i, own_row, valid, slot, maps, k, S: tl.constexpr, FLAGS: tl.constexpr):
    """The k-th rows that ids read, -1 for none; a row of an id's own takes the place of the first."""
    row = composed_row(i, valid, slot, maps, k, S, FLAGS)
    if FLAGS.owned:
        row = tl.where(own_row < 0, row, tl.where(k == 0, own_row, -1))
    return tl.where(valid, row, -1)


@triton.jit
def row_of_part(i, own_row, valid, slot, maps, k, S: tl.constexpr, FLAGS: tl.constexpr):
    """The rows (int64) that ids read by the k-th part of the layout, -1 for none.

    Rows of ids' own are the first part of a slot that has some.
    """
    if FLAGS.owned:
        has_own = (tl.load(slot + S * OWN) > 0).to(tl.int32)
        row = composed_row(i, valid, slot, maps, tl.maximum(k - has_own, 0), S, FLAGS)
        row = tl.where(k < has_own, own_row, tl.where(own_row < 0, row, -1))
    else:
        row = composed_row(i, valid, slot, maps, k, S, FLAGS)
    return tl.where(valid, row, -1).to(tl.int64)


@triton.jit
def elements_of(rows, some, columns, W):
    """Where ``columns`` of ``rows`` of W numbers lie, ``[T, C]``; and which exist, of the rows in ``some``."""
    return rows[:, None] * W + columns[None, :], some[:, None] & (columns < W)[None, :]


@triton.jit
def read_ids(batch, n, feature):
    """The n-th ids of a feature, -1 past the last, and a mask of those that exist."""
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


@triton.jit
def nth_ids(batch, start, length, nth):
    """The nth id of each bag, -1 past its last."""
    return tl.load(batch.ids + start + nth, mask=nth < length, other=-1)


@triton.jit
def divisor_of(batch, start, length, slot, S: tl.constexpr, T: tl.constexpr, ACC: tl.constexpr):
    """How many ids of each bag are valid, at least one: what a mean divides by."""
    count = tl.zeros((T,), tl.int32)
    for nth in range(0, tl.max(length)):
        count += is_valid(nth_ids(batch, start, length, nth), slot, S).to(tl.int32)
    return tl.maximum(count, 1).to(ACC)


def row_dtype(stored: Tensor) -> torch.dtype:
    """The dtype in which the kernels list rows."""
    return torch.int32 if stored.shape[0] < 2**31 else torch.int64
