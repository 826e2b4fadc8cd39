"""The small tables of the best sum, by conjugate gradients, and of a good product, by alternating least squares."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .target import Target

MAX_PASSES = 200  # the most passes of one run of conjugate gradients, unless there are few unknowns
FEW_UNKNOWNS = 2**16
MAX_RUNS = 4  # the most runs; each solves for the error that rounding left in the previous one
GRADIENT_TOLERANCE = 1e-13  # for the gradient, relative to the entries of the table
MAX_ROUNDS = 100  # the most rounds over all small tables
GAIN = 1e-4  # the small tables have converged when a round lowers the error by a smaller share than this
EXACT = 1e-13  # a smaller error, relative to the entries of the table, counts as zero
FLOOR = 0.1  # factors are kept above it, relative to the root mean square of their column; see COST
COST = 0.05  # but only in columns where this adds at most so much relative error
START_ROUNDS = 5  # rounds after which initial values are compared


def best_sum(target: Target) -> list[Tensor]:
    """The small tables of the best sum, float64, each of mean zero over its buckets."""
    # Where weights are almost zero they do not determine the tables; there the solution without weights is kept.
    small = target.zeros() if target.weights is None else best_sum(replace(target, weights=None))
    for _ in range(MAX_RUNS):
        gradient, curvature = map(torch.cat, target.error_terms(small, "add", range(len(small)))[1:])
        size = _scaled(gradient, curvature).mul_(gradient).sum(0)
        goal = GRADIENT_TOLERANCE**2 * target.total_weight
        if (size <= goal).all():
            break
        step = _conjugate_gradients(target, gradient, curvature, goal)
        for table, change in zip(small, step.split(target.sizes[1:]), strict=True):
            table.add_(change)
    for table in small:
        table.sub_(table.mean(0))
    return small


def _conjugate_gradients(target: Target, gradient: Tensor, curvature: Tensor, goal: float) -> Tensor:
    """The step ``[P, D]`` over all small tables after which the gradient is zero; columns are independent."""
    # The gradient of fitting zeros is minus the normal matrix times the tables.
    zeros = replace(target, dense=target.dense.new_zeros(()).expand_as(target.dense))
    step, residual = torch.zeros_like(gradient), gradient.clone()
    direction = _scaled(residual, curvature)
    size = (direction * residual).sum(0)
    for _ in range(max(MAX_PASSES, 2 * len(gradient)) if gradient.numel() <= FEW_UNKNOWNS else MAX_PASSES):
        if (size <= goal).all():
            break
        small = direction.split(target.sizes[1:])
        product = -torch.cat(zeros.error_terms(small, "add", range(len(small)))[1])
        slope = (direction * product).sum(0)
        length = torch.where((slope > 0) & (size > goal), size / slope, 0)
        step.addcmul_(direction, length)
        residual.addcmul_(product, length, value=-1)
        before, scaled = size, _scaled(residual, curvature)
        size = (scaled * residual).sum(0)
        direction = scaled.addcmul_(direction, torch.where(before > 0, size / before, 0))
    return step


def _scaled(gradient: Tensor, curvature: Tensor) -> Tensor:
    return torch.where(curvature > 0, gradient / curvature, 0)


def best_product(target: Target) -> list[Tensor]:
    """The small tables of the best product found, float64, each column of mean square one.

    Each dimension takes the best of several initial values.
    """
    even = replace(target, weights=None)
    values = alternate(even, _initial_tables(even), MAX_ROUNDS)
    if target.weights is not None:
        values = alternate(target, values, MAX_ROUNDS)
    values = [_normalized(factor) for factor in values]
    return values if target.weights is None else [_normalized(each) for each in _away_from_zero(target, values)]


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
    error = target.error_terms(small, "mult", [])[0]
    raised = [torch.where(table < 0, -1.0, 1.0) * table.abs().clamp(min=FLOOR) for table in small]
    cheap = target.error_terms(raised, "mult", [])[0] <= (1 + COST) * error
    return [torch.where(cheap, new, old) for new, old in zip(raised, small, strict=True)]


def alternate(target: Target, small: Sequence[Tensor], rounds: int) -> list[Tensor]:
    """Improve the small tables in turn, until a round over them gains almost nothing."""
    tables, least = [table.clone() for table in small], math.inf
    for _ in range(rounds):
        errors = []
        for j, table in enumerate(tables):
            error, (gradient,), (curvature,) = target.error_terms(tables, "mult", [j])
            table += torch.where(curvature > 0, gradient / curvature, 0)
            errors.append(float(error.sum()))
        if least - errors[0] <= GAIN * errors[0] or errors[0] <= EXACT**2 * target.total_weight:
            break
        least = errors[0]
    return tables


def _initial_tables(target: Target) -> list[Tensor]:
    """Initial small tables for ``alternate``: several are tried, and each dimension takes those of least error."""
    starts, draw = [], torch.Generator("cpu").manual_seed(0)
    shapes = [table.shape for table in target.zeros()]
    for has_signs in (False, False, True):
        drawn = [torch.rand(shape, generator=draw, dtype=torch.float64, device="cpu") for shape in shapes]
        signs = [torch.where(table < 0.5, -1.0, 1.0) if has_signs else 1.0 for table in drawn]
        starts.append([(s * (0.5 + t)).to(target.scale) for s, t in zip(signs, drawn, strict=True)])
    starts = [alternate(target, start, START_ROUNDS) for start in starts]
    best = torch.stack([target.error_terms(start, "mult", [])[0] for start in starts]).argmin(0)
    return [torch.stack(tables).gather(0, best.expand(1, *tables[0].shape))[0] for tables in zip(*starts, strict=True)]
