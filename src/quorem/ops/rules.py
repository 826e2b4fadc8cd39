"""The optimizers as rules on the touched rows, in plain PyTorch: each row once, with its summed gradient, in place.

A rule takes ``rows`` ``[N]``, all different; their gradients ``[N, W]`` in the accumulator's dtype; the weight
``[R, W]``; ``lr``, a float64 scalar tensor; and ``state`` and ``hyper`` as ``ops.update`` lists them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from . import replay
from .reference import accumulator

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[float]], None]
CHUNK = 2**16  # rows brought up to date at a time


def sgd(rows: Tensor, grad: Tensor, weight: Tensor, lr: Tensor, state: list[Tensor], hyper: list[float]) -> None:
    """``torch.optim.SGD`` without momentum."""
    _subtract(weight, rows, lr * grad)


def adagrad(rows: Tensor, grad: Tensor, weight: Tensor, lr: Tensor, state: list[Tensor], hyper: list[float]) -> None:
    """``torch.optim.Adagrad``."""
    total, step = state
    lr_decay, eps = hyper
    squares = total[rows] + grad**2
    total[rows] = squares
    _subtract(weight, rows, lr / (1 + step.double() * lr_decay) * grad / (squares.sqrt() + eps))
    step += 1


def rowwise_adagrad(
    rows: Tensor, grad: Tensor, weight: Tensor, lr: Tensor, state: list[Tensor], hyper: list[float]
) -> None:
    """Adagrad with one number per row of a table: the sum of the mean of its squared gradient."""
    total, step, extents = state
    lr_decay, eps = hyper
    base, pitch = extents[torch.searchsorted(extents[:, 0].contiguous(), rows, right=True) - 1].unbind(1)
    _, place = torch.unique(rows - (rows - base) % pitch, return_inverse=True)  # the weight's rows of a table's row
    mean = grad.new_zeros(len(rows)).index_add(0, place, (grad**2).mean(1) / pitch)[place]
    squares = total[rows] + mean
    total[rows] = squares
    _subtract(weight, rows, lr / (1 + step.double() * lr_decay) * grad / (squares.sqrt() + eps)[:, None])
    step += 1


def adam(rows: Tensor, grad: Tensor, weight: Tensor, lr: Tensor, state: list[Tensor], hyper: list[float]) -> None:
    """``torch.optim.Adam`` on the dense gradient, which is zero in all other rows; what they miss is owed."""
    *averages, last, step, lrs, moments = state
    amsgrad = len(averages) == 3
    beta1, beta2, eps, *_ = hyper
    catch_up(torch.cat([rows, _next_in_turn(weight, step, lrs)]), weight, state, hyper)
    exp_avg, root = _averaged(rows, grad, averages, beta1, beta2)
    t = (step + 1).double()
    denominator = root / (1 - beta2**t).sqrt() + eps
    _subtract(weight, rows, lr / (1 - beta1**t) * exp_avg / denominator)
    replay.advance_(lr, (step, lrs, moments), hyper, amsgrad)
    last[rows] = step.to(last.dtype)


def lazy_adam(rows: Tensor, grad: Tensor, weight: Tensor, lr: Tensor, state: list[Tensor], hyper: list[float]) -> None:
    """``torch.optim.SparseAdam``: a row moves, and its averages decay, only when a gradient reaches it."""
    *averages, step = state
    beta1, beta2, eps = hyper
    step += 1
    exp_avg, root = _averaged(rows, grad, averages, beta1, beta2)
    t = step.double()
    _subtract(weight, rows, lr * (1 - beta2**t).sqrt() / (1 - beta1**t) * exp_avg / (root + eps))


RULES: dict[str, Rule] = {
    "sgd": sgd,
    "adagrad": adagrad,
    "rowwise_adagrad": rowwise_adagrad,
    "adam": adam,
    "amsgrad": adam,
    "lazy_adam": lazy_adam,
    "lazy_amsgrad": lazy_adam,
}
OWING = ("adam", "amsgrad")  # the rules by which rows that no gradient reaches move too


def catch_up(rows: Tensor | None, weight: Tensor, state: list[Tensor], hyper: list[float]) -> None:
    """Take the steps that ``rows`` missed, repeated or not; of every row if None."""
    if rows is None:
        for chunk in torch.arange(len(weight), device=weight.device).split(CHUNK):
            catch_up(chunk, weight, state, hyper)
        return
    *averages, last, step, lrs, moments = state
    beta1, beta2, *_ = hyper
    since = last[rows]
    behind = (since > 0) & (since < step)  # 0: no gradient has reached this row
    rows, since = rows[behind], since[behind].long()
    if not len(rows):
        return
    exp_avg, root = averages[0][rows], averages[-1][rows].sqrt()
    _subtract(weight, rows, exp_avg * replay.missed(root, since, (step, lrs, moments), hyper, len(averages) == 3))
    gap = (step - since).double()[:, None]
    averages[0][rows] = (exp_avg * beta1**gap).to(exp_avg.dtype)
    averages[1][rows] = (averages[1][rows] * beta2**gap).to(exp_avg.dtype)
    last[rows] = step.to(last.dtype)


def _next_in_turn(weight: Tensor, step: Tensor, lrs: Tensor) -> Tensor:
    """A few rows whose turn it is, touched or not, so that none falls behind further than ``lrs`` remembers."""
    count = -(-2 * len(weight) // len(lrs))
    return (step * count + torch.arange(count, device=weight.device)) % len(weight)


def _averaged(rows: Tensor, grad: Tensor, averages: list[Tensor], beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    """Enter ``grad`` into the averages; the first one, and the root of the second, or of its maximum."""
    exp_avg = averages[0][rows].lerp(grad, 1 - beta1)
    exp_avg_sq = averages[1][rows] * beta2 + grad * grad * (1 - beta2)
    averages[0][rows], averages[1][rows] = exp_avg, exp_avg_sq
    if len(averages) == 3:
        exp_avg_sq = torch.maximum(averages[2][rows], exp_avg_sq)
        averages[2][rows] = exp_avg_sq
    return exp_avg, exp_avg_sq.sqrt()


def _subtract(weight: Tensor, rows: Tensor, change: Tensor) -> None:
    weight[rows] = (weight[rows].to(accumulator(weight)) - change).to(weight.dtype)
