"""The softmax loss over all ids of a table, without the scores of all ids in memory.

Where every combination of digits is an id, the sum of exponentials over all ids is a product of sums over the digits.
Elsewhere the sum goes over blocks of ids, whose scores are computed again in the backward pass.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..checks import check_choice, check_int
from .embedding import Embedding
from .scores import (
    Composed,
    Parts,
    are_digits,
    block_scores,
    block_size,
    checked_queries,
    composed_of,
    has_partial_scores,
    partial_scores,
    parts_of,
    place_of,
    sums_of,
    vectors_of,
)

Reduction = Literal["mean", "sum", "none"]
MOST_SUBTRACTED = 0.5  # the largest share of a sum that is taken off again: beyond it, digits would be lost


def cross_entropy(
    queries: Tensor,
    embedding: Embedding,
    targets: Tensor,
    *,
    num_negatives: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """``F.cross_entropy(queries @ embedding.weight.T, targets)`` without the scores of all ids in memory.

    It keeps one number for each query and block of ids, and computes a block's scores again in the backward pass. For
    ``QR`` with ``add`` or ``concat`` it looks at stored rows only, not at ids. All ids count, ``padding_idx`` among
    them, whose score is 0, as with a full table.

    Args:
        queries: ``[..., D]``.
        embedding: an ``Embedding`` whose ids are the classes.
        targets: the right id of each query, ``[...]``.
        num_negatives: compare each target with so many ids drawn at random, instead of all. Their sum of exponentials
            is scaled to that of all ids, so its expectation is that of the full loss. All queries share the ids.
        ignore_index: a target that does not count.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Raises:
        TypeError: if ``embedding`` is not an ``Embedding``.
        ValueError: if a shape or an option is wrong, or the embedding cannot score (see ``Embedding.score``).
        IndexError: if a target is not an id.

    >>> from quorem import QR, Embedding
    >>> items = Embedding(1000, 16, QR(num_collisions=4, operation="add"))
    >>> queries, targets = torch.randn(8, 16), torch.arange(8)
    >>> dense = torch.nn.functional.cross_entropy(queries @ items.weight.T, targets)
    >>> torch.allclose(cross_entropy(queries, items, targets), dense)
    True
    """
    if not isinstance(embedding, Embedding):
        raise TypeError(f"embedding ({type(embedding).__name__}) must be a quorem.Embedding")
    check_choice("reduction", reduction, Reduction)
    flat, n = checked_queries(embedding, queries, "cross_entropy"), embedding.specs[0].num_embeddings
    if targets.shape != queries.shape[:-1]:
        raise ValueError(f"targets has shape {tuple(targets.shape)} but must be {tuple(queries.shape[:-1])}")
    right = targets.reshape(-1)
    counts = right != ignore_index
    right = torch.where(counts, right, 0)
    if ((right < 0) | (right >= n)).any():
        wrong = int(right[(right < 0) | (right >= n)][0])
        raise IndexError(f"targets holds {wrong}, which must be in [0, {n}) or ignore_index ({ignore_index})")
    own = (flat * vectors_of(embedding, right)).sum(1)
    if num_negatives is None:
        total = _log_sum_exp(embedding, flat)
    else:
        check_int("num_negatives", num_negatives, 1)
        drawn = torch.randint(n, (num_negatives,), device=flat.device)
        scores = flat @ vectors_of(embedding, drawn).T
        hits = drawn == right[:, None]
        scale = (n - 1) / (num_negatives - hits.sum(1, keepdim=True)).clamp(min=1)
        scores = (scores + scale.log()).masked_fill(hits, -math.inf)
        total = torch.cat([own[:, None], scores], 1).logsumexp(1)
    loss = torch.where(counts, total - own, 0)
    if reduction == "none":
        return loss.view(targets.shape).to(queries.dtype)
    loss = loss.sum() if reduction == "sum" else loss.sum() / counts.sum()
    return loss.to(queries.dtype)


def _log_sum_exp(module: Embedding, queries: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials of all scores, ``[B]``."""
    spec, pad = module.specs[0], module.padding[0]
    if not has_partial_scores(module):
        blocks = torch.arange(spec.num_embeddings, device=queries.device).split(block_size(len(queries)))
        sums = [checkpoint(_block_log_sum, module, queries, ids, use_reentrant=False) for ids in blocks]
        return torch.stack(sums).logsumexp(0)
    own, partial = partial_scores(parts := parts_of(module), queries)
    padded = -1 if pad is None else place_of(module, pad)
    sums = [] if pad is None else [torch.zeros_like(queries[:, 0])]
    if spec.num_hot:
        sums.append(_without(own[: spec.num_hot], padded).logsumexp(0))
    if (num_rest := spec.num_rest - (spec.num_rest > 0 and padded == spec.num_hot)) > 0:
        sums.append(own[spec.num_hot] + math.log(num_rest))
    if parts.rows:
        sums.append(_composed_log_sum(parts, composed_of(module), partial, padded - spec.num_own))
    return torch.stack(sums).logsumexp(0)


def _composed_log_sum(parts: Parts, composed: Composed, partial: list[Tensor], left_out: int) -> Tensor:
    """``_log_sum_exp`` of the composed ids but the ``left_out``-th, -1 or less for none."""
    if composed.fills_space and are_digits(parts.partitions, composed.num_ids):
        total = _digits_log_sum([scores.T for scores in partial], composed.num_ids)
        if left_out < 0:
            return total
        share = (sums_of(parts, composed, partial, torch.tensor([left_out]))[0] - total).exp()
        if float(share.detach().max()) < MOST_SUBTRACTED:
            return total + torch.log1p(-share)
    blocks = torch.arange(composed.num_ids, device=partial[0].device).split(block_size(partial[0].shape[1]))
    sums = [checkpoint(_block_sums_log_sum, parts, composed, partial, n, left_out, use_reentrant=False) for n in blocks]
    return torch.stack(sums).logsumexp(0)


def _digits_log_sum(partial: list[Tensor], count: int) -> Tensor:
    """The logarithm of the sum of exponentials over the numbers below ``count``, whose digits have these scores.

    Each value of the last digit that is complete contributes a product of sums; the last one has fewer numbers.
    """
    *lower, last = partial
    if not lower:
        return last[:, :count].logsumexp(1)
    stride = math.prod(scores.shape[1] for scores in lower)
    complete, left = divmod(count, stride)
    sums = []
    if complete:
        sums.append(torch.stack([scores.logsumexp(1) for scores in (*lower, last[:, :complete])]).sum(0))
    if left:
        sums.append(last[:, complete] + _digits_log_sum(lower, left))
    return torch.stack(sums).logsumexp(0)


def _block_sums_log_sum(parts: Parts, composed: Composed, partial: list[Tensor], nth: Tensor, left_out: int) -> Tensor:
    return _without(sums_of(parts, composed, partial, nth), left_out - int(nth[0])).logsumexp(0)


def _without(scores: Tensor, row: int) -> Tensor:
    """``scores`` with minus infinity in a row, if there is such a row."""
    if not 0 <= row < len(scores):
        return scores
    return scores.index_fill(0, torch.tensor([row], device=scores.device), -math.inf)


def _block_log_sum(module: Embedding, queries: Tensor, ids: Tensor) -> Tensor:
    return block_scores(module, queries, ids).logsumexp(1)
