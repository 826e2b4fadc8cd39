"""The composed lookup and bag: the truth, in plain PyTorch, which every fused kernel must equal.

On the CPU an id outside its table raises IndexError. On a GPU it gives zeros and no gradient, and
``Tables.on_invalid_id`` says whether that raises, warns or is ignored.
"""

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from .layout import Layout
from .rows import Reads, bag_reads, invalid_ids, lookup_reads, raise_out_of_range, read


class CodeOptions(TypedDict, total=False):
    """Where rows are stored in 8 or 4 bits a number (``codes``): how they are read. Empty where they are not."""

    width: int  # numbers of a row
    bits: int
    dtype: torch.dtype  # of the vectors


def lookup(ids: Tensor, stored: Tensor, layout: Layout, *, names: str = "", **codes: Unpack[CodeOptions]) -> Tensor:
    """Compose the vectors of ``ids`` ``[B, F]`` into ``[B, S, W]``; padding and out-of-range ids give zeros."""
    raise_out_of_range(ids, None, layout, names)
    return compose(lookup_reads(ids, layout), stored, **codes).to(codes.get("dtype", stored.dtype))


def lookup_counting(
    ids: Tensor, stored: Tensor, layout: Layout, invalid: Tensor, *, names: str = "", **codes: Unpack[CodeOptions]
) -> Tensor:
    """``lookup`` that adds the number of ids out of range to ``invalid`` instead of raising."""
    count_invalid_(ids, None, invalid, layout)
    return compose(lookup_reads(ids, layout), stored, **codes).to(codes.get("dtype", stored.dtype))


def count_invalid_(ids: Tensor, offsets: Tensor | None, count: Tensor, layout: Layout) -> None:
    """Add the number of ids out of range to ``count``."""
    count += invalid_ids(ids, offsets, layout)[0].sum()


def bag(
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    stored: Tensor,
    layout: Layout,
    *,
    mean: bool,
    names: str = "",
    **codes: Unpack[CodeOptions],
) -> Tensor:
    """Compose the vectors of jagged ``ids`` ``[V]``, then pool them into ``[B, S, W]``.

    ``offsets`` ``[F * B + 1]`` runs over the bags of the first feature, then of the second, and so on.
    """
    raise_out_of_range(ids, offsets, layout, names)
    reads, bags = bag_reads(ids, offsets, layout)
    vectors = compose(reads, stored, **codes)  # [V, P, W]
    factor = pooling_factor(reads.valid, bags.bag, sample_weights, offsets, mean, vectors.dtype)
    batch, slots = (len(offsets) - 1) // len(layout.spans), len(layout.slots)
    pooled = vectors.new_zeros((batch + 1) * slots, vectors.shape[2])  # a row for ids that are in no bag
    target = (bags.bag % max(batch, 1))[:, None] * slots + bags.slot
    pooled = pooled.index_add(0, target.flatten(), (vectors * factor).flatten(0, 1))
    pooled = pooled[: batch * slots].view(batch, slots, vectors.shape[2])
    return pooled.to(codes.get("dtype", stored.dtype))


def read_rows(reads: Reads, stored: Tensor, width: int, bits: int = 8) -> Tensor:
    """The rows ``[N, S, K, W]`` in the accumulator's dtype, with the operation's identity where nothing is read."""
    vectors = read(stored, reads.rows.clamp(min=0), width, bits)
    identity = reads.product[..., None, None].to(vectors.dtype)  # 1 where rows are multiplied, 0 where they are added
    return torch.where(reads.used[..., None], vectors, identity)


def compose(reads: Reads, stored: Tensor, **codes: Unpack[CodeOptions]) -> Tensor:
    """Composed vectors ``[N, S, W]`` in the accumulator's dtype; zeros for invalid ids."""
    vectors = read_rows(reads, stored, codes.get("width", stored.shape[1]), codes.get("bits", 8))
    composed = torch.where(reads.product[..., None], vectors.prod(-2), vectors.sum(-2))
    return torch.where(reads.valid[..., None], composed, 0)


def pooling_factor(
    valid: Tensor, bag: Tensor, sample_weights: Tensor | None, offsets: Tensor, mean: bool, dtype: torch.dtype
) -> Tensor:
    """What each id's vector is multiplied by when pooled, ``[V, 1, 1]``. The mean is over valid ids."""
    ones = torch.ones(bag.shape[0], dtype=dtype, device=bag.device)
    factor = ones if sample_weights is None else sample_weights.to(dtype)
    if mean:
        count = ones.new_zeros(offsets.shape[0]).index_add(0, bag, valid.any(1).to(dtype))
        factor = factor / count.clamp(min=1)[bag]
    return factor[:, None, None]
