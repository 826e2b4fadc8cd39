"""Which rows of ``stored`` an id reads, and which ids are valid: the index arithmetic that the GPU kernels share.

A program of most kernels handles one slot, so the integers of the layout are scalars and branches on them are uniform.
``lookup_kernel`` handles many slots at a time, and has a vector of each integer. Tables of fewer than 2^31 ids without
a permutation, nearly all, take 32-bit divisions; the others take 64-bit ones.
"""

import torch
import triton
import triton.language as tl

from .. import layout

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.float32, torch.float16: tl.float32}

# A kernel can read a global constant only as Triton's own type.
SLOT_COLUMNS, PART_COLUMNS = tl.constexpr(layout.SLOT_COLUMNS), tl.constexpr(layout.PART_COLUMNS)
FEATURE, OPERATION, LIMIT = map(tl.constexpr, (layout.FEATURE, layout.OPERATION, layout.LIMIT))
MULTIPLIER, SHIFT, PADDING = map(tl.constexpr, (layout.MULTIPLIER, layout.SHIFT, layout.PADDING))
STRIDE, SIZE, BASE = map(tl.constexpr, (layout.STRIDE, layout.SIZE, layout.BASE))
PITCH, MAP, PRODUCT = map(tl.constexpr, (layout.PITCH, layout.MAP, layout.MULT))


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
def unsigned(x):
    """Unsigned integers of the same size, whose divisions are shorter."""
    return x.to(tl.uint32) if x.dtype == tl.int32 else x.to(tl.uint64)


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
def row_of(ids, slot, part, maps):
    """Rows of ``stored`` (int64) that valid ``ids`` read through one partition, and whether the slot has it."""
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
    """The n-th ids that a slot reads, -1 past the last, and their places: in the batch, or among all jagged ids."""
    feature = tl.load(slot + FEATURE)
    if JAGGED:
        place = tl.load(offsets + feature * B) + n
        i = tl.load(ids + place, mask=place < tl.load(offsets + (feature + 1) * B), other=-1)
    else:
        place = n
        i = tl.load(ids + n * id_stride + feature, mask=n < B, other=-1)
    return i, place
