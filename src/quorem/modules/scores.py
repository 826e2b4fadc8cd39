"""The score of every id of a table for some queries, without the table.

A score is the product of a query and a composed vector. Where an id's rows are added or concatenated, that is a sum of
*partial scores*, one for each stored row that the id reads. There are as many partial scores as stored rows, far fewer
than ids. Multiplied rows and path networks have none: their vectors are composed, a block of ids at a time.

The ids with the highest scores are found mostly without a look at every id: the best k sums of two falling lists are
among the pairs of ranks whose product is at most k. So ``topk`` takes the best partial scores of each of two
partitions, tries these pairs, and asks the partitions which id a pair belongs to.

Shapes: B queries, N ids, D columns of a query; R rows, W columns and S slots of ``ops.layout``.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..checks import check_ids, check_int, is_exporting
from ..ops.layout import NO_PADDING, PADDING, Extent, Layout
from ..ops.rows import IdBatch, reads_of, rows_read
from ..paper.partitions import Partition, are_digits
from ..paper.schemes import AnyPartition
from ..paper.schemes.frequency import cold_ids, first_of_rest
from .lookup import Tables

CACHED_NUMBERS = 2**20  # scores, or numbers of composed vectors, of a block of which nothing is kept
BLOCK_NUMBERS = 2**24  # the same under autograd, which frees blocks late: malloc gives those above 32 MB back
FEWEST_IDS = 2**10  # of a block
QUERIES = 2**10  # queries of ``topk`` at a time
SPARE_PAIRS = 64  # pairs that are tried beyond those expected to hold enough ids


def score(module: Tables, queries: Tensor, ids: Tensor | None) -> Tensor:
    """``Embedding.score``."""
    flat, spec = checked_queries(module, queries, "score"), module.specs[0]
    if ids is not None:
        check_ids(ids, "ids")
        scores = flat @ vectors_of(module, ids.reshape(-1)).T
        return scores.to(queries.dtype).view(*queries.shape[:-1], *ids.shape)
    partial = partial_scores(module, flat)
    if partial is not None and composed_are_digits(module) and not spec.num_own:
        scores, *others = (each.T for each in by_partition(module, partial)[1])
        for each in others:  # an id is its digits: no row has to be looked up
            scores = (each[:, :, None] + scores[:, None, :]).flatten(1)
        scores = scores[:, : spec.num_embeddings]
        if (pad := module.padding[0]) is not None:
            scores = scores.masked_fill(torch.arange(spec.num_embeddings, device=scores.device) == pad, 0)
    else:
        numbers = flat.shape[1] if torch.compiler.is_compiling() else max(flat.shape)  # a graph is for any B
        blocks = [recomputed(block_scores, module, flat, partial, *ids) for ids in id_ranges(module, numbers)]
        scores = torch.cat(blocks, 1)
    return scores.to(queries.dtype).view(*queries.shape[:-1], spec.num_embeddings)


def partial_scores(module: Tables, queries: Tensor) -> Tensor | None:
    """The products of all stored rows with the columns of each slot, ``[S, R + 1, B]``; the last row is zero.

    None unless vectors are sums or concatenations of rows, of which there are fewer than ids.
    """
    spec, num_rows = module.specs[0], module.num_rows
    is_sum = spec.hidden is None and (spec.operation != "mult" or len(spec.partitions) == 1)
    if not is_sum or num_rows * module.width >= spec.num_embeddings * spec.width:
        return None
    (rows,) = module._views([Extent(0, num_rows, 1)])
    products = [rows.to(queries.dtype) @ columns.T for columns in queries.split(module.width, 1)]
    return F.pad(torch.stack(products) if len(products) > 1 else products[0][None], (0, 0, 0, 1))


def sums_of(module: Tables, partial: Tensor, ids: Tensor, *, of_padding: bool = False) -> Tensor:
    """The scores ``[N, B]`` of ids; 0 for the padding id, unless the score ``of_padding`` by its rows is wanted."""
    first, *others = (partial[s].index_select(0, rows) for s, rows in summed_rows(module, ids, of_padding=of_padding))
    return sum(others, first)


def summed_rows(module: Tables, ids: Tensor, *, of_padding: bool = False) -> list[tuple[int, Tensor]]:
    """Pairs of a slot and rows ``[N]``: an id's score is the sum of its partial scores over all pairs; R for no row."""
    # While torch.export traces, ``module.layout`` would keep the tensors that it returns, and torch would warn of them.
    layout = Layout(*map(module.get_buffer, Layout._fields)) if is_exporting() else module.layout
    slots = layout.slots
    if of_padding:
        slots = slots.index_fill(1, torch.tensor([PADDING], device=slots.device), NO_PADDING)
    rows = rows_read(reads_of(ids[:, None].expand(-1, len(slots)), slots, layout.parts, layout))
    if module.specs[0].num_own and rows.shape[2] > 1:  # an id reads its own row or the others: never both first parts
        rows = torch.cat([rows[..., :2].amax(2, keepdim=True), rows[..., 2:]], 2)
    rows = torch.where(rows < 0, module.num_rows, rows)
    return [(s, rows[:, s, k]) for s in range(rows.shape[1]) for k in range(rows.shape[2])]


def by_partition(module: Tables, partial: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The partial scores of rows that ids have of their own, ``[rows, B]``, and of the rows of each partition."""
    spec = module.specs[0]
    own, extents = module.extents[0][: spec.num_own > 0], module.extents[0][spec.num_own > 0 :]
    if pool := module.pool_of(0):
        extents = pool.extents
    starts = accumulate((e.pitch for e in extents), initial=0) if spec.operation == "concat" else [0] * len(extents)

    def of_table(extent: Extent, slot: int) -> Tensor:
        stop = extent.base + extent.rows * extent.pitch
        units = [partial[slot + u, extent.base + u : stop : extent.pitch] for u in range(extent.pitch)]
        return sum(units[1:], units[0])

    none = partial.new_zeros(0, partial.shape[2])
    return of_table(own[0], 0) if own else none, [of_table(e, s) for e, s in zip(extents, starts, strict=False)]


def composed_are_digits(module: Tables) -> bool:
    """Whether the buckets of the composed ids are the digits of all numbers below some n."""
    spec = module.specs[0]
    return not spec.num_composed or (spec.pool is None and are_digits(spec.partitions, spec.num_composed))


def id_ranges(module: Tables, numbers: int, *, cached: bool = False) -> Iterator[tuple[int, int]]:
    """Blocks of all ids, each as its first id and the one after its last; an id needs ``numbers`` numbers of memory.

    ``cached`` blocks are small: they are for loops that keep nothing of a block.
    """
    n, most = module.specs[0].num_embeddings, CACHED_NUMBERS if cached else BLOCK_NUMBERS
    size = max(FEWEST_IDS, most // max(numbers, 1))
    for first in range(0, n, size):
        yield first, min(first + size, n)


def block_scores(module: Tables, queries: Tensor, partial: Tensor | None, first: int, last: int) -> Tensor:
    """The scores ``[B, N]`` of a block of ids, by partial scores or, without them, by composed vectors."""
    if module.is_full() and module.padding[0] is None:  # no row has to be looked up
        (rows,) = module.tables()
        return queries @ rows[first:last].to(queries.dtype).T
    ids = torch.arange(first, last, device=queries.device)
    return queries @ vectors_of(module, ids).T if partial is None else sums_of(module, partial, ids).T


def recomputed(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """``function(*arguments)``, of which only the result is kept: the backward pass computes the rest again."""
    return cast(Tensor, checkpoint(function, *arguments, use_reentrant=False))


def vectors_of(module: Tables, ids: Tensor) -> Tensor:
    """The composed rows ``[N, D]`` of ids; ``[N, d]`` where rows are narrow, as ``checked_queries`` gives queries."""
    vectors = module._lookup(IdBatch(ids[:, None])).view(len(ids), module.specs[0].width)
    return vectors.to(torch.promote_types(vectors.dtype, torch.float32))


def checked_queries(module: Tables, queries: Tensor, caller: str) -> Tensor:
    """The queries as ``[B, D]``, in float32 or float64; times the matrix, ``[B, d]``, where rows are narrow."""
    spec = module.specs[0]
    if module.raw_ids[0]:
        raise ValueError(f"raw_ids (True) must be False: {caller} goes over all ids of the table")
    if spec.operation == "feature":
        raise ValueError(f"operation ('feature') must be another: {caller} needs one vector an id")
    if not isinstance(queries, Tensor):
        raise TypeError(f"queries ({type(queries).__name__}) must be a Tensor")
    if queries.dim() == 0 or queries.shape[-1] != spec.embedding_dim:
        raise ValueError(
            f"queries has shape {tuple(queries.shape)} but must end with embedding_dim ({spec.embedding_dim})"
        )
    if queries.dtype != module.dtype and not torch.is_autocast_enabled(queries.device.type):
        raise TypeError(f"queries ({queries.dtype}) must be {module.dtype}, the dtype of the vectors")
    flat = queries.reshape(-1, spec.embedding_dim).to(torch.promote_types(queries.dtype, torch.float32))
    matrix = module.projection()
    return flat if matrix is None else flat @ matrix.to(flat.dtype).T


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
    partial, composed = partial_scores(module, queries), None
    own, tables = (queries, []) if partial is None else by_partition(module, partial)
    if partial is not None and spec.num_composed:
        composed = _best_composed(module, tables, min(wanted, spec.num_composed))
    if partial is None or (spec.num_composed and composed is None):
        found = [_best_of_blocks(module, queries, partial, wanted)]
    else:
        found = [] if composed is None else [(composed[0], cold_ids(composed[1], spec, ranks))]
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


def _best_composed(module: Tables, partial: list[Tensor], wanted: int) -> tuple[Tensor, Tensor] | None:
    """The scores of the best ``wanted`` composed ids, and these, counted from 0; None where blocks are quicker.

    An id is a pair of rows, one of each partition. The best pairs of rows are tried: twice as many as should hold
    ``wanted`` pairs that belong to an id, then twice as many again, until they do.
    """
    count, pool = module.specs[0].num_composed, module.pool_of(0)
    partitions = module.specs[0].partitions if pool is None else pool.partitions
    space = count if pool is None else 2**pool.mixing.bits  # the partitions divide the numbers below it
    number_of = _number_of_pair(partitions, space)
    if number_of is None:
        return None
    first, second = partial if len(partial) == 2 else (*partial, torch.zeros_like(partial[0][:1]))
    num_pairs = len(first) * len(second)
    tried = wanted * num_pairs // count + SPARE_PAIRS
    while True:
        tried = min(2 * tried, num_pairs)
        i, j = (ranks.to(first.device) for ranks in _ranks_of_best(tried, len(first), len(second)))
        if len(i) > count:
            return None
        x, y = (scores.T.topk(min(tried, len(scores))) for scores in (first, second))
        sums, position = (x.values[:, i] + y.values[:, j]).topk(min(tried, len(i)))
        number = number_of(x.indices.gather(1, i[position]), y.indices.gather(1, j[position]))
        nth = number if pool is None else pool.mixing.inverse(number)
        is_id = (number < space) & (nth < count)
        if tried == num_pairs or int(is_id.sum(1).min()) >= wanted:
            values, position = sums.masked_fill(~is_id, -math.inf).topk(wanted)
            return values, torch.where(is_id, nth, 0).gather(1, position)


@lru_cache(maxsize=2)
def _ranks_of_best(count: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Ranks, from 0, in two falling lists so long: those that the ``count`` pairs of highest sums may have.

    No sum of ranks i and j, from 1, is above that of lower ranks in both lists, which are ``i * j`` pairs with itself.
    So ``i * j <= count`` for the best.

    >>> [ranks.tolist() for ranks in _ranks_of_best(3, 9, 2)]
    [[0, 0, 1, 2], [0, 1, 0, 0]]
    """
    most_j = (count // torch.arange(1, min(count, rows) + 1, device="cpu")).clamp(max=columns)  # for each i
    i = torch.repeat_interleave(most_j)
    return i, torch.arange(len(i), device="cpu") - (most_j.cumsum(0) - most_j)[i]


def _number_of_pair(partitions: Sequence[AnyPartition], space: int) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The function from two buckets to the number below ``space`` that falls into both; None if that is not known.

    A single partition is the first of two, the second of which has one bucket.
    """
    closed = [(p.stride, p.size) for p in partitions if isinstance(p, Partition)]
    if not len(closed) == len(partitions) <= 2 or math.prod(p.size for p in partitions) < space:
        return None
    (stride, m), (other_stride, size) = (*closed, (closed[0][1], 1))[:2]
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
