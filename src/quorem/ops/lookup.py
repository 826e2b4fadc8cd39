"""The composed lookup of single ids and bags: the truth, in plain PyTorch, which every fused kernel must equal.

On the CPU an id outside its table raises IndexError. On a GPU it gives zeros and no gradient, and
``Tables.on_invalid_id`` says whether that raises, warns or is ignored.
"""

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from .layout import Layout
from .rows import IdBags, IdBatch, Reads, batch_reads, invalid_ids, raise_out_of_range, read


class CodeOptions(TypedDict, total=False):
    """How rows of 8 or 4 bits a number are read (``codes``); empty if rows are numbers."""

    width: int  # numbers of a row
    bits: int
    dtype: torch.dtype  # of the vectors


def lookup(
    batch: IdBatch,
    stored: Tensor,
    layout: Layout,
    invalid: Tensor | None = None,
    *,
    names: str = "",
    **codes: Unpack[CodeOptions],
) -> Tensor:
    """Composed vectors ``[B, S, W]`` of a batch, those of a bag pooled; padding and out-of-range ids give zeros.

    With ``invalid``, ids out of range do not raise: their number is added to it.
    """
    if invalid is None:
        raise_out_of_range(batch, layout, names)
    else:
        count_invalid_(batch, invalid, layout)
    reads, bags = batch_reads(batch, layout)
    vectors = compose(reads, stored, **codes)
    if bags is not None:
        vectors = _pooled(vectors * pooling_factor(reads.valid, bags.bag, batch, vectors.dtype), bags, batch, layout)
    return vectors.to(codes.get("dtype", stored.dtype))


def count_invalid_(batch: IdBatch, count: Tensor, layout: Layout) -> None:
    """Add the number of ids out of range to ``count``."""
    count += invalid_ids(batch, layout)[0].sum()


def _pooled(vectors: Tensor, bags: IdBags, batch: IdBatch, layout: Layout) -> Tensor:
    """The sums ``[B, S, W]`` of the vectors ``[V, P, W]`` of each bag."""
    assert batch.offsets is not None
    size, slots = (len(batch.offsets) - 1) // len(layout.spans), len(layout.slots)
    pooled = vectors.new_zeros((size + 1) * slots, vectors.shape[2])  # a row for ids that are in no bag
    target = (bags.bag % max(size, 1))[:, None] * slots + bags.slot
    pooled = pooled.index_add(0, target.flatten(), vectors.flatten(0, 1))
    return pooled[: size * slots].view(size, slots, vectors.shape[2])


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


def pooling_factor(valid: Tensor, bag: Tensor, batch: IdBatch, dtype: torch.dtype) -> Tensor:
    """What each id's vector is multiplied by when pooled, ``[V, 1, 1]``. The mean is over valid ids."""
    assert batch.offsets is not None
    ones = torch.ones(bag.shape[0], dtype=dtype, device=bag.device)
    factor = ones if batch.sample_weights is None else batch.sample_weights.to(dtype)
    if batch.mean:
        count = ones.new_zeros(batch.offsets.shape[0]).index_add(0, bag, valid.any(1).to(dtype))
        factor = factor / count.clamp(min=1)[bag]
    return factor[:, None, None]
