"""The rank of an id by frequency, where tables have lists of hot and cold ids: found in ``ops.words``."""

import triton
import triton.language as tl

from ..words import DIGIT

DIGIT_BITS = tl.constexpr(DIGIT)


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
    listed = valid & (hot_words >= 0)
    below_hot, is_hot = below(ids, listed, maps, hot_words, LEVELS)
    cold = own + ids - below_hot
    if RESTED:
        has_rest = rest < limit
        hot = own - has_rest.to(ids.dtype)
        below_cold, is_cold = below(ids, listed & has_rest, maps, cold_words, LEVELS)
        cold = tl.where(has_rest, tl.where(is_cold, hot + below_cold, rest), cold)
    return tl.where(listed, tl.where(is_hot, below_hot, cold), ids)
