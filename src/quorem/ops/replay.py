"""Steps of Adam, AMSGrad or AdamW that a row missed: they are taken together when the row is next needed. The truth.

A dense step moves every row, also one without a gradient, along its decaying momentum. Let ``since`` be the step of a
row's last gradient. The j-th step after it, which is step ``t = since + j``, subtracts
``exp_avg * a_j * d_j / (root + eps * d_j)``, where

    a_j = lr_t beta1^j / (1 - beta1^t)
    d_j = sqrt(1 - beta2^t)                     root = sqrt(max_exp_avg_sq)     AMSGrad
    d_j = sqrt(1 - beta2^t) beta2^(-j/2)        root = sqrt(exp_avg_sq)         Adam, AdamW

There are two ways to add these terms up:

``summed``  one by one: for float64, and for rows whose last gradient came before step ``constants.settled``.
``closed``  two terms in place of all, with the same first four moments (Gauss's quadrature): for float32 afterwards,
            where this is exact to rounding. ``state.moments`` has the moments and the two terms for each ``since``.

AdamW also multiplies every row by ``1 - lr_t * weight_decay`` before each step. Let ``P_t`` be the product of these
factors up to step t; ``state.decays`` has its logarithm. A row becomes ``P_now / P_since`` times what Adam would leave
of it if each a_j were divided by ``P_t / P_since``.

A row may lag behind by at most H steps, the length of ``state.lrs``. So each step first brings some rows up to date,
touched or not: ``n = ceil(2 R / H)`` rows from ``n * step`` on, modulo R. docs/appendix/optimizers.md derives all this.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from .layout import Layout
from .rounding import Rounding
from .rows import IdBatch, batch_reads, rows_read, subtract_
from .state import HISTORY, MOMENT_COLUMNS, NODE_COLUMN, RULES, AdamConstants, AdamState, RowRule

TERMS_AT_ONCE = 32  # terms added at a time
CHUNK = 2**16  # rows brought up to date at a time
NEVER = 2.0**31  # a step that is not reached
SPREAD_TOLERANCE = 0.015  # relative spread of the d_j below which two nodes err less than float32 rounds


def catch_up_(batch: IdBatch, stored: Tensor, layout: Layout, rule: RowRule) -> None:
    """Bring the rows that a lookup will read up to date; rows that are already do not change."""
    rows_catch_up_(rows_read(batch_reads(batch, layout)[0]), stored, rule)


def rows_catch_up_(rows: Tensor | None, stored: Tensor, rule: RowRule) -> None:
    """Take the steps that ``rows`` missed, repeated or not; every row if None. Rows below 0 are left out."""
    if rows is None:
        for chunk in torch.arange(len(stored), device=stored.device).split(CHUNK):
            rows_catch_up_(chunk, stored, rule)
        return
    state, constants, seed = rule.state, rule.constants, rule.rounding_seed
    rows = rows[rows >= 0]
    since = state.last[rows]
    behind = since < state.step
    if state.decays is None:
        behind &= since > 0  # 0: no gradient has reached this row, so it does not move
    rows, since = rows[behind], since[behind].long()
    if not len(rows):
        return
    rounding = None if seed is None else Rounding(~seed, state.step)  # other bits than the step's own
    change = _missed_change(rows, since, stored, state, constants)
    gap = (state.step - since).double()[:, None]
    for average, factor in ((state.exp_avg, constants.beta1), (state.exp_avg_sq, constants.beta2)):
        average[rows] = (average[rows] * factor**gap).to(average.dtype)
    subtract_(stored, rows, change, rounding)
    state.last[rows] = state.step.to(state.last.dtype)


def _missed_change(rows: Tensor, since: Tensor, stored: Tensor, state: AdamState, constants: AdamConstants) -> Tensor:
    """What the steps after ``since`` subtract from ``rows``."""
    highest = state.exp_avg_sq if state.max_exp_avg_sq is None else state.max_exp_avg_sq
    exp_avg, root = state.exp_avg[rows], highest[rows].sqrt()
    change = exp_avg * missed(root, since, state, constants)
    if state.decays is not None:
        log_decay = (_log_decay(state.step, state) - _log_decay(since, state))[:, None]
        row = stored[rows].to(exp_avg.dtype)
        change = (log_decay.exp() * change - torch.expm1(log_decay) * row).to(exp_avg.dtype)
    return change


def rows_in_turn(stored: Tensor, state: AdamState) -> Tensor:
    """The next few rows in turn, touched or not, so that no row lags behind further than the history goes back."""
    count = -(-2 * len(stored) // len(state.lrs))
    return (state.step * count + torch.arange(count, device=stored.device)) % len(stored)


@lru_cache(maxsize=64)  # called in every step
def adam_constants(beta1: float, beta2: float, eps: float, dtype: torch.dtype, amsgrad: bool) -> AdamConstants:
    """The constants of ``adam`` and ``amsgrad`` for rows of ``dtype``, if the missed steps die out."""
    if not amsgrad and beta1 > 0 and beta1**2 >= beta2:
        raise ValueError(f"betas ({beta1}, {beta2}) must have beta1**2 < beta2: else the steps a row misses grow")
    ratio = beta1 if amsgrad or beta1 == 0 else beta1 / math.sqrt(beta2)
    least = 1e-18 if dtype == torch.float64 else 1e-10
    window = math.ceil(math.log(least) / math.log(ratio)) if ratio else 0
    if not amsgrad and ratio:  # d_j must not overflow; where it is that large, a_j is below its inverse
        largest = 1e150 if dtype == torch.float64 else 1e30
        window = min(window, math.floor(-2 * math.log(largest) / math.log(beta2)))
    settled = NEVER if dtype == torch.float64 else _settled(beta1, beta2, amsgrad)
    return AdamConstants(beta1, beta2, eps, float(window), settled)


def _settled(beta1: float, beta2: float, amsgrad: bool) -> float:
    """The first step from which on the relative spread of the d_j of a window is below SPREAD_TOLERANCE."""
    if beta1 == 0:
        return 0.0
    if beta2 == 0:
        return NEVER
    rate = -math.log(beta2)
    # The tolerable beta2^t / (1 - beta2^t) of AMSGrad, or 1 / (1 - beta2^t) of Adam.
    tolerable = 2 * SPREAD_TOLERANCE * (1 - beta1) / math.sqrt(beta1) / rate
    if amsgrad:
        return math.ceil(math.log1p(1 / tolerable) / rate)
    return NEVER if tolerable <= 1 else math.ceil(-math.log1p(-1 / tolerable) / rate)


def empty_history(device: torch.device, constants: AdamConstants, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``lrs`` and ``moments`` for rows of ``dtype`` that have missed nothing."""
    length = max(HISTORY, 2 * int(constants.window))
    lrs = torch.zeros(length, dtype=torch.float64, device=device)
    return lrs, lrs.new_zeros(0 if dtype == torch.float64 or not constants.window else length, MOMENT_COLUMNS)


def history_bytes(optimizer: str, dtype: torch.dtype) -> int:
    """Bytes of an optimizer's history of steps for rows of ``dtype``, with Adam's default betas."""
    rule = RULES[optimizer]
    constants = adam_constants(0.9, 0.999, 1e-8, dtype, rule.amsgrad)
    lrs, moments = empty_history(torch.device("meta"), constants, dtype)
    return lrs.nbytes * (2 if rule.decays else 1) + moments.nbytes


def advance_(lr: Tensor, state: AdamState, constants: AdamConstants) -> None:
    """Count one more step, taken at ``lr``."""
    step, lrs, moments = state.step, state.lrs, state.moments
    amsgrad = state.max_exp_avg_sq is not None
    step += 1
    lrs[step % len(lrs)] = lr.double()
    if state.decays is not None:
        decay = torch.log1p(-lr.double() * constants.weight_decay)
        state.decays[step % len(lrs)] = _log_decay(step - 1, state) + decay
    if len(moments):
        j = torch.arange(1, int(constants.window) + 1, device=step.device)
        entry, since = (step - j) % len(moments), (step - j).clamp(min=0)
        a, d = _terms(j, step.expand(len(j)), state, constants, amsgrad)
        u = d / _scale(since, constants, amsgrad) - 1
        grown = moments[entry, :NODE_COLUMN] + torch.stack([a, a * u, a * u**2, a * u**3], 1)
        grown = torch.cat([grown, nodes(grown, since, constants, amsgrad)], 1)
        moments[entry] = torch.where((step >= j)[:, None], grown, 0)
        moments[step % len(moments)] = 0


def missed(root: Tensor, since: Tensor, state: AdamState, constants: AdamConstants) -> Tensor:
    """Sum ``[N, W]`` of ``a_j d_j / (root + eps d_j)`` over the steps after ``since`` ``[N]``."""
    if not len(state.moments):
        return summed(root, since, state, constants)
    total = closed(root, since, state, constants)
    early = (since > 0) & (since < constants.settled)
    if early.any():
        total[early] = summed(root[early], since[early], state, constants)
    return total


def summed(root: Tensor, since: Tensor, state: AdamState, constants: AdamConstants) -> Tensor:
    """``missed``, term by term."""
    amsgrad = state.max_exp_avg_sq is not None
    gap = (state.step - since).clamp(max=int(constants.window))
    gap = torch.where(since > 0, gap, 0)  # before its first gradient a row has no momentum
    total = torch.zeros_like(root)
    for first in range(1, int(gap.max()) + 1, TERMS_AT_ONCE):
        behind = gap >= first
        j = torch.arange(first, first + TERMS_AT_ONCE, device=root.device)
        a, d = _terms(j, since[behind, None] + j, state, constants, amsgrad)
        counts = j <= gap[behind, None]
        a, d = torch.where(counts, a, 0), torch.where(counts, d, 1)
        a, d = a.to(root.dtype)[..., None], d.to(root.dtype)[..., None]
        total[behind] += (a * d / (root[behind, None] + constants.eps * d)).sum(1)
    return total


def closed(root: Tensor, since: Tensor, state: AdamState, constants: AdamConstants) -> Tensor:
    """``missed``, by two nodes with the first four moments of the terms."""
    a, d, b, e = state.moments[since % len(state.moments), NODE_COLUMN:].to(root.dtype)[..., None].unbind(1)
    return a * d / (root + constants.eps * d) + b * e / (root + constants.eps * e)


def nodes(moments: Tensor, since: Tensor, constants: AdamConstants, amsgrad: bool) -> Tensor:
    """Two terms ``(a, d)`` that have the ``moments`` ``[N, 4]`` of the terms after ``since``; ``[N, 4]``."""
    total, *rest = moments.unbind(1)
    mean, second, third = (torch.where(total > 0, moment / total, 0) for moment in rest)
    variance = (second - mean**2).clamp(min=0)
    apart = variance > 1e-14  # else rounding is all there is to see, and one node is exact
    skew = torch.where(apart, (third - 3 * mean * second + 2 * mean**3) / (2 * variance), 0)
    reach = torch.where(apart, (variance + skew**2).sqrt(), 1)
    scale = _scale(since, constants, amsgrad)
    both = []
    for sign in (1, -1):
        both.append(total * (reach - sign * skew) / (2 * reach))
        both.append(scale * (1 + mean + torch.where(apart, skew + sign * reach, 0)))
    return torch.stack(both, 1)


def _terms(j: Tensor, t: Tensor, state: AdamState, constants: AdamConstants, amsgrad: bool) -> tuple[Tensor, Tensor]:
    """a_j and d_j in float64, of step ``t``."""
    beta1, beta2 = constants.beta1, constants.beta2
    a = state.lrs[t % len(state.lrs)] * beta1 ** j.double() / (1 - beta1 ** t.double())
    if state.decays is not None:
        a = a * (_log_decay(t - j, state) - _log_decay(t, state)).exp()
    d = (1 - beta2 ** t.double()).sqrt()
    return a, d if amsgrad else d * beta2 ** (-0.5 * j.double())


def _scale(since: Tensor, constants: AdamConstants, amsgrad: bool) -> Tensor:
    """d_1: the moments are those of ``d_j / d_1 - 1``."""
    d = (1 - constants.beta2 ** (since.double() + 1)).sqrt()
    return d if amsgrad else d * constants.beta2**-0.5


def _log_decay(t: Tensor, state: AdamState) -> Tensor:
    """The logarithm of P_t."""
    assert state.decays is not None
    return state.decays[t % len(state.decays)]
