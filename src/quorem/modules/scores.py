"""The score of every id of a table for some queries, without the table.

A score is the product of a query and a composed vector. Where an id's rows are added or concatenated, that is a sum of
*partial scores*, one for each stored row that the id reads. There are as many partial scores as stored rows, far fewer
than ids. Multiplied rows and path networks have none: their vectors are composed, a block of ids at a time.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..checks import check_ids
from ..ops.layout import pool_key
from ..ops.rows import IdBatch
from ..paper.partitions import Partition
from ..paper.schemes.frequency import places
from .lookup import Tables

BLOCK_NUMBERS = 2**22  # scores that are in memory at once
FEWEST_IDS = 2**10  # of a block


class Parts(NamedTuple):
    """The stored rows of a table whose vectors are sums or concatenations of rows."""

    own: Tensor | None  # [hot ids + 1 if there is a rest, D]: rows that are not composed
    rows: list[Tensor]  # one stored table for each partition
    columns: list[slice]  # the columns of a vector that each of them makes up
    partitions: tuple[Partition, ...]
    space: int  # numbers that the partitions divide: composed ids, or all of a pool's


class Composed(NamedTuple):
    """How the composed ids of a table, counted 0, 1, ..., become the numbers that partitions divide, and back."""

    num_ids: int
    number: Callable[[Tensor], Tensor]
    nth: Callable[[Tensor], Tensor]  # the inverse; outside [0, num_ids) for numbers that no id has
    in_order: bool = False  # the number is the count
    fills_space: bool = True  # every number below ``num_ids`` belongs to an id


def score(module: Tables, queries: Tensor, ids: Tensor | None) -> Tensor:
    """``Embedding.score``."""
    flat = checked_queries(module, queries, "score")
    if ids is not None:
        check_ids(ids, "ids")
        scores = block_scores(module, flat, ids.reshape(-1))
        return scores.to(queries.dtype).view(*queries.shape[:-1], *ids.shape)
    n = module.specs[0].num_embeddings
    if has_partial_scores(module):
        own, partial = partial_scores(parts := parts_of(module), flat)
        scores = torch.cat([own.T, *composed_scores(parts, composed_of(module), partial)], 1)
        if module.specs[0].num_own:
            scores = scores.index_select(1, places(module.specs[0], module.ranks_of[0]).to(scores.device))
        if (pad := module.padding[0]) is not None:
            scores = scores.index_fill(1, torch.tensor([pad], device=scores.device), 0)
    else:
        blocks = torch.arange(n, device=flat.device).split(block_size(len(flat)))
        scores = torch.cat([checkpoint(block_scores, module, flat, ids, use_reentrant=False) for ids in blocks], 1)
    return scores.to(queries.dtype).view(*queries.shape[:-1], n)


def has_partial_scores(module: Tables) -> bool:
    """Whether a vector is a sum or a concatenation of rows."""
    spec = module.specs[0]
    closed = all(isinstance(p, Partition) for p in spec.partitions)
    return closed and spec.hidden is None and (spec.operation in ("add", "concat") or len(spec.partitions) == 1)


def parts_of(module: Tables) -> Parts:
    """The stored rows of the only table of a module, as ``has_partial_scores`` allows them."""
    spec, tables = module.specs[0], module.tables()
    own = tables.pop(0) if spec.num_own else None
    partitions: tuple[Partition, ...] = tuple(p for p in spec.partitions if isinstance(p, Partition))
    space = spec.num_composed
    if spec.pool is not None:
        extents = module.pools[pool_key(module.pools, spec)]
        tables = module._views(extents)
        partitions = tuple(Partition(1, extent.rows) for extent in extents)
        space = 2 ** module.pool_numbering(0)[1].bits
    if not spec.num_composed:
        return Parts(own, [], [], (), 0)
    if spec.operation == "concat":
        ends = torch.tensor([table.shape[1] for table in tables]).cumsum(0).tolist()
        columns = [slice(end - table.shape[1], end) for end, table in zip(ends, tables, strict=True)]
    else:
        columns = [slice(None)] * len(tables)
    return Parts(own, tables, columns, partitions[: len(tables)], space)


def composed_of(module: Tables) -> Composed:
    """The numbers of the composed ids of the only table of a module."""
    spec = module.specs[0]
    if spec.pool is not None:
        first, mixing = module.pool_numbering(0)
        return Composed(
            spec.num_composed, lambda nth: mixing(nth + first), lambda n: mixing.inverse(n) - first, fills_space=False
        )
    if spec.permutation is not None:
        return Composed(spec.num_composed, spec.permutation, spec.permutation.inverse)
    return Composed(spec.num_composed, torch.Tensor.long, torch.Tensor.long, in_order=True)


def partial_scores(parts: Parts, queries: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The partial scores of rows that ids have of their own, ``[rows, B]``, and of each other stored table."""
    own = queries.new_zeros(0, len(queries)) if parts.own is None else parts.own.to(queries.dtype) @ queries.T
    pairs = zip(parts.rows, parts.columns, strict=True)
    return own, [rows.to(queries.dtype) @ queries[:, columns].T for rows, columns in pairs]


def composed_scores(parts: Parts, composed: Composed, partial: list[Tensor]) -> Iterator[Tensor]:
    """The scores ``[B, block]`` of the composed ids in order, a block at a time."""
    if not partial:
        return
    size = partial[0].shape[1]
    if (
        are_digits(parts.partitions, composed.num_ids) and composed.nth is torch.Tensor.long
    ):  # an id is its digits: no row has to be looked up
        first, *others = (scores.T for scores in partial)
        for scores in others:
            first = (scores[:, :, None] + first[:, None, :]).flatten(1)
        yield first[:, : composed.num_ids]
        return
    for nth in torch.arange(composed.num_ids, device=partial[0].device).split(block_size(size)):
        yield sums_of(parts, composed, partial, nth).T


def sums_of(parts: Parts, composed: Composed, partial: list[Tensor], nth: Tensor) -> Tensor:
    """The scores ``[block, B]`` of some composed ids."""
    number = composed.number(nth)
    pairs = zip(partial, parts.partitions, strict=True)
    first, *others = (scores.index_select(0, partition(number)) for scores, partition in pairs)
    return sum(others, first)


def are_digits(partitions: Sequence[Partition], count: int) -> bool:
    """Whether the buckets of each number below ``count`` are its digits, so that combinations count up like numbers.

    >>> are_digits([Partition(1, 4), Partition(4, 3)], 12), are_digits([Partition(1, 4), Partition(1, 3)], 12)
    (True, False)
    """
    if math.prod(p.size for p in partitions) < count:
        return False
    strides = accumulate((p.size for p in partitions[:-1]), operator.mul, initial=1)
    return [p.stride for p in partitions] == list(strides)


def place_of(module: Tables, i: int) -> int:
    """The place of an id as ``places`` has it: hot ids first, then the rest in one place, then the composed ids."""
    spec, ranks = module.specs[0], module.ranks_of[0]
    rest_place, num_cold = spec.num_hot, spec.num_composed
    if ranks is None:
        if i < spec.num_hot:
            return i
        return spec.num_own + i - spec.num_hot if i - spec.num_hot < num_cold else rest_place
    below_hot, below_cold = (int(torch.searchsorted(each, i)) for each in ranks)
    if below_hot < len(ranks.hot) and int(ranks.hot[below_hot]) == i:
        return below_hot
    if not spec.num_rest:
        return spec.num_own + i - below_hot
    is_cold = below_cold < len(ranks.cold) and int(ranks.cold[below_cold]) == i
    return spec.num_own + below_cold if is_cold else rest_place


def block_scores(module: Tables, queries: Tensor, ids: Tensor) -> Tensor:
    """The scores ``[B, N]`` of some ids, whose vectors are composed."""
    return queries @ vectors_of(module, ids).T


def vectors_of(module: Tables, ids: Tensor) -> Tensor:
    """The composed rows ``[N, D]`` of ids; ``[N, d]`` where rows are narrow, as ``checked_queries`` gives queries."""
    vectors = module._lookup(IdBatch(ids[:, None])).view(len(ids), module.specs[0].width)
    return vectors.to(torch.promote_types(vectors.dtype, torch.float32))


def block_size(queries: int) -> int:
    """Number of ids in a block, for so many queries."""
    return max(FEWEST_IDS, BLOCK_NUMBERS // max(queries, 1))


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
