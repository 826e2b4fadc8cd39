"""Lists of hot and cold ids as *words*, in which the fused kernels find the rank of an id without a search.

A word of the lowest level stands for 32 ids: its low half has a bit for each id that is in the list, its high half the
number of entries before. So one word says whether an id is in the list and how many entries are below it. Where few
ids are in a list, there are more levels: a word of a higher level has a bit for each of 32 words of the level below
that is not empty, and only those are stored; its high half is where the first of them is. If the word of an id is not
stored, the search goes on in the next stored word: all entries below the id lie before it. The truth is the search in
``rows``.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import layout as column
from .layout import NO_RANKS, Layout

MOST_LEVELS = 8
DIGIT = 5  # bits of an id that one level takes


class RankList(NamedTuple):
    """A list of ids, rising: where it is in ``ranks``, and the number of ids of its table."""

    start: int
    length: int
    limit: int


class Words(NamedTuple):
    """The words of a layout's lists."""

    slots: Tensor  # on the CPU: those of the layout, but HOT and COLD are where the words of a list begin
    maps: Tensor  # the index maps of the layout, then the words
    levels: int  # 0 if there are no words


def with_words(layout: Layout, slots: Tensor) -> Words:
    """Maps for the kernels, with words if some table has lists; and ``slots``, those of the layout on the CPU.

    There are the fewest levels with which words take no more memory than lists, or else those that take the least.
    If the layout is on a GPU, this waits for it.
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
        return Words(slots, layout.maps, 0)
    lists = {each: layout.ranks[each.start : each.start + each.length].long() for each in places}
    for each, entries in lists.items():
        bounded = F.pad(F.pad(entries, (1, 0), value=-1), (0, 1), value=each.limit)
        if len(entries) != each.length or (bounded.diff() <= 0).any():
            raise ValueError(f"ranks must hold lists of rising ids in [0, {each.limit}): were they replaced?")
    sizes: dict[int, int] = {}  # bytes by number of levels
    for levels in range(1, MOST_LEVELS + 1):
        sizes[levels] = 8 * sum(num_words(entries, each.limit, levels) for each, entries in lists.items())
        if sizes[levels] <= layout.ranks.nbytes:
            break
    levels = min(sizes, key=lambda levels: sizes[levels])
    slots, maps, start = slots.clone(), [layout.maps], len(layout.maps)
    for each, entries in lists.items():
        slots[tuple(zip(*places[each], strict=True))] = start
        maps.append(words(entries, each.limit, levels, start))
        start += len(maps[-1])
    return Words(slots, torch.cat(maps), levels)


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
            numbers, position, counts = parents.unique_consecutive(return_inverse=True, return_counts=True)
        else:
            numbers = torch.arange((limit - 1 >> DIGIT * levels) + 1, device=keys.device)
            position, counts = parents, parents.bincount(minlength=len(numbers))
        bits = torch.zeros_like(numbers).index_add_(0, position, 1 << (keys & 31))
        parts.append((F.pad(counts.cumsum(0), (1, 0)) << 32) + F.pad(bits, (0, 1)))
        keys = numbers
    parts.reverse()
    for above in parts[:-1]:
        start += len(above)
        above += start << 32
    return torch.cat(parts)
