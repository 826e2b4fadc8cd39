"""Sums of the gradients of equal rows, without a table-sized gradient: two launches, then one more uses the sums.

1. *claim*: in tables with more rows than the batch has ids, the first id that reads a row claims it.
2. *gather*: each read's gradient is added to its row's place in a buffer of about ``sum(min(rows, ids))`` places.

Hot rows would serialize the additions, so a small table has several *copies* of its places, which programs take in
turn; whoever uses the sums adds up the copies.

A *pair* is a slot and one of its partitions, numbered ``s * K + k``. Ids are ``[B, F]``, or jagged with offsets.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import layout
from ..reference import accumulator
from .index import base_of, feature_of, is_valid, operation_of, part_at, pitch_of, row_of, slot_at
from .launch import cdiv, launch, power_of_2

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.float32, torch.float16: tl.float32}
UNCLAIMED = 2**31 - 1


@dataclass
class Places:
    """Where a batch's gradients are summed: a run of places in one buffer for each pair."""

    table: Tensor  # int64 [S * K, 4]: first place, number of places, copies, whether its rows are claimed
    claimers: Tensor  # int64: the pairs whose rows are claimed
    num_claimers: int
    total: int
    longest: int


_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parts -> (the layout on the host, Places by batch)
_claims: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weight -> int32 [R]: the id that claimed each row


def places_of(reads: int, jagged: bool, *integers: Tensor) -> Places:
    """The places for a batch of ``reads`` ids: of each feature, or of all together if jagged.

    Cached, so that only the first step of a layout and batch size waits for the GPU.
    """
    slots, parts, spans, cache = _on_host(*integers)
    found = cache.get((reads, jagged))
    if found is None:
        device = integers[1].device
        rows = torch.where(parts[..., layout.BASE] >= 0, parts[..., layout.SIZE], 0).flatten()
        claimed = rows > reads
        count = torch.where(claimed, reads, rows)
        copies = torch.where(claimed | (rows > 4096), 1, torch.where(rows > 256, 8, 32))
        copies = copies.clamp(max=max(1, reads // 256))
        length = count * copies
        first = length.cumsum(0) - length
        if jagged:  # an id is of one feature, so the claimed places of all features are the same ones
            alone = torch.where(claimed, 0, length)
            nth_slot = torch.arange(len(slots)) - spans[slots[:, layout.FEATURE], 0]
            nth = (nth_slot[:, None] * parts.shape[1] + torch.arange(parts.shape[1])).flatten()
            first = torch.where(claimed, alone.sum() + nth * reads, alone.cumsum(0) - alone)
        table = torch.stack([first, count, copies, claimed.long()], 1)
        found = cache[reads, jagged] = Places(
            table.to(device),
            claimed.nonzero().flatten().to(device),
            int(claimed.sum()),
            int((first + length).max()),
            int(count.max()),
        )
    return found


def one_row_each(*integers: Tensor) -> bool:
    """Whether every table's row is one row of the weight."""
    return bool((_on_host(*integers)[1][..., layout.PITCH] == 1).all())


def _on_host(*integers: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[tuple[int, bool], Places]]:
    slots, parts, _, spans = integers
    found = _layouts.get(parts)
    if found is None:
        found = _layouts[parts] = (slots.cpu(), parts.cpu(), spans.cpu(), {})
    return found


def claims_of(weight: Tensor) -> Tensor:
    """Scratch by which ids claim rows; every use leaves it as it found it."""
    found = _claims.get(weight)
    if found is None:
        found = _claims[weight] = torch.full((len(weight),), UNCLAIMED, dtype=torch.int32, device=weight.device)
    return found


@triton.jit
def run_of(places, pair):
    """A pair's row of ``Places.table``: first place, number of places, copies, whether its rows are claimed."""
    run = places + pair * 4
    return tl.load(run), tl.load(run + 1), tl.load(run + 2), tl.load(run + 3)


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


@triton.jit
def claim_kernel(
    ids, offsets, claims, claimers, slots, parts, maps, B, id_stride, num_claimers,
    K: tl.constexpr, T: tl.constexpr, JAGGED: tl.constexpr,
):  # fmt: skip
    """T ids of one pair: the smallest place that reads a row claims it."""
    pair = tl.load(claimers + tl.program_id(0) % num_claimers)
    n = (tl.program_id(0) // num_claimers).to(tl.int64) * T + tl.arange(0, T)
    slot = slot_at(slots, pair // K)
    i, place = read_ids(ids, offsets, n, slot, B, id_stride, JAGGED)
    valid = is_valid(i, slot)
    row, _ = row_of(tl.where(valid, i, 0), slot, part_at(parts, pair), maps)
    place = place.to(tl.int32)
    lower = valid & (tl.load(claims + row, mask=valid, other=-1) > place)  # most reads of a hot row stop here
    tl.atomic_min(claims + row, place, mask=lower, sem="relaxed")


@triton.jit
def gather_kernel(
    grad, ids, offsets, sample_weights, weight, sums, claims, places, step, slots, parts, maps, B, id_stride, S,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
    JAGGED: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr, COUNT_STEP: tl.constexpr,
):  # fmt: skip
    """T ids (bags, if jagged) of one pair: the gradient of each row read, added to the row's place."""
    pair = tl.program_id(0) % (S * K)
    chunk = tl.program_id(0) // (S * K)
    if COUNT_STEP and tl.program_id(0) == 0:
        tl.store(step, tl.load(step) + 1)
    s = pair // K
    k = pair % K
    slot = slot_at(slots, s)
    part = part_at(parts, s * K)
    if base_of(part_at(part, k)) >= 0:
        n = chunk.to(tl.int64) * T + tl.arange(0, T)
        first, count, copies, claimed = run_of(places, pair)
        first += (chunk % copies) * count
        few = (claimed == 0) & (count <= 8) & (C <= 32)  # wider rows were slower so
        if JAGGED:
            bag = feature_of(slot) * B + n
            start = tl.load(offsets + bag, mask=n < B, other=0)
            length = tl.load(offsets + bag + 1, mask=n < B, other=0) - start
            most = tl.max(length)
        else:
            most = 1
        scale = tl.full((T,), 1, ACC)
        if JAGGED and MEAN:
            pooled = tl.zeros((T,), tl.int32)
            for step_in_bag in range(0, most):
                i = tl.load(ids + start + step_in_bag, mask=step_in_bag < length, other=-1)
                pooled += is_valid(i, slot).to(tl.int32)
            scale = 1 / tl.maximum(pooled, 1).to(ACC)
        for step_in_bag in range(0, most):
            if JAGGED:
                i = tl.load(ids + start + step_in_bag, mask=step_in_bag < length, other=-1)
            else:
                i = tl.load(ids + n * id_stride + feature_of(slot), mask=n < B, other=-1)
            valid = is_valid(i, slot)
            i = tl.where(valid, i, 0)
            factor = scale
            if WEIGHTED:
                factor = scale * tl.load(sample_weights + start + step_in_bag, mask=valid, other=0).to(ACC)
            row, _ = row_of(i, slot, part_at(part, k), maps)
            if claimed != 0:
                place = tl.load(claims + row, mask=valid, other=0).to(tl.int64)
            else:
                place = (row - base_of(part_at(part, k))) // pitch_of(part_at(part, k))
            for c in range(0, W, C):
                columns = c + tl.arange(0, C)
                mask = valid[:, None] & (columns < W)[None, :]
                g = tl.load(grad + (n * S + s)[:, None] * W + columns[None, :], mask=mask, other=0).to(ACC)
                if JAGGED:
                    g *= factor[:, None]
                if operation_of(slot) == 1:
                    for j in tl.static_range(K):
                        if j != k:
                            other, used = row_of(i, slot, part_at(part, j), maps)
                            y = tl.load(weight + other[:, None] * W + columns[None, :], mask=mask & used, other=0)
                            g = tl.where(used, g * y.to(ACC), g)
                if few:  # sum the block's ids of each row first: a table of four rows takes four additions, not T
                    for r in range(0, count):
                        mine = tl.sum(tl.where((place == r)[:, None] & mask, g, 0), 0)
                        tl.atomic_add(sums + (first + r) * W + columns, mine, mask=columns < W, sem="relaxed")
                else:
                    there = sums + (first + place)[:, None] * W + columns[None, :]
                    tl.atomic_add(there, g, mask=mask, sem="relaxed")


@triton.jit
def rows_and_sums(
    ids, offsets, sums, claims, places, pair, slots, parts, maps, B, id_stride,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, JAGGED: tl.constexpr,
):  # fmt: skip
    """T places of one pair: their rows, which of them hold a sum, and the sums ``[T, C]``; claims are released."""
    n = tl.program_id(1).to(tl.int64) * T + tl.arange(0, T)
    slot = slot_at(slots, pair // K)
    part = part_at(parts, pair)
    first, count, copies, claimed = run_of(places, pair)
    active = n < count
    if claimed != 0:
        i, place = read_ids(ids, offsets, n, slot, B, id_stride, JAGGED)
        active = active & is_valid(i, slot)
        row, _ = row_of(tl.where(active, i, 0), slot, part, maps)
        active = active & (tl.load(claims + row, mask=active, other=-1) == place)
        tl.debug_barrier()  # several threads hold the same id: all must have read the claim before one releases it
        tl.store(claims + row, 2147483647, mask=active)
    else:
        place = n
        row = base_of(part) + n * pitch_of(part)
    columns = tl.arange(0, C)
    mask = active[:, None] & (columns < W)[None, :]
    g = tl.load(sums + (first + place)[:, None] * W + columns[None, :], mask=mask, other=0)
    for copy in range(1, copies):
        g += tl.load(sums + (first + copy * count + place)[:, None] * W + columns[None, :], mask=mask, other=0)
    return row, active, g


def gather(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    sample_weights: Tensor | None,
    weight: Tensor,
    *integers: Tensor,
    mean: bool = False,
    step: Tensor | None = None,
) -> tuple[Tensor, Tensor, Places]:
    """Launch claim and gather: the buffer of sums, the claims, and the places; counts ``step`` up in passing."""
    slots, parts, maps, _ = integers
    jagged = offsets is not None
    batch, reads, (num_slots, k, _) = grad.shape[0], ids.shape[0], parts.shape
    places = places_of(reads, jagged, *integers)
    claims = claims_of(weight)
    width = weight.shape[1]
    sums = torch.zeros(places.total, width, dtype=accumulator(weight), device=weight.device)
    stride = 1 if jagged else ids.stride(0)
    if places.num_claimers:
        launch(
            claim_kernel, (cdiv(reads, 128) * places.num_claimers,),
            ids, offsets, claims, places.claimers, slots, parts, maps, batch, stride, places.num_claimers,
            K=k, T=128, JAGGED=jagged,
        )  # fmt: skip
    columns = min(power_of_2(width), 64)
    block = max(16, min(64, 512 // columns))
    launch(
        gather_kernel, (cdiv(batch, block) * num_slots * k,),
        grad, ids, offsets, sample_weights, weight, sums, claims, places.table, step, slots, parts, maps, batch, stride,
        num_slots, W=width, K=k, T=block, C=columns, ACC=TYPES[weight.dtype], JAGGED=jagged,
        WEIGHTED=sample_weights is not None, MEAN=mean, COUNT_STEP=step is not None,
        num_warps=1 if columns <= 32 else 2,
    )  # fmt: skip
    return sums, claims, places
