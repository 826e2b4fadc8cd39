"""The update ops, each declared once: the gradient of a lookup, summed by row, then a rule of an optimizer, in place.

    lookup_update_(Tensor grad, Tensor ids, Tensor(a!) weight, Tensor lr, Tensor(b!)[] state, <integers>, *, <rule>)
    bag_update_(Tensor grad, Tensor ids, Tensor offsets, Tensor? sample_weights, Tensor(a!) weight, Tensor lr,
                Tensor(b!)[] state, <integers>, *, bool mean, <rule>)
    rows_update_(Tensor rows, Tensor values, Tensor(a!) weight, Tensor lr, Tensor(b!)[] state, *, <rule>)

        <integers>: Tensor slots, Tensor parts, Tensor maps, Tensor spans
        <rule>: str rule, float[] hyper, float? clip_value=None, Tensor? loss_scale=None

    lookup_catch_up_(Tensor ids, Tensor(a!) weight, Tensor(b!)[] state, <integers>, *, <rule>)
    bag_catch_up_(Tensor ids, Tensor offsets, Tensor(a!) weight, Tensor(b!)[] state, <integers>, *, <rule>)
    rows_catch_up_(Tensor? rows, Tensor(a!) weight, Tensor(b!)[] state, *, <rule>)

        <rule>: str rule, float[] hyper

An update takes every gradient from the weight as it was, sums those of equal rows in the accumulator's dtype, and
changes each touched row once; rows below 0 are left out. First the sums are divided by ``loss_scale``, in which case a
row whose sum is not finite counts as having a gradient of zero; then they are clamped to ``clip_value``; then the rule
runs. The step counts even if no row is touched. A catch-up takes the steps that the rows about to be read have missed,
of every row where ``rows`` is None; it changes no row that is up to date, so nothing that a live graph has read.

    rule             state, in order                                                  hyper, in order
    sgd
    adagrad          sum, step                                                        lr_decay, eps
    rowwise_adagrad  sum, step, extents                                               lr_decay, eps
    adam             exp_avg, exp_avg_sq, last, step, lrs, moments                    beta1, beta2, eps, window, settled
    amsgrad          exp_avg, exp_avg_sq, max_exp_avg_sq, last, step, lrs, moments    as adam
    lazy_adam        exp_avg, exp_avg_sq, step                                        beta1, beta2, eps
    lazy_amsgrad     exp_avg, exp_avg_sq, max_exp_avg_sq, step                        as lazy_adam

``lr`` is a float64 scalar and ``step`` an int64 scalar that counts the steps taken, both on the weight's device, so
that a CUDA graph may advance them. Sums and averages are ``[R, W]`` (``[R]`` for rowwise_adagrad) in the accumulator's
dtype, float32 for half precision. ``extents`` int64 ``[T, 2]`` holds the first row of each table in the weight, rising,
and its pitch: the mean of a squared gradient is taken over all ``pitch * W`` columns of a table's row, and each of its
``pitch`` rows of the weight keeps the same number in ``sum``. ``last`` int32 ``[R]`` is the step a row is current at, 0
if it never had a gradient; ``lrs`` ``[H]``, ``moments``, ``window`` and ``settled`` are explained in ``replay``. No row
may fall behind by more than H steps, so each step of adam and amsgrad first brings up to date, touched or not, the
``n = ceil(2 R / H)`` rows from ``n * step`` on, modulo R.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import cpu, gpu, reference, rules
from .layout import FEATURE

_INTEGERS = "Tensor slots, Tensor parts, Tensor maps, Tensor spans"
_TARGET = "Tensor(a!) weight, Tensor lr, Tensor(b!)[] state"
_RULE = "str rule, float[] hyper, float? clip_value=None, Tensor? loss_scale=None"
_OWED = "Tensor(a!) weight, Tensor(b!)[] state"
_library = torch.library.Library("quorem", "FRAGMENT")
_library.define(f"lookup_update_(Tensor grad, Tensor ids, {_TARGET}, {_INTEGERS}, *, {_RULE}) -> ()")
_library.define(
    f"bag_update_(Tensor grad, Tensor ids, Tensor offsets, Tensor? sample_weights, {_TARGET}, {_INTEGERS},"
    f" *, bool mean, {_RULE}) -> ()"
)
_library.define(f"rows_update_(Tensor rows, Tensor values, {_TARGET}, *, {_RULE}) -> ()")
_library.define(f"lookup_catch_up_(Tensor ids, {_OWED}, {_INTEGERS}, *, str rule, float[] hyper) -> ()")
_library.define(f"bag_catch_up_(Tensor ids, Tensor offsets, {_OWED}, {_INTEGERS}, *, str rule, float[] hyper) -> ()")
_library.define(f"rows_catch_up_(Tensor? rows, {_OWED}, *, str rule, float[] hyper) -> ()")


@dataclass(eq=False)
class Ledger:
    """What an optimizer keeps for the rows of one weight, as the ops take it.

    Where rows can owe steps, the weight carries it as its attribute ``ledger``, for whoever reads the weight.
    """

    rule: str
    hyper: list[float]
    lr: "Dial"
    state: list[Tensor]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a saved weight owes nothing: it was brought up to date

    @property
    def options(self) -> dict[str, Any]:
        """The rule, as the ops take it."""
        return {"rule": self.rule, "hyper": self.hyper}


class Dial:
    """A number on a device, written only when it changes: a CUDA graph reads it there."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros((), dtype=torch.float64, device=device)
        self.number: float | None = None

    def turn(self, value: float | Tensor) -> Tensor:
        """Set it to ``value``."""
        if isinstance(value, Tensor):
            self.number = None
            self.tensor.copy_(value.squeeze())
        elif value != self.number:
            self.number = value
            self.tensor.fill_(value)
        return self.tensor


@dataclass
class Read:
    """A read of a weight and the gradient that came back: ``{op}_update_(*before, weight, ..., *after, **options)``."""

    op: str  # "lookup", "bag" or "rows"
    before: tuple[Tensor | None, ...]
    after: tuple[Tensor, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def row_grads(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[N]``, repeated or not, and their gradients ``[N, W]``."""
        if self.op == "rows":
            rows, values = self.before
        else:
            grads = getattr(torch.ops.quorem, f"{self.op}_row_grads")
            rows, values = grads(*self.before, weight, *self.after, **self.options)
        assert rows is not None and values is not None
        return rows.flatten(), values.reshape(-1, weight.shape[1]).to(reference.accumulator(weight))


def apply_(
    reads: list[Read],
    weight: Tensor,
    ledger: Ledger,
    clip_value: float | None = None,
    loss_scale: Tensor | None = None,
) -> None:
    """One step of ``ledger``'s rule on the rows that ``reads`` read, each with the sum of all its gradients."""
    if len(reads) > 1:
        rows, values = zip(*(read.row_grads(weight) for read in reads), strict=True)
        reads = [Read("rows", (torch.cat(rows), torch.cat(values)))]
    (read,) = reads
    name = f"{read.op}_update_"
    inputs = (*read.before, weight, ledger.lr.tensor, ledger.state, *read.after)
    options = {**read.options, **ledger.options, "clip_value": clip_value, "loss_scale": loss_scale}
    kernel = gpu.straight(name, weight)
    if kernel is None or kernel(*inputs, **options) is NotImplemented:
        with torch.no_grad():
            getattr(torch.ops.quorem, name)(*inputs, **options)
    torch.autograd.graph.increment_version(weight)


def catch_up_(ids: Tensor, offsets: Tensor | None, weight: Tensor, *integers: Tensor) -> None:
    """Bring the rows that ``ids`` read up to date, where an optimizer owes them steps."""
    ledger: Ledger | None = getattr(weight, "ledger", None)
    if ledger is None:
        return
    name, read = ("lookup_catch_up_", (ids,)) if offsets is None else ("bag_catch_up_", (ids, offsets))
    kernel = gpu.straight(name, weight)
    if kernel is None or kernel(*read, weight, ledger.state, *integers, **ledger.options) is NotImplemented:
        # .data: the rows that a live graph has read are up to date and do not change, so its weight has not either.
        with torch.no_grad():
            getattr(torch.ops.quorem, name)(*read, weight.data, ledger.state, *integers, **ledger.options)


def flush_(weight: Tensor) -> None:
    """Bring every row of ``weight`` up to date, where an optimizer owes it steps."""
    ledger: Ledger | None = getattr(weight, "ledger", None)
    if ledger is not None:
        with torch.no_grad():
            torch.ops.quorem.rows_catch_up_(None, weight.data, ledger.state, **ledger.options)


def summed(
    rows: Tensor, values: Tensor, clip_value: float | None = None, loss_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each row once, with the sum of its gradients, unscaled and clipped."""
    used = rows >= 0
    rows, place = rows[used].unique(return_inverse=True)
    sums = values.new_zeros(len(rows), values.shape[1]).index_add(0, place, values[used])
    if loss_scale is not None:
        sums = sums / loss_scale
        sums = torch.where(sums.isfinite().all(1, keepdim=True), sums, 0)
    return rows, sums if clip_value is None else sums.clamp(-clip_value, clip_value)


def _rows_update(
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
) -> None:
    values = values.reshape(-1, weight.shape[1]).to(reference.accumulator(weight))
    rules.RULES[rule](*summed(rows.flatten(), values, clip_value, loss_scale), weight, lr, state, hyper)


def _lookup_update(
    grad: Tensor, ids: Tensor, weight: Tensor, lr: Tensor, state: list[Tensor], *integers: Tensor, **options: Any
) -> None:
    row_grads = reference.lookup_row_grads(grad, ids, weight, *integers)
    _rows_update(*row_grads, weight, lr, state, **options)


def _bag_update(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    weight: Tensor,
    lr: Tensor,
    state: list[Tensor],
    *integers: Tensor,
    mean: bool,
    **options: Any,
) -> None:
    row_grads = reference.bag_row_grads(grad, ids, offsets, sample_weights, weight, *integers, mean=mean)
    _rows_update(*row_grads, weight, lr, state, **options)


def _rows_catch_up(rows: Tensor | None, weight: Tensor, state: list[Tensor], *, rule: str, hyper: list[float]) -> None:
    rules.catch_up(rows if rows is None else rows[rows >= 0], weight, state, hyper)


def _lookup_catch_up(ids: Tensor, weight: Tensor, state: list[Tensor], *integers: Tensor, **options: Any) -> None:
    slots, parts, maps, _ = integers
    rows, _ = reference.rows_of(ids[:, slots[:, FEATURE]], slots, parts, maps)
    _rows_catch_up(rows, weight, state, **options)


def _bag_catch_up(
    ids: Tensor, offsets: Tensor, weight: Tensor, state: list[Tensor], *integers: Tensor, **options: Any
) -> None:
    slots, parts, maps, spans = integers
    _, slot, _ = reference.jagged(ids, offsets, slots, spans)
    rows, _ = reference.rows_of(ids[:, None], slots[slot], parts[slot], maps)
    _rows_catch_up(rows, weight, state, **options)


def _nothing(*args: Any, **options: Any) -> None:
    """The shapes that an op in place gives the compiler: none."""


_bodies: dict[str, Callable[..., Any]] = {
    "lookup_update_": _lookup_update,
    "bag_update_": _bag_update,
    "rows_update_": _rows_update,
    "lookup_catch_up_": _lookup_catch_up,
    "bag_catch_up_": _bag_catch_up,
    "rows_catch_up_": _rows_catch_up,
}
for _name, _body in _bodies.items():
    _library.impl(_name, _body, "CompositeExplicitAutograd")
    _library.impl(_name, cpu.fused(_name, _body), "CPU")
    _library.impl(_name, gpu.fused(_name, _body), "CUDA")
    torch.library.register_fake(f"quorem::{_name}", _nothing, lib=_library)
