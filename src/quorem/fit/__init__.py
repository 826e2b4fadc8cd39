"""Fit a scheme to a trained table: find the stored tables whose composition is nearest to it, by least squares.

The largest table of a scheme is never a variable: given the others, its rows are weighted means over buckets, which one
pass over the ids computes. A fit reads the trained table in blocks, and keeps tables in float64 for some columns at a
time. ``docs/appendix/fit.md`` describes the methods.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor

from ..paper.partitions import ExplicitPartition, Partition
from ..paper.renumbering import Mixing
from ..paper.schemes import AnyPartition, Full, Ranks, TableSpec
from ..paper.schemes.frequency import check_frequencies, cold_ids, places
from .solvers import best_product, best_sum
from .target import Target, weights_of

__all__ = ["fit_", "fit_matrix_"]

MEMORY = 2**27  # bytes that a fit may use beside the tables; or a quarter of the trained table, if that is more
COPIES = 16  # the most copies of the small tables that a fit holds
BLOCK_ROWS = 2**16  # rows of the trained table that are multiplied at a time


def fit_(
    tables: Sequence[Tensor],  # filled in place; those of a pool come last, or are not given
    spec: TableSpec,
    dense: Tensor,  # the trained table, ``[n, D]``
    frequencies: Tensor | None = None,  # the weights of the ids' errors, ``[n]``; None weighs all ids equally
    *,
    padding_idx: int | None = None,  # an id that is left out, since its vector is never read
    ranks: Ranks | None = None,  # the hot and cold ids of a ``HotCold`` scheme; None where ids are by frequency
    matrix: Tensor | None = None,  # the matrix ``[d, D]`` of narrow rows, filled in place
) -> None:
    """Fill the tables of one spec with the least-squares fit of a trained table.

    ``concat`` and ``feature`` take means over buckets, ``add`` solves the normal equations, and ``mult`` improves the
    tables in turn. The largest table carries the scale: the others have mean zero for ``add``, and mean square one for
    ``mult``. Hot ids of a ``HotCold`` scheme keep their vectors; the row of the rest is the mean of theirs.
    An id that never occurs only determines what no other id determines.

    >>> from quorem import QR
    >>> remainder, quotient = torch.empty(3, 1), torch.empty(2, 1)
    >>> trained = torch.tensor([[1.0], [2], [3], [11], [12], [13]])
    >>> fit_([remainder, quotient], QR(2, operation="add").spec(6, 1), trained)
    >>> remainder.flatten().tolist(), quotient.flatten().tolist()
    ([6.0, 7.0, 8.0], [-5.0, 5.0])
    """
    if spec.hidden is not None:
        raise ValueError(f"scheme ({spec.scheme}) must not be path-based: its networks have no closed-form fit")
    n, d = spec.num_embeddings, spec.embedding_dim
    if dense.shape != (n, d):
        raise ValueError(f"dense has shape {tuple(dense.shape)} but must be [num_embeddings, embedding_dim] ({n}, {d})")
    if frequencies is not None:
        frequencies = check_frequencies(frequencies, n)
        if not frequencies.any():
            raise ValueError("frequencies (all 0) must have one above 0")
    if spec.is_narrow != (matrix is not None):
        raise ValueError(f"matrix must be given for narrow rows, and only for these (width {spec.width} of {d})")
    if dense.is_meta or any(table.is_meta for table in tables):
        return
    with torch.no_grad():
        dense = dense.detach()
        padding = None if padding_idx is None else padding_idx % n
        weights = weights_of(frequencies, dense.device)
        if matrix is not None:
            dense = fit_matrix_(matrix, dense, weights, padding)
        if isinstance(spec.scheme, Full):
            tables[0].copy_(dense)
            return
        target = Target(dense, _scale(dense, padding), spec.partitions, None, weights, padding)
        if spec.num_own or spec.pool is not None:
            target = _fit_own_(target, tables, spec, ranks)
            tables = tables[spec.num_own > 0 :]
        if not tables or not target.num_ids:
            return
        if spec.operation in ("concat", "feature") or len(tables) == 1:
            start = 0
            for table, partition in zip(tables, target.partitions, strict=True):
                columns = slice(start, start + table.shape[1])
                _fit_means_(_columns(target, columns), table, partition)
                start += table.shape[1] if spec.operation == "concat" else 0
            return
        order = sorted(range(len(tables)), key=lambda j: -len(tables[j]))
        target = replace(target, partitions=tuple(target.partitions[j] for j in order))
        best = best_sum if spec.operation == "add" else best_product
        for columns, part in _chunks(target):
            largest, *small = (tables[j][:, columns] for j in order)
            scale = part.scale if spec.operation == "add" else torch.ones_like(part.scale)
            for table, values in zip(small, best(part), strict=True):
                table.copy_(values * scale)
            rows = part.best_rows([table.double() / scale for table in small], spec.operation)  # of tables as rounded
            largest.copy_(rows * part.scale)


def _fit_own_(target: Target, tables: Sequence[Tensor], spec: TableSpec, ranks: Ranks | None) -> Target:
    """Fill the rows of hot ids and of the rest; returns the target that is left to fit, the cold ids."""
    place = places(spec, ranks).to(target.dense.device)
    if spec.num_own:
        owners = (place < spec.num_own).nonzero().flatten()
        part = replace(target, rows=owners)
        _fit_means_(part, tables[0], ExplicitPartition(place[owners].cpu()))
        hot = owners[place[owners] < spec.num_hot]
        tables[0].index_copy_(0, place[hot], target.dense[hot].to(tables[0].dtype))
    cold = cold_ids(torch.arange(spec.num_composed, device=place.device), spec, ranks)
    if spec.pool is None:
        return replace(target, rows=cold)
    partitions = tuple(Partition(1, len(table)) for table in tables[spec.num_own > 0 :])
    return replace(target, rows=cold, partitions=partitions, mixing=Mixing.covering(len(cold)))


def _fit_means_(target: Target, table: Tensor, partition: AnyPartition) -> None:
    """Fit one table by itself: its rows are means over the buckets of its partition."""
    target = replace(target, partitions=(partition,))
    for columns, part in _chunks(target):
        table[:, columns] = (part.best_rows([], "add") * part.scale).to(table.dtype)


def _scale(dense: Tensor, padding: int | None) -> Tensor:
    """For each column a power of two near its largest absolute value, float64; ValueError if one is not finite."""
    parts = [dense] if padding is None else [dense[:padding], dense[padding + 1 :]]
    norms = [torch.linalg.vector_norm(part, torch.inf, 0) for part in parts if len(part)]
    largest = torch.stack([dense.new_zeros(dense.shape[1]), *norms]).amax(0).double()
    if not largest.isfinite().all():
        wrong = (~dense.isfinite().all(1)).nonzero().flatten()
        row = int(wrong[wrong != padding][0] if padding is not None else wrong[0])
        raise ValueError(f"dense, the table to fit, must be finite, but row {row} is {dense[row].tolist()[:8]}")
    return torch.where(largest > 0, torch.exp2(largest.log2().floor()), 1)


def _columns(target: Target, some: slice) -> Target:
    return replace(target, dense=target.dense[:, some], scale=target.scale[some])


def _chunks(target: Target) -> Iterator[tuple[slice, Target]]:
    """Columns to fit one after another, so that the tables in float64 stay within the memory limit."""
    n, d = target.dense.shape
    memory = max(MEMORY, n * d * target.dense.element_size() // 4)
    largest, *small = target.sizes
    width = min(d, max(1, memory // (8 * (3 * largest + COPIES * sum(small)))))
    for start in range(0, d, width):
        columns = slice(start, start + width)
        yield columns, _columns(target, columns)


def fit_matrix_(matrix: Tensor, dense: Tensor, weights: Tensor | None, padding: int | None) -> Tensor:
    """Fill ``matrix`` ``[d, D]`` with the first right singular vectors of the weighted table, scaled as at the start.

    Returns the rows ``[n, d]`` whose products with the matrix are nearest to ``dense`` ``[n, D]``. ``weights``, float64
    ``[n]``, are those of the rows' errors; the row ``padding`` is ignored.
    """
    d, width = matrix.shape
    products = torch.zeros(width, width, dtype=torch.float64, device=dense.device)
    for ids in torch.arange(len(dense), device=dense.device).split(BLOCK_ROWS):
        ids = ids if padding is None else ids[ids != padding]
        rows = dense[ids].double()
        products += rows.T @ (rows if weights is None else rows * weights[ids, None])
    if not products.isfinite().all():
        raise ValueError("dense, the table to fit, must be finite")
    vectors = torch.linalg.eigh(products).eigenvectors.flip(1)[:, :d]  # eigenvalues rise
    matrix.copy_(vectors.T * sqrt(width / d))
    inverse = torch.linalg.pinv(matrix.double())  # of the matrix as it was rounded
    return torch.cat([(block.double() @ inverse).to(dense.dtype) for block in dense.split(BLOCK_ROWS)])
