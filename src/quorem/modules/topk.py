"""The ids with the highest scores, exactly, and mostly without a look at every id.

The best k sums of two falling lists are among the pairs of ranks whose product is at most k. So ``topk`` takes the best
partial scores of each of two partitions, tries these pairs, and asks the partitions which id a pair belongs to.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..checks import check_ids, check_int, is_exporting
from ..paper.partitions import Partition
from ..paper.schemes.frequency import cold_ids, first_of_rest
from .lookup import Tables
from .scores import block_scores, checked_queries, id_ranges, partial_scores, score, scores_by_partition

QUERIES = 2**10  # queries at a time
SPARE_PAIRS = 64  # pairs that are tried beyond those expected to hold enough ids


def topk(module: Tables, queries: Tensor, k: int, exclude: Tensor | None) -> tuple[Tensor, Tensor]:
    """``Embedding.topk``."""
    n = module.specs[0].num_embeddings
    if is_exporting() and exclude is None:
        best = torch.topk(score(module, queries, None), k)
        return best.values, best.indices
    with torch.no_grad():
        flat = checked_queries(module, queries, "topk")
        if exclude is None:
            exclude = torch.empty(*queries.shape[:-1], 0, dtype=torch.int64, device="cpu")
        excluded = _excluded(exclude, queries, n)
        num_excluded = excluded.shape[1]
        check_int("k", k)
        if k > n - num_excluded:
            raise ValueError(f"k ({k}) must be at most {n - num_excluded}: exclude lists {num_excluded} of {n} ids")
        values = queries.new_zeros(*queries.shape[:-1], k)
        ids = torch.zeros_like(values, dtype=torch.int64)
        for first in range(0, len(flat), QUERIES):
            block = slice(first, first + QUERIES)
            values.view(-1, k)[block], ids.view(-1, k)[block] = _best(module, flat[block], k, excluded[block])
        return values, ids


def _best(module: Tables, queries: Tensor, k: int, excluded: Tensor) -> tuple[Tensor, Tensor]:
    """The best k of candidates: the best of hot ids, of the rest and of composed ids; or of all ids in blocks."""
    spec, ranks, pad = module.specs[0], module.ranks_of[0], module.padding[0]
    wanted = k + excluded.shape[1] + (pad is not None)
    partial, pairs = partial_scores(module, queries), None
    own, tables = (queries, []) if partial is None else scores_by_partition(module, partial)
    if partial is not None and spec.num_composed:
        pairs = _best_pairs(module, tables, min(wanted, spec.num_composed))
    found: list[tuple[Tensor, Tensor]] = []
    if pairs is not None:
        found.append((pairs[0], cold_ids(pairs[1], spec, ranks)))
    if partial is None or (spec.num_composed and pairs is None):
        found.append(_best_of_blocks(module, queries, partial, wanted))
    else:
        if spec.num_hot:
            values, nth = own[: spec.num_hot].T.topk(min(wanted, spec.num_hot))
            found.append((values, nth if ranks is None else ranks.hot.to(nth.device).long()[nth]))
        if spec.num_rest:
            rest = first_of_rest(spec, ranks, wanted).to(queries.device)
            found.append((own[spec.num_hot][:, None].expand(-1, len(rest)), rest.expand(len(queries), -1)))
    if pad is not None:  # its vector is zero, whatever its rows are
        found = [(values.masked_fill(ids == pad, -math.inf), ids) for values, ids in found]
        zero = queries.new_zeros(len(queries), 1)
        found.append((zero, torch.full_like(zero, pad, dtype=torch.int64)))
    values, ids = (torch.cat(tensors, 1) for tensors in zip(*found, strict=True))
    values = values.masked_fill((ids[:, :, None] == excluded[:, None, :]).any(2), -math.inf)
    best_values, position = values.topk(k)
    return best_values, ids.gather(1, position)


def _best_pairs(module: Tables, partial: list[Tensor], wanted: int) -> tuple[Tensor, Tensor] | None:
    """The best ``wanted`` composed ids, counted from 0, by the pairs of rows with the highest sums.

    The m-th best pair of two falling lists has ranks, counted from 1, whose product is at most m. So these are tried,
    for an m that should contain enough pairs that belong to an id, or else a larger one. None where blocks are quicker.
    """
    count, pool = module.specs[0].num_composed, module.pool_of(0)
    partitions: Sequence[object] = module.specs[0].partitions
    nth_of: Callable[[Tensor], Tensor] = Tensor.long
    space = count  # how many numbers the partitions divide
    if pool is not None:
        partitions, nth_of, space = pool.partitions, pool.mixing.inverse, 2**pool.mixing.bits
    if len(partial) == 1:
        if partial[0].shape[0] < count:  # several ids read one row
            return None
        values, number = partial[0].T.topk(wanted)
        return values, nth_of(number)
    number_of = _number_of_pair(partitions)
    if number_of is None:
        return None
    rows, columns = (len(scores) for scores in partial)
    most = wanted * rows * columns // count + SPARE_PAIRS
    while True:
        most = min(2 * most, rows * columns)
        i, j = _ranks_below(most, rows, columns)
        if len(i) > count:
            return None
        x, y = (scores.T.topk(min(most, len(scores))) for scores in partial)
        i, j = i.to(x.values.device), j.to(x.values.device)
        sums, position = (x.values[:, i] + y.values[:, j]).topk(min(most, len(i)))
        number = number_of(x.indices.gather(1, i[position]), y.indices.gather(1, j[position]))
        nth = nth_of(number)
        exists = (number < space) & (nth >= 0) & (nth < count)
        if most == rows * columns or int(exists.sum(1).min()) >= wanted:
            values, position = sums.masked_fill(~exists, -math.inf).topk(wanted)
            return values, torch.where(exists, nth, 0).gather(1, position)


@lru_cache(maxsize=2)
def _ranks_below(most: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """All ranks ``(i, j)``, counted from 0, of lists so long with ``(i + 1) * (j + 1) <= most``.

    >>> [ranks.tolist() for ranks in _ranks_below(3, 9, 2)]
    [[0, 0, 1, 2], [0, 1, 0, 0]]
    """
    lengths = (most // torch.arange(1, min(most, rows) + 1, device="cpu")).clamp(max=columns)
    i = torch.repeat_interleave(lengths)
    return i, torch.arange(len(i), device="cpu") - (lengths.cumsum(0) - lengths)[i]


def _number_of_pair(partitions: Sequence[object]) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The function from two buckets to the number that falls into both; None if that is not known."""
    closed = [(p.stride, p.size) for p in partitions if isinstance(p, Partition)]
    if len(partitions) != 2 or len(closed) != 2:
        return None
    (stride, m), (other_stride, size) = closed
    if (stride, other_stride) == (1, m):
        return lambda a, b: a + m * b
    if (stride, other_stride) == (1, 1) and math.gcd(m, size) == 1 and m * size < 2**62 and size < 2**31:
        inverse = pow(m, -1, size)
        return lambda a, b: a + m * ((b - a) * inverse % size)  # Chinese remainders
    return None


def _best_of_blocks(module: Tables, queries: Tensor, partial: Tensor | None, wanted: int) -> tuple[Tensor, Tensor]:
    """The best ``wanted`` scores of all ids, and the ids."""
    best = queries.new_zeros(len(queries), 0), torch.zeros(len(queries), 0, dtype=torch.int64, device=queries.device)
    for first, last in id_ranges(module, max(queries.shape), cached=True):
        scores = block_scores(module, queries, partial, first, last)
        values, position = scores.topk(min(wanted, last - first))
        values, known = torch.cat([best[0], values], 1), torch.cat([best[1], position + first], 1)
        values, position = values.topk(min(wanted, values.shape[1]))
        best = values, known.gather(1, position)
    return best


def _excluded(exclude: Tensor, queries: Tensor, n: int) -> Tensor:
    """The excluded ids of each query, ``[B, E]``, checked."""
    check_ids(exclude, "exclude")
    if exclude.dim() != queries.dim() or exclude.shape[:-1] != queries.shape[:-1]:
        rule = f"{tuple(queries.shape[:-1])} and the number of ids"
        raise ValueError(f"exclude has shape {tuple(exclude.shape)} but must have shape {rule}")
    if len(outside := exclude[(exclude < -1) | (exclude >= n)]):
        raise ValueError(f"exclude holds id {int(outside[0])}, which must be in [0, {n}), or -1 for none")
    return torch.atleast_2d(exclude.long().to(queries.device)).flatten(0, -2)
