"""The rank of an id by frequency, where tables have lists of hot and cold ids: found inside the kernels.

The kernels do not search the lists but *words* made from them, int64 after the index maps of a layout. A word of the
lowest level stands for 32 ids: its low half has a bit for each id that is in the list, its high half the number of
entries before. So one word says whether an id is in the list and how many entries are below it. Where few ids are in
a list, there are more levels: a word of a higher level has a bit for each of 32 words of the level below that is not
empty, and only those are stored; its high half is where the first of them is.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import layout as column
from ..layout import NO_RANKS, Layout

MOST_LEVELS = 8
DIGIT = 5  # bits of an id that one level takes
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

    If the words of an id are not stored, the position is that of the next one, before which all entries below it are.
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


class RankList(NamedTuple):
    """A list of ids, rising: where it is in ``ranks``, and the number of ids of its table."""

    start: int
    length: int
    limit: int


def with_words(layout: Layout, slots: Tensor) -> tuple[Tensor, Tensor, int]:
    """Slots and maps for the kernels, and the number of levels: 0 if no table has lists.

    HOT and COLD of these slots, on the CPU, are where the words of the lists begin in the maps. There are as few levels
    as let the words take no more memory than the lists; or as many as need the least memory. ``slots`` are those of
    ``layout`` on the CPU. This waits for the GPU.
    """
    places: dict[RankList, list[tuple[int, int]]] = {}  # slots and columns that name a list
    for s, slot in enumerate(slots.tolist()):
        limit, rest = slot[column.LIMIT], slot[column.REST]
        if slot[column.HOT] != NO_RANKS:
            hot = slot[column.OWN] - (rest < limit)
            places.setdefault(RankList(slot[column.HOT], hot, limit), []).append((s, column.HOT))
            if rest < limit:
                places.setdefault(RankList(slot[column.COLD], rest - hot, limit), []).append((s, column.COLD))
    if not places:
        return slots, layout.maps, 0
    lists = {each: layout.ranks[each.start : each.start + each.length].long() for each in places}
    sizes = [
        sum(num_words(entries, each.limit, levels) for each, entries in lists.items())
        for levels in range(1, MOST_LEVELS + 1)
    ]
    small = (levels for levels, size in enumerate(sizes, 1) if 8 * size <= layout.ranks.nbytes)
    levels = next(small, sizes.index(min(sizes)) + 1)
    slots, maps, start = slots.clone(), [layout.maps], len(layout.maps)
    for each, entries in lists.items():
        slots[tuple(zip(*places[each], strict=True))] = start
        maps.append(words(entries, each.limit, levels, start))
        start += len(maps[-1])
    return slots, torch.cat(maps), levels


def num_words(entries: Tensor, limit: int, levels: int) -> int:
    """How many words a list has."""
    lower = sum(len((entries >> DIGIT * level).unique_consecutive()) + 1 for level in range(1, levels))
    return lower + (limit - 1 >> DIGIT * levels) + 2


def words(entries: Tensor, limit: int, levels: int, start: int) -> Tensor:
    """The words, highest level first, of a rising list of ids below ``limit``; the first word is number ``start``.

    Each level ends with a word without bits, for ids that are above all entries.

    >>> [(int(word) >> 32, int(word) & 0xFFFFFFFF) for word in words(torch.tensor([1, 4, 64]), 70, 1, 0)]
    [(0, 18), (2, 0), (2, 1), (3, 0)]
    """
    keys, parts = entries, []
    for level in range(1, levels + 1):
        parents = keys >> DIGIT
        if level < levels:
            numbers = parents.unique_consecutive()
        else:
            numbers = torch.arange((limit - 1 >> DIGIT * levels) + 1, device=keys.device)
        bits = torch.zeros_like(numbers).index_add(0, torch.searchsorted(numbers, parents), 1 << (keys & 31))
        counts = torch.searchsorted(parents, torch.cat([numbers, numbers.new_tensor([limit])]))
        parts.append((counts << 32) + torch.cat([bits, bits.new_zeros(1)]))
        keys = numbers
    parts.reverse()
    for above in parts[:-1]:
        start += len(above)
        above += start << 32
    return torch.cat(parts)
