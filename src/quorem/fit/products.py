"""``mult``: alternating least squares, from initial values that are already the solution if the table is a product.

For two tables the best product is, for each dimension, the best matrix of rank one. If every pair of buckets has an id
(a full grid), it comes from an eigenvector, and alternation converges to it from any initial values. If some pairs have
none, alternation can get stuck, so several initial values are tried: *growth* from one id, where each bucket's value
follows from its neighbours; and for small tables logarithms, which turn the product into a sum, with the signs from a
linear system over the integers modulo two.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from . import sums
from .passes import run_pass
from .target import Target

MAX_ROUNDS = 100  # the most rounds over all small tables
GAIN = 1e-4  # the small tables have converged when a round lowers the error by a smaller share than this
EXACT = 1e-13  # a smaller error, relative to the entries of the table, counts as zero
EXTRAPOLATED_FROM = 5  # number of rounds that the next one is extrapolated from
SAMPLED_NUMBERS = 2**24  # a weighted table with at least so many numbers is first fitted on a sample of its ids
SAMPLE = 16  # the sample has 1 / SAMPLE of the ids, the most frequent
IDS_A_ROW = 64  # a sample must have so many ids for each row of the small tables
FLOORS = (0.1, 0.03, 0.01)  # limits for small factors, relative to the root mean square of their column; see COST
COST = 0.05  # factors are kept above a limit where this adds at most so much relative error
FEW_BUCKETS = 128  # with at most so many buckets, the best product of two tables comes from an eigenvector
FEW_SIGNS = 2**24  # if ids times buckets are at most so many, the signs of a product are solved for


def fit_product_(target: Target, largest: Tensor, small: Sequence[Tensor]) -> None:
    """Fill the stored tables with the best product found."""
    even = replace(target, weights=None)
    is_sampled = target.weights is not None and target.dense.numel() >= SAMPLED_NUMBERS
    values = alternate(even, _start(even), 1 if is_sampled else MAX_ROUNDS)
    if is_sampled and run_pass(target, values, "mult", []).error.sum() > EXACT**2 * target.total_weight:
        values = _fitted_to_sample(target, values)
    if target.weights is not None:
        values = alternate(target, values, MAX_ROUNDS)
    values = [_normalized(factor) for factor in values]
    if target.weights is not None:
        values = _away_from_zero(target, values)
    for table, factor in zip(small, values, strict=True):
        table.copy_(_normalized(factor))
    run_pass(target, [table.double() for table in small], "mult", largest=largest)


def _fitted_to_sample(target: Target, small: Sequence[Tensor]) -> list[Tensor]:
    """Improve the small tables on the most frequent ids, in single precision; then all ids need only a few rounds."""
    part = target.sample(target.num_ids // SAMPLE)
    assert part.weights is not None and part.starts is not None
    # An id that is alone in its bucket of the largest table says nothing about the small ones.
    if int((part.starts.diff() - 1).clamp_(min=0).sum()) < IDS_A_ROW * sum(target.sizes[1:]):
        return list(small)
    part = replace(part, scale=part.scale.float(), weights=part.weights.float())
    return [table.double() for table in alternate(part, [table.float() for table in small], MAX_ROUNDS)]


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
    n, sizes = target.num_ids, target.sizes
    dense_grid, full = math.prod(sizes) <= 2 * n, math.prod(sizes) == n and target.padding is None
    starts = []
    if len(sizes) == 2 and sizes[1] <= FEW_BUCKETS and dense_grid:
        starts.append([_eigenvectors(target)])
    if not full or not starts:
        starts.append(_grow(target))
    if full:
        return starts[0]
    draw = torch.Generator("cpu").manual_seed(0)
    starts.append(
        [torch.rand(t.shape, generator=draw, dtype=t.dtype, device="cpu").add_(0.5).to(t.device) for t in starts[0]]
    )
    if n * sum(sizes) <= FEW_SIGNS:
        starts.append(_from_logarithms(target))
    starts = [alternate(target, start, 1) for start in starts]
    best = torch.stack([run_pass(target, start, "mult", []).error for start in starts]).argmin(0)
    return [torch.stack(tables).gather(0, best.expand(1, *tables[0].shape))[0] for tables in zip(*starts, strict=True)]


def _eigenvectors(target: Target) -> Tensor:
    """The small one of two tables with the best product on a full grid without weights: eigenvectors as columns."""
    size, d = target.sizes[1], len(target.scale)
    gram = torch.zeros(d, size, size, dtype=torch.float64, device=target.dense.device)
    for first, last in target.ranges():
        grid = gram.new_zeros((last - first) * size, d)
        for block in target.blocks(first, last):
            cell = (block.buckets[0] * size + block.buckets[1]).flatten()
            grid.index_add_(0, cell, block.rows.flatten(0, 1))
        grid = grid.view(last - first, size, d).permute(2, 1, 0)
        gram.baddbmm_(grid, grid.transpose(1, 2))
    return torch.linalg.eigh(gram).eigenvectors[:, :, -1].T.contiguous()


def _grow(target: Target) -> list[Tensor]:
    """Initial values that start with one in the buckets of the id with the largest entry, for each dimension.

    The values of all other buckets follow from these, step by step.
    """
    d = len(target.scale)
    largest, seed = torch.zeros_like(target.scale), torch.zeros(d, dtype=torch.int64, device=target.dense.device)
    for ids in torch.arange(target.num_ids, device=seed.device).split(target.block_ids):
        values, index = target.entries(ids).abs().max(0)
        seed = torch.where(values > largest, ids[index], seed)
        largest = torch.maximum(values, largest)
    numbers = seed if target.permutation is None else target.permutation(seed)
    small = target.zeros()
    for table, part in zip(small, target.partitions[1:], strict=True):
        table[part(numbers), torch.arange(d, device=numbers.device)] = 1
    known = 0
    for _ in range(MAX_ROUNDS):
        for j in range(len(small)):
            _improve(target, small, j)
        before, known = known, sum(int(t.count_nonzero()) for t in small)
        if known in (before, sum(t.numel() for t in small)):
            break
    return small


def _from_logarithms(target: Target) -> list[Tensor]:
    """Initial values: absolute values from the best sum of logarithms, signs from the signs of the rows."""
    ids = torch.arange(target.num_ids, device=target.dense.device)
    rows = target.entries(ids)
    logarithms = rows.abs().clamp_(min=1e-30).log_()
    scale, padding = torch.ones_like(target.scale), target.padding
    if padding is not None and target.rows is not None:
        padding = next(iter((target.rows == padding).nonzero().flatten().tolist()), None)
    by_logarithm = replace(target, dense=logarithms, rows=None, scale=scale, padding=padding)
    sizes = [table.exp() for table in sums.solve(by_logarithm)]
    numbers = ids if target.permutation is None else target.permutation(ids)
    signs = _signs([part(numbers) for part in target.partitions], target.sizes, rows < 0)
    return [size * sign.to(size) for size, sign in zip(sizes, signs[1:], strict=True)]


def _signs(buckets: list[Tensor], sizes: list[int], negative: Tensor) -> list[Tensor]:
    """Signs ``[size, D]`` of each table whose products are negative where ``negative`` is; contradictions are ignored.

    Gaussian elimination modulo two, all dimensions at once: a row is an integer whose bits are the buckets of an id.
    """
    d, total = negative.shape[1], sum(sizes)
    # Small tables have the low bits, so that the largest table is eliminated first.
    starts = [total - sum(sizes[: j + 1]) for j in range(len(sizes))]
    columns = zip(*(b.add(s).tolist() for b, s in zip(buckets, starts, strict=True)), strict=True)
    pivots: dict[int, tuple[int, int]] = {}
    for bits, row in zip(columns, negative.tolist(), strict=True):
        mask = reduce(int.__xor__, (1 << bit for bit in bits))
        value = sum(1 << c for c in range(d) if row[c])
        while mask:
            pivot = mask.bit_length() - 1
            if pivot not in pivots:
                pivots[pivot] = mask, value
                break
            mask, value = mask ^ pivots[pivot][0], value ^ pivots[pivot][1]
    solution = [0] * total
    for pivot in sorted(pivots):
        mask, value = pivots[pivot]
        mask ^= 1 << pivot
        while mask:
            bit = mask.bit_length() - 1
            value, mask = value ^ solution[bit], mask ^ (1 << bit)
        solution[pivot] = value
    values = [[-1.0 if value >> c & 1 else 1.0 for c in range(d)] for value in solution]
    signs = torch.tensor(values, device=negative.device)
    return [signs[start : start + size] for start, size in zip(starts, sizes, strict=True)]
