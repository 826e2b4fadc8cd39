"""The softmax loss over all ids of a table, without the scores of all ids in memory.

Where every combination of digits is an id, the sum of exponentials over all ids is a product of sums over the digits.
Elsewhere the sum goes over blocks of ids, whose scores are computed again in the backward pass.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..checks import check_choice, check_ids, check_int
from . import scores
from .embedding import Embedding

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

    For ``QR`` with ``add`` or ``concat`` it looks at stored rows only; else at blocks of ids, whose scores it computes
    again in the backward pass. All ids count, ``padding_idx`` among them, whose score is 0, as with a full table.

    Args:
        queries: ``[..., D]``.
        embedding: an ``Embedding`` whose ids are the classes.
        targets: the right id of each query, ``[...]``.
        num_negatives: compare each target with so many ids drawn at random, instead of all. Their sum of exponentials
            is scaled to that of all ids, so its expectation is that of the full loss. All queries share the ids.
        ignore_index: a target that does not count.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Raises:
        TypeError: if ``embedding`` is not an ``Embedding``, or ``targets`` are not ids.
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
    flat, n = scores.checked_queries(embedding, queries, "cross_entropy"), embedding.specs[0].num_embeddings
    check_ids(targets, "targets")
    if targets.shape != queries.shape[:-1]:
        raise ValueError(f"targets has shape {tuple(targets.shape)} but must be {tuple(queries.shape[:-1])}")
    right = targets.reshape(-1)
    counts = right != ignore_index
    right = torch.where(counts, right, 0)
    if len(outside := right[(right < 0) | (right >= n)]):
        rule = f"must be in [0, {n}) or ignore_index ({ignore_index})"
        raise IndexError(f"targets holds {int(outside[0])}, which {rule}")
    of_targets = (flat * scores.vectors_of(embedding, right)).sum(1)
    if num_negatives is None:
        total = _log_sum_exp(embedding, flat)
    else:
        check_int("num_negatives", num_negatives, 1)
        drawn = torch.randint(n, (num_negatives,), device=flat.device)
        others = flat @ scores.vectors_of(embedding, drawn).T
        hits = drawn == right[:, None]
        scale = (n - 1) / (num_negatives - hits.sum(1, keepdim=True)).clamp(min=1)
        others = (others + scale.log()).masked_fill(hits, -math.inf)
        total = torch.cat([of_targets[:, None], others], 1).logsumexp(1)
    loss = torch.where(counts, total - of_targets, 0)
    if reduction == "none":
        return loss.view(targets.shape).to(queries.dtype)
    loss = loss.sum() if reduction == "sum" else loss.sum() / counts.sum()
    return loss.to(queries.dtype)


def _log_sum_exp(module: Embedding, queries: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials of all scores, ``[B]``."""
    partial, pad = scores.partial_scores(module, queries), module.padding[0]
    if partial is not None and scores.composed_are_digits(module):
        total = _row_log_sum(module, partial)
        if pad is None:
            return total
        padding = torch.tensor([pad], device=queries.device)
        share = (scores.sums_of(module, partial, padding, of_padding=True)[0] - total).exp()
        if float(share.detach().max()) < MOST_SUBTRACTED:  # replace the padding id's score by 0
            return torch.logaddexp(total + torch.log1p(-share), torch.zeros_like(total))
    if partial is not None:
        return cast(Tensor, _LogSumOfSums.apply(module, partial))

    def block_sum(first: int, last: int) -> Tensor:
        return scores.block_scores(module, queries, None, first, last).logsumexp(1)

    sums = [scores.recomputed(block_sum, *ids) for ids in scores.id_ranges(module, max(queries.shape))]
    return torch.stack(sums).logsumexp(0)


class _LogSumOfSums(torch.autograd.Function):
    """``_log_sum_exp`` by partial scores ``[S, R + 1, B]``, a block of ids at a time, and its gradient likewise.

    Autograd would make a gradient of all partial scores for each block.
    """

    @staticmethod
    def forward(ctx: Any, module: Embedding, partial: Tensor) -> Tensor:
        """The logarithm of the sum of exponentials of all scores, ``[B]``."""
        total = partial.new_full((partial.shape[2],), -math.inf)
        for ids in _blocks(module, partial):
            total = torch.logaddexp(total, scores.sums_of(module, partial, ids).logsumexp(0))
        ctx.module = module
        ctx.save_for_backward(partial, total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """The gradient of a score is its share of the sum; it goes to all rows of the id."""
        partial, total = ctx.saved_tensors
        grads = torch.zeros_like(partial)
        for ids in _blocks(ctx.module, partial):
            shares = scores.sums_of(ctx.module, partial, ids).sub_(total).exp_().mul_(grad)
            for slot, rows in scores.summed_rows(ctx.module, ids):
                grads[slot].index_add_(0, rows, shares)
        return None, grads


def _blocks(module: Embedding, partial: Tensor) -> Iterator[Tensor]:
    """All ids, in blocks whose scores are in memory at once."""
    for first, last in scores.id_ranges(module, partial.shape[2], cached=True):
        yield torch.arange(first, last, device=partial.device)


def _row_log_sum(module: Embedding, partial: Tensor) -> Tensor:
    """``_log_sum_exp`` by rows alone: hot ids, the rest, and composed ids that are digits."""
    spec = module.specs[0]
    own, tables = scores.by_partition(module, partial)
    sums = []
    if spec.num_hot:
        sums.append(own[: spec.num_hot].logsumexp(0))
    if spec.num_rest:
        sums.append(own[spec.num_hot] + math.log(spec.num_rest))
    if spec.num_composed:
        sums.append(_digits_log_sum([each.T for each in tables], spec.num_composed))
    return torch.stack(sums).logsumexp(0)


def _digits_log_sum(partial: list[Tensor], count: int) -> Tensor:
    """The logarithm of the sum of exponentials over the numbers below ``count``, whose digits have these scores.

    Each value of the last digit that is complete contributes a product of sums; the last one has fewer numbers.
    """
    *lower, last = partial
    if not lower:
        return last[:, :count].logsumexp(1)
    stride = math.prod(each.shape[1] for each in lower)
    complete, left = divmod(count, stride)
    sums = []
    if complete:
        sums.append(torch.stack([each.logsumexp(1) for each in (*lower, last[:, :complete])]).sum(0))
    if left:
        sums.append(last[:, complete] + _digits_log_sum(lower, left))
    return torch.stack(sums).logsumexp(0)
