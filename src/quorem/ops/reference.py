"""The truth in plain PyTorch: what every fused kernel must equal. Differentiable; ``layout`` explains the shapes.

``integers`` stands for the four tensors of a layout: slots, parts, maps, spans.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import BASE, FEATURE, LIMIT, MAP, MULT, MULTIPLIER, OPERATION, PADDING, PITCH, SHIFT, SIZE, STRIDE, UNUSED


def lookup(ids: Tensor, weight: Tensor, *integers: Tensor) -> Tensor:
    """Compose the vectors of ``ids`` ``[B, F]`` into ``[B, S, W]``; padding and out-of-range ids give zeros."""
    slots, parts, maps, _ = integers
    rows, valid = rows_of(ids[:, slots[:, FEATURE]], slots, parts, maps)
    return _compose(_vectors(rows, weight, slots, parts), slots, valid).to(weight.dtype)


def lookup_row_grads(grad: Tensor, ids: Tensor, weight: Tensor, *integers: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of every row that ``lookup`` read: row numbers ``[B, S, K]`` and values ``[B, S, K, W]``.

    A row stands once for each time it was read. Entries that read nothing have row ``UNUSED`` and zeros.
    """
    slots, parts, maps, _ = integers
    rows, valid = rows_of(ids[:, slots[:, FEATURE]], slots, parts, maps)
    return _row_grads(grad, rows, valid, weight, slots, parts)


def bag(
    ids: Tensor, offsets: Tensor, sample_weights: Tensor | None, weight: Tensor, *integers: Tensor, mean: bool
) -> Tensor:
    """Compose the vectors of jagged ``ids`` ``[V]``, then pool them into ``[B, S, W]``.

    ``offsets`` ``[F * B + 1]`` runs over the bags of the first feature, then of the second, and so on.
    """
    vectors, valid = jagged_vectors(ids, offsets, weight, *integers)
    return pool(vectors, valid, offsets, sample_weights, *integers, mean=mean).to(weight.dtype)


def jagged_vectors(ids: Tensor, offsets: Tensor, weight: Tensor, *integers: Tensor) -> tuple[Tensor, Tensor]:
    """Composed vectors ``[V, P, W]`` of jagged ids and which of them are; P is the most slots of any feature."""
    slots, parts, maps, spans = integers
    _, slot, belongs = jagged(ids, offsets, slots, spans)
    rows, valid = rows_of(ids[:, None], slots[slot], parts[slot], maps)
    valid = valid & belongs
    return _compose(_vectors(rows, weight, slots[slot], parts[slot]), slots[slot], valid), valid


def pool(
    vectors: Tensor, valid: Tensor, offsets: Tensor, sample_weights: Tensor | None, *integers: Tensor, mean: bool
) -> Tensor:
    """Pool the vectors ``[V, P, W]`` of jagged ids into ``[B, S, W]``, weighted, by sum or mean over valid ids."""
    slots, _, _, spans = integers
    bags, slot, _ = jagged(valid, offsets, slots, spans)
    batch = (len(offsets) - 1) // len(spans)
    factor = scale(bags, valid, sample_weights, offsets, mean, vectors.dtype)
    out = vectors.new_zeros((batch + 1) * len(slots), vectors.shape[2])  # a row for ids that are in no bag
    target = (bags % max(batch, 1))[:, None] * len(slots) + slot
    out = out.index_add(0, target.flatten(), (vectors * factor).flatten(0, 1))
    return out[: batch * len(slots)].view(batch, len(slots), vectors.shape[2])


def bag_row_grads(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    weight: Tensor,
    *integers: Tensor,
    mean: bool,
) -> tuple[Tensor, Tensor]:
    """Gradient of every row that ``bag`` read: row numbers ``[V, P, K]`` and values ``[V, P, K, W]``."""
    slots, parts, maps, spans = integers
    bags, slot, belongs = jagged(ids, offsets, slots, spans)
    rows, valid = rows_of(ids[:, None], slots[slot], parts[slot], maps)
    valid = valid & belongs
    grad = _of_ids(grad, bags, slot).to(accumulator(weight))
    grad = grad * scale(bags, valid, sample_weights, offsets, mean, grad.dtype)
    return _row_grads(grad, rows, valid, weight, slots[slot], parts[slot])


def bag_sample_weights_grad(
    grad: Tensor, ids: Tensor, offsets: Tensor, weight: Tensor, *integers: Tensor, mean: bool
) -> Tensor:
    """Gradient of the per-sample weights ``[V]`` of ``bag``."""
    slots, _, _, spans = integers
    bags, slot, _ = jagged(ids, offsets, slots, spans)
    vectors, valid = jagged_vectors(ids, offsets, weight, *integers)
    vectors = vectors * scale(bags, valid, None, offsets, mean, vectors.dtype)
    return (vectors * _of_ids(grad, bags, slot)).sum((1, 2))


def accumulate(rows: Tensor, values: Tensor, weight: Tensor) -> Tensor:
    """Add row gradients into a dense gradient ``[R, W]``."""
    dense = values.new_zeros(weight.shape)
    return dense.index_add(0, rows.clamp(min=0).flatten(), values.flatten(0, -2)).to(weight.dtype)


def out_of_range(ids: Tensor, limits: Tensor) -> Tensor:
    """Which of ``ids`` lie outside ``[0, limits)``."""
    return (ids < 0) | (ids >= limits)


def larger(a: int | torch.SymInt, b: int) -> int:
    """``max`` of sizes, which stays symbolic: the compiler traces Python's, ``torch.export`` would guard on it."""
    return torch.sym_max(a, b) if isinstance(a, torch.SymInt) else max(a, b)


def smaller(a: int | torch.SymInt, b: int) -> int:
    """``min`` of sizes, which stays symbolic."""
    return torch.sym_min(a, b) if isinstance(a, torch.SymInt) else min(a, b)


def bags_of(ids: Tensor, offsets: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
    """Bag ``[V]`` and feature ``[V]`` of each jagged id."""
    places = torch.arange(ids.shape[0], device=ids.device, dtype=offsets.dtype)
    bags = torch.searchsorted(offsets, places, right=True) - 1
    bags = bags.clamp(0, larger(offsets.shape[0] - 2, 0))  # ids past the last offset count for nothing
    return bags, bags // larger((offsets.shape[0] - 1) // spans.shape[0], 1)


def rows_of(i: Tensor, slots: Tensor, parts: Tensor, maps: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the weight ``[N, S, K]`` that ids ``i`` ``[N, S]`` read, and which ids ``[N, S]`` are valid."""
    limit = slots[..., LIMIT]
    i = i.long()
    valid = ~out_of_range(i, limit) & (i != slots[..., PADDING])
    i = torch.where(valid, i, 0)
    i = ((slots[..., MULTIPLIER] * i + slots[..., SHIFT]) % limit)[..., None]
    bucket = (i // parts[..., STRIDE]) % parts[..., SIZE]
    if len(maps):
        mapped = parts[..., MAP] >= 0
        bucket = torch.where(mapped, maps[torch.where(mapped, parts[..., MAP] + i, 0)], bucket)
    return parts[..., BASE] + bucket * parts[..., PITCH], valid


def scale(
    bags: Tensor, valid: Tensor, sample_weights: Tensor | None, offsets: Tensor, mean: bool, dtype: torch.dtype
) -> Tensor:
    """What each id's vector is multiplied by when pooled, ``[V, 1, 1]``."""
    ones = torch.ones(bags.shape[0], dtype=dtype, device=bags.device)
    factor = ones if sample_weights is None else sample_weights.to(dtype)
    if mean:
        count = ones.new_zeros(offsets.shape[0]).index_add(0, bags, valid.any(1).to(dtype))
        factor = factor / count.clamp(min=1)[bags]
    return factor[:, None, None]


def accumulator(weight: Tensor) -> torch.dtype:
    """The dtype that sums and products of ``weight``'s rows are taken in."""
    return torch.float32 if weight.dtype in (torch.bfloat16, torch.float16) else weight.dtype


def jagged(ids: Tensor, offsets: Tensor, slots: Tensor, spans: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bag ``[V]`` of each id, its feature's slots ``[V, P]`` (P: the most of any feature), and which of them are."""
    bags, feature = bags_of(ids, offsets, spans)
    inside = (torch.arange(len(ids), device=ids.device) < offsets[-1])[:, None]
    first, count = spans[feature].unbind(1)
    steps = torch.arange(int(spans[:, 1].max()), device=ids.device)
    return bags, (first[:, None] + steps).clamp(max=len(slots) - 1), inside & (steps < count[:, None])


def _of_ids(grad: Tensor, bags: Tensor, slot: Tensor) -> Tensor:
    """The gradient ``[B, S, W]`` of bags at each id's slots, ``[V, P, W]``."""
    grad = grad if len(grad) else grad.new_zeros(1, *grad.shape[1:])  # ids without any bag
    return grad[(bags % len(grad))[:, None], slot]


def _vectors(rows: Tensor, weight: Tensor, slots: Tensor, parts: Tensor) -> Tensor:
    """The rows ``[N, S, K, W]``, with the operation's identity where a slot has fewer than K."""
    vectors = F.embedding(rows.clamp(min=0), weight).to(accumulator(weight))
    identity = slots[..., OPERATION, None, None].to(vectors.dtype)  # ADD is 0, MULT is 1: each its own identity
    return torch.where((parts[..., BASE] >= 0)[..., None], vectors, identity)


def _compose(vectors: Tensor, slots: Tensor, valid: Tensor) -> Tensor:
    mult = (slots[..., OPERATION] == MULT)[..., None]
    return torch.where(valid[..., None], torch.where(mult, vectors.prod(-2), vectors.sum(-2)), 0)


def _row_grads(
    grad: Tensor, rows: Tensor, valid: Tensor, weight: Tensor, slots: Tensor, parts: Tensor
) -> tuple[Tensor, Tensor]:
    vectors = _vectors(rows, weight, slots, parts)
    others = torch.where((slots[..., OPERATION] == MULT)[..., None, None], _product_of_others(vectors), 1)
    values = grad.to(vectors.dtype)[..., None, :] * others
    read = valid[..., None] & (parts[..., BASE] >= 0)
    return torch.where(read, rows, UNUSED), torch.where(read[..., None], values, 0)


def _product_of_others(vectors: Tensor) -> Tensor:
    """For each of K vectors, the product of the K - 1 others; no division, so zeros are no special case."""
    ones = torch.ones_like(vectors[..., :1, :])
    before = torch.cat([ones, vectors[..., :-1, :]], -2).cumprod(-2)
    after = torch.cat([ones, vectors.flip(-2)[..., :-1, :]], -2).cumprod(-2).flip(-2)
    return before * after
