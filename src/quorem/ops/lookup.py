"""The composed lookup and bag: the truth, in plain PyTorch, which every fused kernel must equal.

On the CPU an id outside its table raises IndexError. On a GPU it gives zeros and no gradient, and
``Tables.on_invalid_id`` says whether that raises, warns or is ignored.
"""

import torch
from torch import Tensor

from .layout import Layout
from .rows import IdBags, Reads, bag_reads, invalid_ids, lookup_reads, raise_out_of_range, read


def lookup(ids: Tensor, stored: Tensor, layout: Layout, *, names: str = "") -> Tensor:
    """Compose the vectors of ``ids`` ``[B, F]`` into ``[B, S, W]``; padding and out-of-range ids give zeros."""
    raise_out_of_range(ids, None, layout, names)
    return compose(lookup_reads(ids, layout), stored).to(stored.dtype)


def lookup_counting(ids: Tensor, stored: Tensor, layout: Layout, invalid: Tensor, *, names: str = "") -> Tensor:
    """``lookup`` that adds the number of ids out of range to ``invalid`` instead of raising."""
    count_invalid_(ids, None, invalid, layout)
    return compose(lookup_reads(ids, layout), stored).to(stored.dtype)


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
) -> Tensor:
    """Compose the vectors of jagged ``ids`` ``[V]``, then pool them into ``[B, S, W]``.

    ``offsets`` ``[F * B + 1]`` runs over the bags of the first feature, then of the second, and so on.
    """
    raise_out_of_range(ids, offsets, layout, names)
    reads, bags = bag_reads(ids, offsets, layout)
    return pool(compose(reads, stored), reads, bags, offsets, sample_weights, layout, mean).to(stored.dtype)


def pool(
    vectors: Tensor,
    reads: Reads,
    bags: IdBags,
    offsets: Tensor,
    sample_weights: Tensor | None,
    layout: Layout,
    mean: bool,
) -> Tensor:
    """Pool the vectors ``[V, P, W]`` of jagged ids into ``[B, S, W]``."""
    batch, slots = (len(offsets) - 1) // len(layout.spans), len(layout.slots)
    factor = pooling_factor(reads.valid, bags.bag, sample_weights, offsets, mean, vectors.dtype)
    out = vectors.new_zeros((batch + 1) * slots, vectors.shape[2])  # a row for ids that are in no bag
    target = (bags.bag % max(batch, 1))[:, None] * slots + bags.slot
    out = out.index_add(0, target.flatten(), (vectors * factor).flatten(0, 1))
    return out[: batch * slots].view(batch, slots, vectors.shape[2])


def read_rows(reads: Reads, stored: Tensor, width: int | None = None) -> Tensor:
    """The rows ``[N, S, K, W]`` in the accumulator's dtype, with the operation's identity where nothing is read.

    ``width`` must be given if ``stored`` holds bytes.
    """
    return with_identity(read(stored, reads.rows.clamp(min=0), width or stored.shape[1]), reads)


def with_identity(vectors: Tensor, reads: Reads) -> Tensor:
    """``vectors`` ``[N, S, K, W]``, with the operation's identity where an id has fewer than K."""
    identity = reads.product[..., None, None].to(vectors.dtype)  # 1 where rows are multiplied, 0 where they are added
    return torch.where(reads.used[..., None], vectors, identity)


def compose(reads: Reads, stored: Tensor) -> Tensor:
    """Composed vectors ``[N, S, W]`` in the accumulator's dtype; zeros for invalid ids."""
    return compose_vectors(read_rows(reads, stored), reads)


def compose_vectors(vectors: Tensor, reads: Reads) -> Tensor:
    """The product or sum ``[N, S, W]`` of K vectors each; zeros for invalid ids."""
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
