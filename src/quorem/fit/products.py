"""``mult``: alternating least squares.

For two tables the best product is, for each dimension, the best matrix of rank one. If every pair of buckets has an id
(a full grid), it comes from an eigenvector. Otherwise alternation starts from several initial values, positive ones and
ones of both signs, of which each dimension takes the best. Alternation finds a good product, not always the best.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .passes import run_pass
from .target import Target

MAX_ROUNDS = 100  # the most rounds over all small tables
GAIN = 1e-4  # the small tables have converged when a round lowers the error by a smaller share than this
EXACT = 1e-13  # a smaller error, relative to the entries of the table, counts as zero
EXTRAPOLATED_FROM = 5  # number of rounds that the next one is extrapolated from
FLOORS = (0.1, 0.03, 0.01)  # limits for small factors, relative to the root mean square of their column; see COST
COST = 0.05  # factors are kept above a limit where this adds at most so much relative error
FEW_BUCKETS = 128  # with at most so many buckets, the best product of two tables comes from an eigenvector
START_ROUNDS = 5  # rounds after which initial values are compared


def fit_product_(target: Target, largest: Tensor, small: Sequence[Tensor]) -> None:
    """Fill the stored tables with the best product found."""
    even = replace(target, weights=None)
    values = alternate(even, _start(even), MAX_ROUNDS)
    if target.weights is not None:
        values = alternate(target, values, MAX_ROUNDS)
    values = [_normalized(factor) for factor in values]
    if target.weights is not None:
        values = _away_from_zero(target, values)
    for table, factor in zip(small, values, strict=True):
        table.copy_(_normalized(factor))
    run_pass(target, [table.double() for table in small], "mult", largest=largest)


def _normalized(factor: Tensor) -> Tensor:
    """The factor with its columns scaled to mean square one and a mean that is not negative."""
    size = factor.square().mean(0).sqrt()
    sign = torch.where(factor.sum(0) < 0, -1.0, 1.0)
    return torch.where(size > 0, factor * sign / size, 1)


def _away_from_zero(target: Target, small: list[Tensor]) -> list[Tensor]:
    """Move factors of the small tables away from zero, in the columns where that costs almost nothing.

    Where weights differ much, the best product may have a factor that goes to zero, while rows of the largest table go
    to infinity. Such a product is hardly better, and the first step of an optimizer would destroy it.
    """
    error = run_pass(target, small, "mult", []).error
    open_columns = torch.stack([(table.abs() < FLOORS[0]).any(0) for table in small]).any(0)
    for floor in FLOORS:
        if not open_columns.any():
            break
        raised = [torch.where(table < 0, -1.0, 1.0) * table.abs().clamp(min=floor) for table in small]
        cheap = open_columns & (run_pass(target, raised, "mult", []).error <= (1 + COST) * error)
        small = [torch.where(cheap, new, old) for new, old in zip(raised, small, strict=True)]
        open_columns &= ~cheap
    return small


def alternate(target: Target, small: Sequence[Tensor], passes: int) -> list[Tensor]:
    """Improve the small tables in turn, until a round over them gains almost nothing.

    Rounds converge slowly where weights differ much, so each column is extrapolated from its last rounds (Anderson
    mixing); a column that became worse goes back to the result without extrapolation.
    """
    state, plain = torch.cat(tuple(small)), torch.cat(tuple(small))
    least, idle = torch.full_like(target.scale, math.inf), 0
    points: list[Tensor] = []  # the results of the last rounds
    steps: list[Tensor] = []  # the change that each of these rounds made
    for _ in range(passes):
        tables = [table.clone() for table in state.split(target.sizes[1:])]
        error = torch.stack([_improve(target, tables, j) for j in range(len(tables))])[0]
        after, better, before = torch.cat(tables), error <= least, least.sum()
        least, plain = torch.where(better, error, least), torch.where(better, after, plain)
        idle = idle + 1 if before - least.sum() <= GAIN * least.sum() else 0
        if idle == 2 or least.sum() <= EXACT**2 * target.total_weight:  # one idle round may be a bad extrapolation
            break
        points, steps = [*points[-EXTRAPOLATED_FROM:], after], [*steps[-EXTRAPOLATED_FROM:], after - state]
        state = torch.where(better, _extrapolated(points, steps), plain)
    return list(plain.split(target.sizes[1:]))


def _extrapolated(points: list[Tensor], steps: list[Tensor]) -> Tensor:
    """For each column, the combination of the points for which the same combination of the steps is shortest."""
    if len(points) == 1:
        return points[0]
    dtype = points[0].dtype
    points, steps = [table.double() for table in points], [table.double() for table in steps]  # steps are nearly equal
    point, step = points[-1], steps[-1]
    between = torch.stack([step - other for other in steps[:-1]]).permute(2, 1, 0)  # [D, P, m]
    gram = between.transpose(1, 2) @ between
    ridge = 1e-12 * gram.diagonal(dim1=1, dim2=2).sum(1)[:, None, None] + 1e-300
    slope = between.transpose(1, 2) @ step.T[:, :, None]
    share = torch.linalg.solve(gram + ridge * torch.eye(len(steps) - 1, device=gram.device), slope)
    moved = torch.stack([point - other for other in points[:-1]]).permute(2, 1, 0) @ share
    return (point - moved[:, :, 0].T).to(dtype)


def _improve(target: Target, small: list[Tensor], j: int) -> Tensor:
    """Set one small table to its best values; returns the error ``[D]`` before."""
    error, (gradient,), (curvature,) = run_pass(target, small, "mult", [j])
    small[j] += torch.where(curvature > 0, gradient / curvature, 0)
    return error


def _start(target: Target) -> list[Tensor]:
    """Initial small tables for ``alternate``: several are tried, and each dimension takes those of least error."""
    starts, num_pairs = [], math.prod(target.sizes)
    if len(target.sizes) == 2 and target.sizes[1] <= FEW_BUCKETS and num_pairs <= 2 * target.num_ids:
        starts.append([_eigenvectors(target)])
        if num_pairs == target.num_ids and target.padding is None:
            return starts[0]
    draw = torch.Generator("cpu").manual_seed(0)
    shapes = [table.shape for table in target.zeros()]
    for has_signs in (False, False, True):
        drawn = [torch.rand(shape, generator=draw, dtype=torch.float64, device="cpu") for shape in shapes]
        signs = [torch.where(table < 0.5, -1.0, 1.0) if has_signs else 1.0 for table in drawn]
        starts.append([(s * (0.5 + t)).to(target.scale) for s, t in zip(signs, drawn, strict=True)])
    starts = [alternate(target, start, START_ROUNDS) for start in starts]
    best = torch.stack([run_pass(target, start, "mult", []).error for start in starts]).argmin(0)
    return [torch.stack(tables).gather(0, best.expand(1, *tables[0].shape))[0] for tables in zip(*starts, strict=True)]


def _eigenvectors(target: Target) -> Tensor:
    """The small one of two tables with the best product on a full grid without weights: eigenvectors as columns."""
    size, d = target.sizes[1], len(target.scale)
    gram = torch.zeros(d, size, size, dtype=torch.float64, device=target.dense.device)
    for first, last in target.ranges():
        grid = gram.new_zeros((last - first) * size, d)
        for block in target.blocks(first, last):
            grid.index_add_(0, block.buckets[0] * size + block.buckets[1], block.rows)
        grid = grid.view(last - first, size, d).permute(2, 1, 0)
        gram.baddbmm_(grid, grid.transpose(1, 2))
    return torch.linalg.eigh(gram).eigenvectors[:, :, -1].T.contiguous()
