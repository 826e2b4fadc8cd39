"""Catching up with missed steps on a CPU; and what the kernels take of the state of a rule."""

from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from ..layout import Layout
from ..rows import IdBatch, accumulator
from ..state import (
    MOMENT_COLUMNS,
    NARROW,
    AdagradState,
    AdamState,
    AdamWState,
    CatchUpOptions,
    RowWiseAdagradState,
    State,
)
from . import replay
from .launch import KINDS, kernel_input
from .replay import Averages, History
from .rounding import rounding_by
from .sharing import sharing_of
from .threads import run_tasks, threads_for

_DTYPES = {  # of state tensors; the others have the accumulator's
    "last": torch.int32,
    "step": torch.int64,
    "lrs": torch.float64,
    "moments": torch.float64,
    "extents": torch.int64,
}
Addresses = tuple[int, ...]


def catch_up_(
    batch: IdBatch, stored: Tensor, state: AdamState, layout: Layout, **options: Unpack[CatchUpOptions]
) -> None:
    """``ops.replay.catch_up_``."""
    inputs = kernel_input(IdBatch(batch.ids, batch.offsets), stored, layout)
    if inputs is None or not state_fits(stored, state):
        return NotImplemented
    slots, partitions, _ = layout.parts.shape
    run = partial(replay.catch_up_slots, KINDS[stored.dtype], inputs.source, *_lagging(state, options))
    with threads_for("catch up", inputs.longest * slots * partitions * stored.shape[1] // 4) as threads:
        if threads > 1 and sharing_of(layout).largest_group > 1:  # no two threads may move the same row
            shares, step = 2 * threads, slots
        else:
            shares = -(-2 * threads // slots) if threads > 1 else 1
            step = slots if threads == 1 else max(1, slots // (4 * threads))
        ranges = [(first, min(first + step, slots)) for first in range(0, slots, step)]
        tasks = [(first, last, share, shares) for first, last in ranges for share in range(shares)]
        run_tasks(lambda: run, tasks, threads)
    return None


def rows_catch_up_(rows: Tensor | None, stored: Tensor, state: AdamState, **options: Unpack[CatchUpOptions]) -> None:
    """``ops.replay.rows_catch_up_``."""
    if stored.dtype not in KINDS or not state_fits(stored, state):
        return NotImplemented
    num_rows, width = stored.shape
    rows = None if rows is None else checked_rows(rows, stored)
    fixed = (KINDS[stored.dtype], stored.data_ptr(), width, num_rows, 0 if rows is None else rows.data_ptr())
    run = partial(replay.catch_up_rows, *fixed, *_lagging(state, options))
    with threads_for("catch up rows", stored.numel() if rows is None else len(rows) * width) as threads:
        if rows is None:
            step = -(-num_rows // (4 * threads))
            tasks = [(first, min(first + step, num_rows), 0, 1) for first in range(0, num_rows, step)]
        else:
            tasks = [(0, len(rows), share, threads) for share in range(threads)]
        run_tasks(lambda: run, tasks, threads)
    return None


def _lagging(state: AdamState, options: CatchUpOptions) -> tuple[tuple[float, ...], ...]:
    """Averages, history, constants and rounding, as kernels take them."""
    rounding = missed_rounding(options.get("rounding_seed"), state)
    return averages_of(state), history_of(state), tuple(options["constants"]), rounding


def missed_rounding(seed: int | None, state: AdamState) -> Addresses:
    """How the missed steps of a row are rounded: with other bits than the step's own."""
    return rounding_by(None if seed is None else ~seed, int(state.step))


def averages_of(state: AdamState) -> Addresses:
    """``Averages`` of a state."""
    largest = 0 if state.max_exp_avg_sq is None else state.max_exp_avg_sq.data_ptr()
    averages = Averages(state.exp_avg.data_ptr(), state.exp_avg_sq.data_ptr(), largest, state.last.data_ptr())
    return tuple(averages)


def history_of(state: AdamState) -> Addresses:
    """``History`` of a state."""
    moments = state.moments.data_ptr() if len(state.moments) else 0
    return tuple(History(int(state.step), state.lrs.data_ptr(), len(state.lrs), moments))


def state_fits(stored: Tensor, state: State) -> bool:
    """Whether kernels can change ``stored`` and ``state`` in place: memory, dtypes and shapes are as expected."""
    if isinstance(state, AdamWState):
        return False
    rows, number = stored.shape[:1], accumulator(stored)
    for name, tensor in zip(state._fields, state, strict=True):
        if tensor is None:
            continue
        may_be_narrow = isinstance(state, AdagradState) and name == "sum" and number == torch.float32
        narrow = may_be_narrow and tensor.dtype in NARROW
        if (tensor.dtype != _DTYPES.get(name, number) and not narrow) or not tensor.is_contiguous():
            return False
        by_row = name == "last" or (name == "sum" and isinstance(state, RowWiseAdagradState))
        if (by_row or name not in _DTYPES) and tensor.shape != (rows if by_row else stored.shape):
            return False
    if isinstance(state, AdamState) and state.moments.shape not in [(n, MOMENT_COLUMNS) for n in (0, len(state.lrs))]:
        return False
    return stored.is_contiguous()


def checked_rows(rows: Tensor, stored: Tensor) -> Tensor:
    """``rows`` ``[N]`` as the kernels take them, or IndexError."""
    rows = rows.flatten().long().contiguous()
    if len(rows) and int(rows.max()) >= len(stored):
        raise IndexError(f"rows ({int(rows.max())}) must be below the number of rows ({len(stored)})")
    return rows
