"""From an id to the row it reads: the index arithmetic that the GPU kernels share.

A program handles one slot, so the integers of the layout are scalars and their branches are uniform; ``lookup_kernel``,
whose programs have many, does the same with a vector of each. Tables of
fewer than 2^31 ids without a permutation, nearly all, take 32-bit divisions; the others take 64-bit ones.
"""

import torch
import triton
import triton.language as tl

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.float32, torch.float16: tl.float32}

# The columns of ``slots`` and ``parts``, which ``ops.layout`` explains. Functions, not constants: Triton compares every
# global constant that a kernel uses at each launch.


@triton.jit
def slot_at(slots, s):
    """Where the integers of slot ``s`` begin."""
    return slots + s * 6


@triton.jit
def part_at(parts, pair):
    """Where the integers of a pair ``s * K + k`` of slot and partition begin."""
    return parts + pair * 5


@triton.jit
def feature_of(slot):
    """``layout.FEATURE`` of a slot."""
    return tl.load(slot + 0)


@triton.jit
def operation_of(slot):
    """``layout.OPERATION`` of a slot."""
    return tl.load(slot + 1)


@triton.jit
def limit_of(slot):
    """``layout.LIMIT`` of a slot."""
    return tl.load(slot + 2)


@triton.jit
def multiplier_of(slot):
    """``layout.MULTIPLIER`` of a slot."""
    return tl.load(slot + 3)


@triton.jit
def shift_of(slot):
    """``layout.SHIFT`` of a slot."""
    return tl.load(slot + 4)


@triton.jit
def padding_of(slot):
    """``layout.PADDING`` of a slot."""
    return tl.load(slot + 5)


@triton.jit
def stride_of(part):
    """``layout.STRIDE`` of a part."""
    return tl.load(part + 0)


@triton.jit
def size_of(part):
    """``layout.SIZE`` of a part."""
    return tl.load(part + 1)


@triton.jit
def base_of(part):
    """``layout.BASE`` of a part."""
    return tl.load(part + 2)


@triton.jit
def pitch_of(part):
    """``layout.PITCH`` of a part."""
    return tl.load(part + 3)


@triton.jit
def map_of(part):
    """``layout.MAP`` of a part."""
    return tl.load(part + 4)


@triton.jit
def is_valid(ids, slot):
    """Which ids are inside the table of ``slot`` and not its padding."""
    return (ids >= 0) & (ids < limit_of(slot)) & (ids != padding_of(slot))


@triton.jit
def row_of(ids, slot, part, maps):
    """Rows of the weight (int64) that valid ``ids`` read through one partition, and whether the slot has it."""
    limit = limit_of(slot)
    multiplier = multiplier_of(slot)
    shift = shift_of(slot)
    stride = stride_of(part)
    size = size_of(part)
    base = base_of(part)
    start = map_of(part)
    if start >= 0:
        i = ids.to(tl.int64)
        if (multiplier != 1) | (shift != 0):
            i = (i * multiplier + shift) % limit
        bucket = tl.load(maps + start + i, mask=i < limit, other=0)
    else:
        if (limit < 2147483648) & (multiplier == 1) & (shift == 0):
            small = ids.to(tl.uint32)
            if stride > 1:
                small = small // stride.to(tl.uint32)
            if (limit - 1) // stride >= size:
                small = small % size.to(tl.uint32)
            bucket = small.to(tl.int64)
        else:
            bucket = ((ids.to(tl.int64) * multiplier + shift) % limit) // stride
            bucket = bucket % size
    return base + bucket * pitch_of(part), base >= 0


@triton.jit
def read_ids(ids, offsets, n, slot, B, id_stride, JAGGED: tl.constexpr):
    """The n-th ids that a slot reads, -1 past the last, and their places: in the batch, or among all jagged ids."""
    feature = feature_of(slot)
    if JAGGED:
        place = tl.load(offsets + feature * B) + n
        i = tl.load(ids + place, mask=place < tl.load(offsets + (feature + 1) * B), other=-1)
    else:
        place = n
        i = tl.load(ids + n * id_stride + feature, mask=n < B, other=-1)
    return i, place
