"""Updates and catch-ups on a CPU: what ``ops.update`` registers where Numba is present."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..reference import accumulator
from . import backward, catch_up, update
from .arguments import KINDS, Batch, Integers, bag_batch, layout_of, lookup_batch, table_of
from .launch import sum_by_row
from .threads import spread, threads_for

NO_LAYOUT = (0, 0, 0, 0, 0)
Floats = tuple[float, ...]


def lookup_update_(
    grad: Tensor, ids: Tensor, weight: Tensor, lr: Tensor, state: list[Tensor], *integers: Tensor, **rule: Any
) -> Any:
    """``ops.update``'s op of this name."""
    return _update(grad, lookup_batch(ids, weight, integers, grad), weight, lr, state, integers, **rule)


def bag_update_(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    weight: Tensor,
    lr: Tensor,
    state: list[Tensor],
    *integers: Tensor,
    mean: bool,
    **rule: Any,
) -> Any:
    """``ops.update``'s op of this name."""
    batch = bag_batch(ids, offsets, sample_weights, weight, integers, mean, grad)
    return _update(grad, batch, weight, lr, state, integers, **rule)


def rows_update_(
    rows: Tensor,
    values: Tensor,
    weight: Tensor,
    lr: Tensor,
    state: list[Tensor],
    *,
    rule: str,
    hyper: list[float],
    clip_value: float | None = None,
    loss_scale: Tensor | None = None,
) -> Any:
    """``ops.update``'s op of this name."""
    wide = rule == "rowwise_adagrad" and _widest(state) > 1  # rows of one table's row need not come together
    if wide or weight.dtype not in KINDS or not _in_place(weight, state, rule):
        return NotImplemented
    rows = _checked(rows, weight)
    values = values.reshape(-1, weight.shape[1]).to(accumulator(weight)).contiguous()
    apply, finish = _rule(weight, lr, state, rule, hyper, _clean(clip_value, loss_scale), NO_LAYOUT)
    n, (number_rows, width) = len(rows), weight.shape
    threads = threads_for(n * width)
    fixed = (KINDS[weight.dtype], rows.data_ptr(), values.data_ptr(), n, number_rows)
    step = backward.area_bytes(n, 1, width, values.itemsize)

    def share(residue: int) -> None:
        scratch = torch.empty(step + 64, dtype=torch.uint8)
        areas = (-(-scratch.data_ptr() // 64) * 64, step, 1, 1, width)
        backward.sum_rows(*fixed, areas, residue, threads)
        apply(areas, 0)
        scratch.data_ptr()  # alive until here

    spread(lambda: share, [(residue,) for residue in range(threads)], threads)
    finish()
    return None


def lookup_catch_up_(
    ids: Tensor, weight: Tensor, state: list[Tensor], *integers: Tensor, rule: str, hyper: list[float]
) -> Any:
    """``ops.update``'s op of this name."""
    return _catch_up_slots(lookup_batch(ids, weight, integers), weight, state, integers, rule, hyper)


def bag_catch_up_(
    ids: Tensor, offsets: Tensor, weight: Tensor, state: list[Tensor], *integers: Tensor, rule: str, hyper: list[float]
) -> Any:
    """``ops.update``'s op of this name."""
    batch = bag_batch(ids, offsets, None, weight, integers, False)
    return _catch_up_slots(batch, weight, state, integers, rule, hyper)


def rows_catch_up_(rows: Tensor | None, weight: Tensor, state: list[Tensor], *, rule: str, hyper: list[float]) -> Any:
    """``ops.update``'s op of this name."""
    if weight.dtype not in KINDS or not _in_place(weight, state, rule):
        return NotImplemented
    averages, times = _adam_state(state)
    number_rows, width = weight.shape
    fixed = (averages, times, tuple(hyper))
    if rows is None:
        threads = threads_for(weight.numel())
        step = -(-number_rows // (4 * threads))
        tasks = [(at, min(at + step, number_rows), number_rows, 0, 1) for at in range(0, number_rows, step)]
    else:
        rows = _checked(rows, weight)
        threads = threads_for(len(rows) * width)
        tasks = [(0, len(rows), number_rows, residue, threads) for residue in range(threads)]
    address = 0 if rows is None else rows.data_ptr()
    run = partial(catch_up.plain, KINDS[weight.dtype], table_of(weight), address, *fixed)
    spread(lambda: run, tasks, threads)
    return None


def _catch_up_slots(
    batch: Batch | None,
    weight: Tensor,
    state: list[Tensor],
    integers: tuple[Tensor, ...],
    rule: str,
    hyper: list[float],
) -> Any:
    if batch is None or not _in_place(weight, state, rule):
        return NotImplemented
    averages, times = _adam_state(state)
    slots, k, _ = integers[1].shape
    starts, _, _, size = batch.bags
    fixed = (table_of(weight), batch.source, layout_of(integers), starts, size, averages, times, tuple(hyper))
    threads = threads_for(batch.longest * slots * k * weight.shape[1] // 4)
    shares = -(-2 * threads // slots) if threads > 1 and slots < 2 * threads else 1
    step = slots if threads == 1 else max(1, slots // (4 * threads))
    tasks = [
        (first, min(first + step, slots), residue, shares)
        for first in range(0, slots, step)
        for residue in range(shares)
    ]
    spread(lambda: partial(catch_up.slots, KINDS[weight.dtype], *fixed), tasks, threads)
    return None


def _update(
    grad: Tensor,
    batch: Batch | None,
    weight: Tensor,
    lr: Tensor,
    state: list[Tensor],
    integers: tuple[Tensor, ...],
    *,
    rule: str,
    hyper: list[float],
    clip_value: float | None = None,
    loss_scale: Tensor | None = None,
) -> Any:
    if batch is None or not _in_place(weight, state, rule):
        return NotImplemented
    apply, finish = _rule(weight, lr, state, rule, hyper, _clean(clip_value, loss_scale), layout_of(integers))
    # A table's row that is several rows of the weight has one accumulator, so its slots are needed at once.
    together = rule == "rowwise_adagrad" and _widest(state) > 1
    sum_by_row(grad, weight, integers, batch, apply, together)
    finish()
    return None


def _rule(
    weight: Tensor, lr: Tensor, state: list[Tensor], rule: str, hyper: list[float], clean: Floats, layout: Integers
) -> tuple[Callable[[Integers, int], None], Callable[[], None]]:
    """What a rule does to areas of summed gradients, and what it does at the end of the step."""
    kind, target, rate = KINDS[weight.dtype], weight.data_ptr(), float(lr)
    if rule == "sgd":
        return lambda areas, first: update.sgd(kind, areas, clean, target, rate), lambda: None
    if rule in ("adagrad", "rowwise_adagrad"):
        squares, step = state[0].data_ptr(), state[1]
        fixed = (clean, target, squares, rate / (1 + int(step) * hyper[0]), hyper[1])

        def finish() -> None:
            update.count(step.data_ptr())

        if rule == "adagrad":
            return lambda areas, first: update.adagrad(kind, areas, *fixed), finish
        return lambda areas, first: update.rowwise_adagrad(kind, areas, *fixed, layout, first), finish
    return _adam(weight, rate, state, rule, hyper, clean)


def _adam(
    weight: Tensor, lr: float, state: list[Tensor], rule: str, hyper: list[float], clean: Floats
) -> tuple[Callable[[Integers, int], None], Callable[[], None]]:
    kind, target = KINDS[weight.dtype], weight.data_ptr()
    lazy = rule.startswith("lazy")
    averages, times = _lazy_state(state) if lazy else _adam_state(state)
    beta1, beta2, eps = hyper[:3]
    t = times[0] + 1
    rate, divisor = lr / (1 - beta1**t), math.sqrt(1 - beta2**t)
    if lazy:  # SparseAdam adds eps before the correction, Adam after
        rate, divisor = rate * divisor, 1.0
    factors = (1 - beta1, beta2, 1 - beta2, rate, divisor, eps)
    constants = (*hyper, *[0.0] * (5 - len(hyper)))
    step = state[-1] if lazy else state[-3]

    def apply(areas: Integers, first: int) -> None:
        update.adam(kind, areas, clean, target, averages, factors, times, constants)

    def finish() -> None:
        if lazy:
            update.count(step.data_ptr())
            return
        number_rows, remembered = len(weight), times[2]
        count = -(-2 * number_rows // remembered)
        first = times[0] * count
        catch_up.plain(kind, table_of(weight), 0, averages, times, constants, first, first + count, number_rows, 0, 1)
        catch_up.advance(step.data_ptr(), lr, times, constants, rule == "amsgrad")

    return apply, finish


def _in_place(weight: Tensor, state: list[Tensor], rule: str) -> bool:
    """Whether weight and state can be updated where they lie."""
    averages = state[: {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 1, "adam": -4, "amsgrad": -4}.get(rule, -1)]
    shape = weight.shape[:1] if rule == "rowwise_adagrad" else weight.shape
    right = all(average.dtype == accumulator(weight) and average.shape == shape for average in averages)
    return right and weight.is_contiguous() and all(t.is_contiguous() for t in state)


def _checked(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows`` ``[N]`` as the kernels take them, or IndexError."""
    rows = rows.flatten().long().contiguous()
    if len(rows) and int(rows.max()) >= len(weight):
        raise IndexError(f"rows ({int(rows.max())}) must be below the number of rows ({len(weight)})")
    return rows


def _widest(state: list[Tensor]) -> int:
    """The most rows of the weight that one row of a table takes, from the state of rowwise_adagrad."""
    return int(state[2][:, 1].max())


def _clean(clip_value: float | None, loss_scale: Tensor | None) -> Floats:
    return 0.0 if loss_scale is None else float(loss_scale), math.inf if clip_value is None else float(clip_value)


def _lazy_state(state: list[Tensor]) -> tuple[Integers, Integers]:
    *averages, step = state
    highest = averages[2].data_ptr() if len(averages) == 3 else 0
    return (averages[0].data_ptr(), averages[1].data_ptr(), highest, 0), (int(step), 0, 1, 0)


def _adam_state(state: list[Tensor]) -> tuple[Integers, Integers]:
    """``state`` and ``times`` as ``catch_up`` describes them."""
    *averages, last, step, lrs, moments = state
    highest = averages[2].data_ptr() if len(averages) == 3 else 0
    remembered = moments.data_ptr() if len(moments) else 0
    times = (int(step), lrs.data_ptr(), len(lrs), remembered)
    return (averages[0].data_ptr(), averages[1].data_ptr(), highest, last.data_ptr()), times
