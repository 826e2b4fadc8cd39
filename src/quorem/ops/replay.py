"""What a row of Adam or AMSGrad missed while no gradient reached it, added up when it is next needed.

A dense step moves every row by its decaying momentum. After a row's last gradient, at step ``since``, the j-th step
without one subtracts ``exp_avg * a_j * d_j / (root + eps * d_j)``, where

    a_j = lr_t beta1^j / (1 - beta1^t)                      t = since + j
    d_j = sqrt(1 - beta2^t)                                 root = sqrt(max_exp_avg_sq)         AMSGrad
    d_j = sqrt(1 - beta2^t) beta2^(-j/2)                    root = sqrt(exp_avg_sq)             Adam

so all that depends on the column is ``root``. ``summed`` adds the terms one by one: the truth, and the rule for
float64. ``closed`` puts two nodes in their place (Gauss's, from four moments of the weights a_j over the d_j, kept per
step): the rule for float32, from the step on where it is exact to rounding. docs/optimizers.md derives both.

``times`` stands for (step, lrs, moments): the step reached, an int64 scalar; the learning rate of each of the last H
steps, float64 ``[H]``, that of step t at t % H; and for each possible ``since`` four moments and the two nodes that
have them, float64 ``[H, 8]``, or ``[0, 8]`` where ``closed`` is never the rule. ``hyper`` stands for (beta1, beta2,
eps, window, settled): how many missed steps count, and from which ``since`` on ``closed`` is the rule.
"""

import math

import torch
from torch import Tensor

HISTORY = 2**16  # H: steps that are remembered, and so the most that a row may fall behind
BLOCK = 32  # terms added at a time
NEVER = 2.0**31  # a step that is not reached
SPREAD = 0.015  # of the d_j, relative, below which two nodes err less than float32 rounds

Times = tuple[Tensor, Tensor, Tensor]


def constants(beta1: float, beta2: float, eps: float, dtype: torch.dtype, amsgrad: bool) -> list[float]:
    """``hyper``: the betas and eps, how many missed steps count, and from which step on ``closed`` is the rule.

    Raises:
        ValueError: if the missed steps do not die out: Adam needs ``beta1**2 < beta2``.
    """
    if not amsgrad and beta1 > 0 and beta1**2 >= beta2:
        raise ValueError(f"betas ({beta1}, {beta2}) must have beta1**2 < beta2: else the steps a row misses grow")
    ratio = beta1 if amsgrad or beta1 == 0 else beta1 / math.sqrt(beta2)
    least = 1e-18 if dtype == torch.float64 else 1e-10
    window = math.ceil(math.log(least) / math.log(ratio)) if ratio else 0
    return [beta1, beta2, eps, float(window), NEVER if dtype == torch.float64 else _settled(beta1, beta2, amsgrad)]


def _settled(beta1: float, beta2: float, amsgrad: bool) -> float:
    """The first step from which on the d_j of a window spread less than SPREAD."""
    if beta1 == 0:
        return 0.0
    if beta2 == 0:
        return NEVER
    rate = -math.log(beta2)
    tolerable = 2 * SPREAD * (1 - beta1) / math.sqrt(beta1) / rate  # of beta2^t / (1 - beta2^t), or 1 / (1 - beta2^t)
    if amsgrad:
        return math.ceil(math.log1p(1 / tolerable) / rate)
    return NEVER if tolerable <= 1 else math.ceil(-math.log1p(-1 / tolerable) / rate)


def empty_times(step: Tensor, hyper: list[float], dtype: torch.dtype) -> Times:
    """Times for rows that have missed nothing up to ``step``."""
    length = max(HISTORY, 2 * int(hyper[3]))
    lrs = torch.zeros(length, dtype=torch.float64, device=step.device)
    return step, lrs, lrs.new_zeros(0 if dtype == torch.float64 or not hyper[3] else length, 8)


def advance_(lr: Tensor, times: Times, hyper: list[float], amsgrad: bool) -> None:
    """Enter one more step, taken at ``lr``, into ``times``."""
    step, lrs, moments = times
    step += 1
    lrs[step % len(lrs)] = lr.double()
    if len(moments):
        j = torch.arange(1, int(hyper[3]) + 1, device=step.device)
        entry, since = (step - j) % len(moments), (step - j).clamp(min=0)
        a, d = _terms(j, since, lrs, hyper, amsgrad, at=step)
        u = d / _scale(since, hyper, amsgrad) - 1
        grown = moments[entry, :4] + torch.stack([a, a * u, a * u**2, a * u**3], 1)
        grown = torch.cat([grown, nodes(grown, since, hyper, amsgrad)], 1)
        moments[entry] = torch.where((step >= j)[:, None], grown, 0)
        moments[step % len(moments)] = 0


def missed(root: Tensor, since: Tensor, times: Times, hyper: list[float], amsgrad: bool) -> Tensor:
    """Sum ``[N, W]`` of ``a_j d_j / (root + eps d_j)`` over the steps after ``since`` ``[N]``."""
    if not len(times[2]):
        return summed(root, since, times, hyper, amsgrad)
    total = closed(root, since, times, hyper)
    early = since < hyper[4]
    if early.any():
        total[early] = summed(root[early], since[early], times, hyper, amsgrad)
    return total


def summed(root: Tensor, since: Tensor, times: Times, hyper: list[float], amsgrad: bool) -> Tensor:
    """``missed``, term by term."""
    step, lrs, _ = times
    gap = (step - since).clamp(max=int(hyper[3]))
    total = torch.zeros_like(root)
    for first in range(1, int(gap.max()) + 1, BLOCK):
        behind = gap >= first
        j = torch.arange(first, first + BLOCK, device=root.device)
        a, d = _terms(j, since[behind, None], lrs, hyper, amsgrad)
        a = torch.where(j <= gap[behind, None], a, 0)
        a, d = a.to(root.dtype)[..., None], d.to(root.dtype)[..., None]
        total[behind] += (a * d / (root[behind, None] + hyper[2] * d)).sum(1)
    return total


def closed(root: Tensor, since: Tensor, times: Times, hyper: list[float]) -> Tensor:
    """``missed``, by two nodes with the first four moments of the terms."""
    _, _, moments = times
    a, d, b, e = moments[since % len(moments), 4:].to(root.dtype)[..., None].unbind(1)
    return a * d / (root + hyper[2] * d) + b * e / (root + hyper[2] * e)


def nodes(moments: Tensor, since: Tensor, hyper: list[float], amsgrad: bool) -> Tensor:
    """Two terms ``(a, d)`` that have the ``moments`` ``[N, 4]`` of the terms after ``since``; ``[N, 4]``."""
    total, *rest = moments.unbind(1)
    mean, second, third = (torch.where(total > 0, moment / total, 0) for moment in rest)
    variance = (second - mean**2).clamp(min=0)
    apart = variance > 1e-14  # else rounding is all there is to see, and one node is exact
    skew = torch.where(apart, (third - 3 * mean * second + 2 * mean**3) / (2 * variance), 0)
    reach = torch.where(apart, (variance + skew**2).sqrt(), 1)
    scale = _scale(since, hyper, amsgrad)
    both = []
    for sign in (1, -1):
        both.append(total * (reach - sign * skew) / (2 * reach))
        both.append(scale * (1 + mean + torch.where(apart, skew + sign * reach, 0)))
    return torch.stack(both, 1)


def _terms(
    j: Tensor, since: Tensor, lrs: Tensor, hyper: list[float], amsgrad: bool, at: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """a_j and d_j in float64; ``at`` is the step, where it is not ``since + j``."""
    beta1, beta2, *_ = hyper
    t = since + j if at is None else at
    a = lrs[t % len(lrs)] * beta1 ** j.double() / (1 - beta1 ** t.double())
    d = (1 - beta2 ** t.double()).sqrt()
    return a, d if amsgrad else d * beta2 ** (-0.5 * j.double())


def _scale(since: Tensor, hyper: list[float], amsgrad: bool) -> Tensor:
    """d_1, of which the moments take the relative distance of the others."""
    d = (1 - hyper[1] ** (since.double() + 1)).sqrt()
    return d if amsgrad else d * hyper[1] ** -0.5
