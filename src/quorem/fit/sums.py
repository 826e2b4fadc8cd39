"""``add``: a linear least-squares problem, solved by conjugate gradients with the largest table eliminated."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .passes import run_pass
from .target import Target

MAX_PASSES = 200  # the most passes of one run of conjugate gradients, unless there are few unknowns
FEW_UNKNOWNS = 2**16
MAX_RUNS = 4  # the most runs; each solves for the error that rounding left in the previous one
GRADIENT_TOLERANCE = 1e-13  # for the gradient, relative to the entries of the table


def solve(target: Target) -> list[Tensor]:
    """The small tables of the best sum, float64, each of mean zero over its buckets."""
    # Where weights are almost zero they do not determine the tables; there the solution without weights is kept.
    small = target.zeros() if target.weights is None else solve(replace(target, weights=None))
    for _ in range(MAX_RUNS):
        sums = run_pass(target, small, "add")
        gradient, curvature = torch.cat(sums.gradients), torch.cat(sums.curvatures)
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
    step, rest = torch.zeros_like(gradient), gradient.clone()
    direction = _scaled(rest, curvature)
    size = (direction * rest).sum(0)
    for _ in range(max(MAX_PASSES, 2 * len(gradient)) if gradient.numel() <= FEW_UNKNOWNS else MAX_PASSES):
        if (size <= goal).all():
            break
        # The gradient of fitting zeros is minus the normal matrix times the tables.
        product = -torch.cat(run_pass(target, direction.split(target.sizes[1:]), "add", of_zeros=True).gradients)
        slope = (direction * product).sum(0)
        length = torch.where((slope > 0) & (size > goal), size / slope, 0)
        step.addcmul_(direction, length)
        rest.addcmul_(product, length, value=-1)
        before, scaled = size, _scaled(rest, curvature)
        size = (scaled * rest).sum(0)
        direction = scaled.addcmul_(direction, torch.where(before > 0, size / before, 0))
    return step


def _scaled(gradient: Tensor, curvature: Tensor) -> Tensor:
    return torch.where(curvature > 0, gradient / curvature, 0)


def fit_sum_(target: Target, largest: Tensor, small: Sequence[Tensor]) -> None:
    """Fill the stored tables with the best sum."""
    for table, values in zip(small, solve(target), strict=True):
        table.copy_(values * target.scale)
    run_pass(target, [table.double() / target.scale for table in small], "add", largest=largest)
