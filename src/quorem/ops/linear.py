"""Steps of SGD with momentum or weight decay that a row missed: products of 2 x 2 matrices. The truth.

Without a gradient, a step changes a row ``w`` and its momentum buffer ``b``, each column alike, to

    b' = momentum * b + weight_decay * w
    w' = w - lr * b'                                            or, for Nesterov's momentum,
    w' = w - lr * (weight_decay * w + momentum * b')

which is linear: ``(w', b') = M_t (w, b)``, where the matrix depends on the step alone. What a row missed is the product
of the matrices of the steps it missed. ``state.products`` has the products of all aligned runs of 1, 2, 4, ... steps
within the last H, so that a row multiplies about 2 log2(H) of them at most. Without momentum ``w`` is all there is.
"""

import torch
from torch import Tensor

from .rows import accumulator
from .state import HISTORY, MomentumSGDConstants, MomentumSGDState


def empty_products(device: torch.device) -> Tensor:
    """``products`` before the first step."""
    return torch.zeros(2 * HISTORY - 2, 2, 2, dtype=torch.float64, device=device)


def history_of(state: MomentumSGDState) -> int:
    """H."""
    return len(state.products) // 2 + 1


def advance_(lr: Tensor, state: MomentumSGDState, constants: MomentumSGDConstants) -> None:
    """Count one more step, taken at ``lr``."""
    level = torch.arange(_levels(state), device=state.step.device)
    run = _run(level, state.step, state)
    begins = (state.step & ((1 << level) - 1)) == 0  # the run of this level has no step yet
    identity = torch.eye(2, dtype=torch.float64, device=state.step.device)
    before = torch.where(begins[:, None, None], identity, state.products[run])
    state.products[run] = _matrix(lr.double(), constants) @ before
    state.step.add_(1)


def missed_change_(rows: Tensor, since: Tensor, stored: Tensor, state: MomentumSGDState) -> Tensor:
    """What the steps after ``since`` ``[N]`` subtract from ``rows`` ``[N]``; the rows' buffers take these steps."""
    steps, inverse = since.unique(return_inverse=True)
    product = missed(steps, state)
    product[:, 0, 0] -= 1  # the change of the row, not the row
    product = product[inverse].to(accumulator(stored))[..., None]  # [N, 2, 2, 1]
    row = stored[rows].to(accumulator(stored))
    change = product[:, 0, 0] * row
    if state.momentum_buffer is not None:
        buffer = state.momentum_buffer[rows]
        change += product[:, 0, 1] * buffer
        state.momentum_buffer[rows] = product[:, 1, 0] * row + product[:, 1, 1] * buffer
    return -change


def missed(since: Tensor, state: MomentumSGDState) -> Tensor:
    """The product ``[N, 2, 2]`` of the matrices of the steps after ``since`` ``[N]``."""
    total = torch.eye(2, dtype=torch.float64, device=since.device).repeat(len(since), 1, 1)
    first, levels = since.clone(), range(_levels(state))
    # First to the next start of a longer run, as long as it is not past the present step; then on by ever shorter runs.
    for level, aligning in [*((k, True) for k in levels), *((k, False) for k in reversed(levels))]:
        length = 1 << level
        takes = first + length <= state.step
        if aligning:
            takes &= (first & length) != 0
        if takes.any():
            run = _run(torch.tensor(level, device=since.device), first[takes], state)
            total[takes] = state.products[run] @ total[takes]
            first += length * takes
    return total


def _matrix(lr: Tensor, constants: MomentumSGDConstants) -> Tensor:
    """What a step without a gradient does to a row and its buffer, ``[2, 2]``."""
    momentum, decay, nesterov = constants
    buffer = torch.tensor([decay, momentum], dtype=torch.float64, device=lr.device)
    row = torch.tensor([1.0, 0.0], dtype=torch.float64, device=lr.device)
    direction = momentum * buffer + decay * row if nesterov else buffer
    return torch.stack([row - lr * direction, buffer])


def _levels(state: MomentumSGDState) -> int:
    return history_of(state).bit_length() - 1


def _run(level: Tensor, step: Tensor, state: MomentumSGDState) -> Tensor:
    """The position in ``state.products`` of the run of ``1 << level`` steps to which ``step + 1`` belongs."""
    history = history_of(state)
    return 2 * history - ((2 * history) >> level) + (step >> level) % (history >> level)
