"""Gradients summed by row, in scratch memory: where kernels write them, and from where rules take them.

The sums of rows of one part of a slot are in a *place*: their number, the rows in order of first appearance, a hash
table that finds them, and the sums in the same order. Slots that share rows (a pool, a table of several features) add
to one place; slots that are columns of the same rows of a table are summed as one wide slot. ``sharing`` says which
slots do, and where in the scratch memory places lie.
"""

from typing import NamedTuple

from .compiled import helper
from .vector import INT32, INT64, item, put

PLACE_COLUMNS = 8
BASE, NUM_ROWS, PITCH, UNITS, ENTRIES, START, TABLE, SUMS = range(PLACE_COLUMNS)  # see ``Place``
HEADER = 8  # bytes at the start of a place: its count


class Unit(NamedTuple):
    """Slots whose gradients are summed together, and their places; kernels take it as a plain tuple."""

    memory: int  # address of the scratch memory
    slots: int  # int64 [num_slots]
    num_slots: int
    place_of: int  # int64 [S, K]: the place of each part of a slot
    places: int  # int64 [P, PLACE_COLUMNS]
    first: int  # the unit's first place; the others follow
    num_places: int


class Place(NamedTuple):
    """A place, as kernels see it."""

    base: int  # its rows of ``stored`` lie between this one
    num_rows: int  # and as many after it
    pitch: int  # rows of ``stored`` to a row of the table
    units: int  # how many of them are summed together
    entries: int  # a power of two, at least twice as many as rows can come
    start: int  # address of the count
    distinct: int  # int64 [count]: the row of each index
    table: int  # int32 [entries]: one plus the index, by row if rows are no more than entries, or by hash
    sums: int  # [count, units * W]: gradients by index, float32 or float64
    count: int  # distinct rows so far


def place_bytes(capacity: int, width: int, float_bytes: int) -> tuple[int, int, int, int]:
    """Entries of a place for that many distinct rows, where its table and its sums start, and where it ends."""
    entries = max(64, 1 << (2 * capacity - 1).bit_length())
    table = HEADER + 8 * capacity
    sums = -(-(table + 4 * entries) // 64) * 64
    return entries, table, sums, -(-(sums + capacity * width * float_bytes) // 64) * 64


@helper
def place_at(unit, p):
    """Place ``p``."""
    place = unit.places + p * PLACE_COLUMNS * 8
    start = unit.memory + item(INT64, place, START)
    return Place(
        item(INT64, place, BASE),
        item(INT64, place, NUM_ROWS),
        item(INT64, place, PITCH),
        item(INT64, place, UNITS),
        item(INT64, place, ENTRIES),
        start,
        start + HEADER,
        unit.memory + item(INT64, place, TABLE),
        unit.memory + item(INT64, place, SUMS),
        item(INT64, start, 0),
    )


@helper
def place_of(unit, K, s, k):
    """The number of the place of part ``k`` of slot ``s``."""
    return item(INT64, unit.place_of, s * K + k)


@helper
def put_count(place, count):
    """Set the number of distinct rows."""
    put(INT64, place.start, 0, count)


@helper
def init_places(unit):
    """Make all places empty."""
    for p in range(unit.first, unit.first + unit.num_places):
        place = place_at(unit, p)
        put_count(place, 0)
        for position in range(min(place.num_rows, place.entries)):
            put(INT32, place.table, position, 0)
