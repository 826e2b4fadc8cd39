"""Fit a scheme to a trained table: find the stored tables whose composition is nearest to it, by least squares.

The largest table of a scheme is never a variable: given the others, its rows are weighted means over buckets, which one
pass over the ids computes. So a fit keeps only the small tables in memory, in float64, reads the trained table in
blocks, and writes the largest table in its last pass. ``docs/appendix/fit.md`` describes the methods.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..paper.partitions import ExplicitPartition, Partition
from ..paper.renumbering import Mixing
from ..paper.schemes import Full, Ranks, TableSpec
from ..paper.schemes.frequency import check_frequencies, cold_ids, places
from . import products, sums
from .narrow import fit_matrix_
from .passes import run_pass
from .target import Target, weights_of

__all__ = ["fit_"]

MEMORY = 2**27  # bytes that a fit may use beside the tables; or a quarter of the trained table, if that is more
COPIES = 16  # the most copies of the small tables that a fit holds


def fit_(
    tables: Sequence[Tensor],
    spec: TableSpec,
    dense: Tensor,
    frequencies: Tensor | None = None,
    *,
    padding_idx: int | None = None,
    ranks: Ranks | None = None,
    matrix: Tensor | None = None,
) -> None:
    """Fill the tables of one spec with the least-squares fit of a trained table.

    ``concat`` and ``feature`` take means over buckets. ``add`` solves the normal equations. ``mult`` improves the
    tables in turn. A table that the scheme can represent is recovered to float precision; of products of three and more
    tables, or where few combinations of buckets occur, alternation may find only a good one.
    The largest table carries the scale: the other tables have mean zero
    for ``add``, and mean square one for ``mult``. Hot ids of a ``HotCold`` scheme keep their vectors, and the row of
    the rest is the mean of their vectors.

    Args:
        tables: the stored tables, filled in place; those of a pool, if the scheme has one, come last.
        spec: the spec of the tables.
        dense: the trained table, ``[n, D]``, on the device of ``tables``.
        frequencies: how often each id occurs, ``[n]``: the weight of its error; None weighs all ids equally. An id that
            never occurs has almost no weight: it only determines what no other id determines.
        padding_idx: an id that is left out, since its vector is never read.
        ranks: the hot and cold ids of a ``HotCold`` scheme; None where ids are in order of frequency.
        matrix: the matrix ``[d, D]`` of narrow rows, filled in place; None for rows of width D.

    Raises:
        TypeError: if ``frequencies`` does not hold numbers.
        ValueError: if ``dense`` or ``frequencies`` has the wrong shape or values, or the scheme is path-based: its
            networks have no closed-form fit.

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
    if dense.is_meta or tables[0].is_meta:
        return
    with torch.no_grad():
        dense = dense.detach()
        padding = None if padding_idx is None else padding_idx % n
        weights = weights_of(frequencies, dense.device)
        if matrix is not None:
            dense = fit_matrix_(matrix, dense, weights, padding)
        if isinstance(spec.scheme, Full):
            if spec.permutation is None:
                tables[0].copy_(dense)
                return
            for ids in torch.arange(n, device=dense.device).split(2**16):
                tables[0].index_copy_(0, spec.permutation(ids), dense[ids].to(tables[0].dtype))
            return
        target = Target(dense, _scale(dense, padding), spec.partitions, spec.permutation, weights, padding)
        if spec.num_own or spec.pool is not None:
            target = _fit_own_(target, tables, spec, ranks)
            tables = tables[spec.num_own > 0 :]
        if not target.num_ids:
            return
        if spec.operation in ("concat", "feature") or len(tables) == 1:
            _fit_means_(target, tables, spec)
            return
        partitions = target.partitions
        order = sorted(range(len(tables)), key=lambda j: -len(tables[j]))
        target = target.with_partitions([partitions[j] for j in order])
        fit_columns_ = sums.fit_sum_ if spec.operation == "add" else products.fit_product_
        for columns in _chunks(dense, sum(target.sizes[1:])):
            largest, *small = (tables[j][:, columns] for j in order)
            fit_columns_(target.columns(columns), largest, small)


def _fit_own_(target: Target, tables: Sequence[Tensor], spec: TableSpec, ranks: Ranks | None) -> Target:
    """Fill the rows of hot ids and of the rest; returns the target that is left to fit, the cold ids."""
    place = places(spec, ranks).to(target.dense.device)
    if spec.num_own:
        owners = (place < spec.num_own).nonzero().flatten()
        partition = ExplicitPartition(place[owners].cpu())
        part = replace(target, rows=owners, permutation=None, partitions=(partition,))
        run_pass(part.with_partitions([partition]), [], "add", largest=tables[0])
        hot = owners[place[owners] < spec.num_hot]
        tables[0].index_copy_(0, place[hot], target.dense[hot].to(tables[0].dtype))
    cold = cold_ids(torch.arange(spec.num_composed, device=place.device), spec, ranks)
    if spec.pool is None:
        return replace(target, rows=cold)
    partitions = tuple(Partition(1, len(table)) for table in tables[spec.num_own > 0 :])
    return replace(target, rows=cold, partitions=partitions, permutation=Mixing.covering(len(cold)))


def _scale(dense: Tensor, padding: int | None) -> Tensor:
    """For each column a power of two near its largest absolute value, float64.

    Raises:
        ValueError: if an entry is not finite.
    """
    largest = torch.zeros(dense.shape[1], dtype=torch.float64, device=dense.device)
    for begin in range(0, len(dense), 2**16):
        rows = dense[begin : begin + 2**16].abs()
        if padding is not None and begin <= padding < begin + len(rows):
            rows[padding - begin] = 0
        values = rows.amax(0)
        if not values.isfinite().all():
            row = begin + int(rows.isfinite().all(1).logical_not().nonzero()[0])
            raise ValueError(f"dense, the table to fit, must be finite, but row {row} is {dense[row].tolist()[:8]}")
        largest = torch.maximum(largest, values.double())
    return torch.where(largest > 0, torch.exp2(largest.log2().floor()), 1)


def _fit_means_(target: Target, tables: Sequence[Tensor], spec: TableSpec) -> None:
    """Fit each table separately: its rows are means over the buckets of its partition."""
    start = 0
    for table, partition in zip(tables, target.partitions, strict=True):
        columns = slice(start, start + table.shape[1])
        run_pass(target.columns(columns).with_partitions([partition]), [], "add", largest=table)
        start += table.shape[1] if spec.operation == "concat" else 0


def _chunks(dense: Tensor, num_buckets: int) -> Iterator[slice]:
    """Ranges of columns to fit one after another, so that the small tables stay within the memory limit."""
    n, d = dense.shape
    memory = max(MEMORY, n * d * dense.element_size() // 4)
    width = min(d, max(1, memory // (8 * COPIES * num_buckets)))
    for start in range(0, d, width):
        yield slice(start, min(start + width, d))
