"""Summed gradients of slots in scratch memory: where kernels write them, and from where others take them.

The sums of one slot lie in an *area*. It starts with a header of six integers for each of the slot's K parts:

    CAPACITY    N_k, the most distinct rows: the lesser of the ids and the part's rows
    COUNT       distinct rows so far
    ENTRIES     P_k, the size of the hash table: a power of two, at least 2 N_k
    DISTINCT    where ``distinct`` int64 [N_k] starts: the row of each index
    TABLE       where ``table`` int32 [P_k] starts: one plus the index, by row or by hash
    SUMS        where ``sums`` [N_k, W] start: gradients by index, float32 or float64

Then come the above of all parts.

Slots that share rows (a pool, a table of several features) add to one place: the part of the first slot that reads
them, its *owner*. Parts that are not their own owner have no rows. ``Sharing`` says who owns what.
"""

from typing import NamedTuple

from ..layout import FEATURE, PITCH, SIZE
from .compiled import helper
from .memory import INT32, INT64, item, put, size_of
from .source import part_item, partitions_of, slot_item
from .vector import accumulator

HEADER = 6
CAPACITY, COUNT, ENTRIES, DISTINCT, TABLE, SUMS = range(HEADER)


class Areas(NamedTuple):
    """Several areas; kernels take them as a plain tuple, for the reason that ``Source`` gives."""

    address: int  # of their memory
    count: int
    num_partitions: int  # K
    pitches: int  # int64 [S, K]: rows of ``stored`` that make up a row of each part; 0 for sums of plain rows
    first: int  # the position of their first slot in ``order``
    order: int  # int64 [S]: slots such that those of a unit come one after another
    offsets: int  # int64 [S]: where the area of each slot starts, in bytes after ``address``
    owners: int = 0  # int64 [S, K]: slot * K + part of the owner of each part


def area_bytes(capacities: list[int], width: int, float_bytes: int) -> int:
    """Size of an area for that many distinct rows of each part, in whole cache lines."""
    size = 8 * HEADER * len(capacities)
    for capacity in capacities:
        entries = 64
        while entries < 2 * capacity:
            entries *= 2
        size += 8 * capacity + 4 * entries + 64 + capacity * width * float_bytes
    return (size // 64 + 1) * 64


@helper
def slot_of(areas, a):
    """The slot of an area."""
    return item(INT64, areas.order, areas.first + a)


@helper
def area_of(areas, a):
    """The address of an area."""
    return areas.address + item(INT64, areas.offsets, slot_of(areas, a))


@helper
def pitch_of(areas, a, k):
    """How many areas, from ``a`` on, hold the sums of the same rows of tables, W columns each."""
    return item(INT64, areas.pitches, slot_of(areas, a) * areas.num_partitions + k) if areas.pitches else 1


@helper
def header(area, K, field, k):
    """A field of the header of part ``k``."""
    return item(INT64, area, field * K + k)


@helper
def init_part(kind, W, area, K, k, num_rows, start):
    """Fill the header of part ``k`` for its capacity, with memory from ``start`` on; returns where that ends."""
    capacity, entries = header(area, K, CAPACITY, k), 64
    while entries < 2 * capacity:
        entries *= 2
    table = start + capacity * 8
    sums = (table + entries * 4 + 63) // 64 * 64
    put(INT64, area, COUNT * K + k, 0)
    put(INT64, area, ENTRIES * K + k, entries)
    put(INT64, area, DISTINCT * K + k, start)
    put(INT64, area, TABLE * K + k, table)
    put(INT64, area, SUMS * K + k, sums)
    for position in range(min(num_rows, entries) if capacity else 0):
        put(INT32, table, position, 0)
    return sums + (capacity * W * size_of(accumulator(kind)) + 7) // 8 * 8


@helper
def num_rows_of(source, s, k):
    """Rows of ``stored`` from a partition's first to its last."""
    return part_item(source, s, k, SIZE) * part_item(source, s, k, PITCH)


@helper
def slot_ids(source, s):
    """The first and the last (excluded) id of a slot's feature, counted within the feature for a lookup."""
    f, B = slot_item(source, s, FEATURE), source.batch_size
    begin = item(INT64, source.offsets, f * B) if source.offsets else 0
    end = item(INT64, source.offsets, (f + 1) * B) if source.offsets else B
    return begin, end


@helper
def owner_area(areas, a, k):
    """The area, and the part of it, that has the sums of part ``k`` of area ``a``."""
    owner = item(INT64, areas.owners, slot_of(areas, a) * areas.num_partitions + k)
    slot = owner // areas.num_partitions
    return areas.address + item(INT64, areas.offsets, slot), owner - slot * areas.num_partitions


@helper
def init_areas(kind, W, source, areas, num_shares):
    """Fill the headers of all areas: a part has room for the ids of all slots that add to it."""
    K = source.num_partitions
    for a in range(areas.count):
        for k in range(K):
            put(INT64, area_of(areas, a), CAPACITY * K + k, 0)
    for a in range(areas.count):
        s = slot_of(areas, a)
        begin, end = slot_ids(source, s)
        for k in range(partitions_of(source, s)):
            area, part = owner_area(areas, a, k)
            put(INT64, area, CAPACITY * K + part, header(area, K, CAPACITY, part) + end - begin)
    for a in range(areas.count):
        area, s = area_of(areas, a), slot_of(areas, a)
        start = area + HEADER * K * 8
        for k in range(K):
            num_rows = num_rows_of(source, s, k)
            put(INT64, area, CAPACITY * K + k, min(header(area, K, CAPACITY, k), num_rows // num_shares + 1))
            start = init_part(kind, W, area, K, k, num_rows, start)
