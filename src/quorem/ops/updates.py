"""Steps on the rows that were read, and on rows that lag behind."""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..checks import is_exporting
from . import declare, replay
from .lagging import unwatch, unwatched, watch
from .layout import Layout
from .rows import IdBatch, accumulator
from .state import RULES, AdamConstants, AdamState, Constants, DeviceScalar, State, StepOptions

if TYPE_CHECKING:
    from .in_backward import Collector


@dataclass(eq=False)
class RowRule:
    """A rule by which an optimizer updates the rows of one ``stored``, with its constants, learning rate and state."""

    rule: str
    constants: Constants
    lr: DeviceScalar
    state: State
    extents: Tensor | None = None  # int64 [T, 2]: first row and pitch of each table; None where ``stored`` is one
    kind: tuple[torch.dtype, torch.device] | None = None  # of ``stored`` when the state was made
    flushed: int | None = None  # the step with which all rows are up to date, where known
    written: tuple[int, int] | None = None  # version and address of ``stored`` after the last write under this rule

    def __post_init__(self) -> None:
        """Prepare what ops of this rule are given by name."""
        self.options: StepOptions = {"rule": self.rule, "constants": self.constants, "rounding_seed": None}

    def note_rows(self, stored: Tensor) -> None:
        """Record that ``stored`` is as this rule has written it."""
        with unwatched():  # to ask for the address would bring every row up to date
            self.written, self.flushed = (stored._version, stored.data_ptr()), None

    def keep_what_was_written_(self, stored: Tensor) -> None:
        """If other code has written into ``stored`` since, count its rows as up to date: they stay as written."""
        if self.written == (stored._version, stored.data_ptr()):
            return
        if self.written is not None:
            assert isinstance(self.state, AdamState) and isinstance(self.constants, AdamConstants)
            replay.keep_rows_(self.state, self.constants)
        self.note_rows(stored)


class Updates:
    """What must be done for an optimizer when one ``stored`` is read or gets a gradient.

    The modules with this parameter own the object and pass it to the ops. A copy of a module has an empty one of its
    own: the rows of a copy are up to date, and an optimizer stays with the module it was made for.
    """

    def __init__(self, stored: Tensor | None = None) -> None:
        self.stored = stored
        self.modules: weakref.WeakSet[Any] = weakref.WeakSet()  # the modules that share ``stored``
        self.lagging: RowRule | None = None  # the rule under which rows lag behind, if there is one
        self.collector: Collector | None = None  # where gradients go, if not into ``stored.grad``
        with _registering:
            self.name = f"updates {next(_numbers)}"
            _registry.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Updates, ()

    def collector_of(self, stored: Tensor) -> "Collector | None":
        """Where the gradients of ``stored`` go.

        None, so that they go to ``stored.grad``, if another tensor replaces it (``functional_call``), in a graph that
        is captured to be saved, and under a transform such as ``torch.vmap``.

        Raises:
            RuntimeError: if ``fully_shard`` has replaced ``stored``, whose gradients would be lost.
        """
        if self.collector is None:
            return None
        if stored is not self.stored:
            self._refuse_shards()
            return None
        if is_captured():
            return None
        return None if torch._C._are_functorch_transforms_active() else self.collector

    def _refuse_shards(self) -> None:
        # torch marks a module that fully_shard was called with (FSDPModule), but not the modules in it. In each module
        # whose parameters it shards it leaves a hook.
        hooks = [hook for module in self.modules for hook in module._load_state_dict_post_hooks.values()]
        for hook in hooks:
            if str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp."):
                raise RuntimeError(
                    "fully_shard must not shard tables that apply_in_backward updates: remove() its optimizer, and use"
                    " the step() of one made after fully_shard"
                )

    def lag_under(self, rule: RowRule | None) -> None:
        """From now on rows lag behind under ``rule``, or not at all if it is None."""
        self.flush_()
        self.lagging = rule
        self.watch()

    def watch(self) -> None:
        """Notice reads of ``stored`` while rows may lag behind; call it after ``stored`` was converted."""
        assert self.stored is not None
        with unwatched():
            if self.lagging is not None and self.lagging.kind != (self.stored.dtype, self.stored.device):
                self.lagging = None  # the conversion has read every row
            if self.lagging is None:
                unwatch(self.stored)
            else:
                watch(self.stored, self.flush_)

    def catch_up_(self, batch: IdBatch, stored: Tensor, layout: Layout) -> None:
        """Bring the rows that a batch reads up to date; a tensor that replaces ``stored`` is not changed.

        All rows are brought up to date if a graph is captured to be saved, since it will read ``stored`` without an
        optimizer, and under a transform such as ``torch.vmap``.
        """
        if self.lagging is None or self.stored is None:
            return
        if is_captured():
            self.flush_before_capture_()
        elif stored is not self.stored:
            if not torch.compiler.is_compiling() and stored.data_ptr() == self.stored.data_ptr():
                self.flush_()  # a view that functional_call was given
        elif torch._C._are_functorch_transforms_active():
            self.flush_()
        else:
            self._call("catch_up_", batch, layout)

    def flush_(self) -> None:
        """Bring every row up to date."""
        rule = self.lagging
        if rule is None or torch.compiler.is_dynamo_compiling():
            if rule is not None:
                self._call("rows_catch_up_", None)
            return
        assert self.stored is not None
        with unwatched(), _NOTHING if declare.is_eager() else _outside_graphs(), declare.moving:
            step = int(rule.state.step) if self.stored.is_cpu else None  # on a GPU this would wait for it
            if step is None or rule.flushed != step:
                self._call("rows_catch_up_", None)
                rule.flushed = step

    def flush_before_capture_(self) -> None:
        """Bring every row up to date while a graph is captured, outside that graph."""
        if self.lagging is not None:
            _flush_before_capture(self.name)

    def _call(self, name: str, batch: IdBatch | None, *layout: Layout) -> None:
        assert self.stored is not None and self.lagging is not None
        # .data: rows that a live graph has read are up to date and do not change, so for autograd nothing changes.
        rule, args = self.lagging, (batch, self.stored.data, self.lagging.state, *layout)
        if not torch.compiler.is_dynamo_compiling():
            with declare.moving:
                rule.keep_what_was_written_(self.stored)
                declare.call(name, *args, **rule.options)
            return
        rule.written = None  # catching up counts as a write in a compiled graph
        with torch.no_grad():  # in a compiled graph .data alone would still take part in it
            declare.call(name, *args, **rule.options)


def is_captured() -> bool:
    """Whether ``torch.export`` or ``torch.jit.trace`` captures the graph, which will run without an optimizer."""
    if torch.compiler.is_compiling():
        return is_exporting()
    return torch._C._get_tracing_state() is not None


def _flush_before_capture(name: str) -> int:
    """``Updates.flush_`` in plain PyTorch: while torch traces, Numba cannot compile, since builtins are replaced.

    The ``Updates`` is given by its name, since the compiler of torch 2.11 accepts only constants.
    """
    with _registering:
        updates = next(updates for updates in _registry if updates.name == name)
    rule, stored = updates.lagging, updates.stored
    assert rule is not None and stored is not None
    with unwatched(), _outside_graphs(), torch.no_grad(), declare.moving:
        rule.keep_what_was_written_(stored)
        replay.rows_catch_up_(None, stored.data, cast(Any, rule.state), **cast(Any, rule.options))
    return 0


@contextlib.contextmanager
def _outside_graphs() -> Iterator[None]:
    """Run what no tracer and no mode is to see."""
    tracing, bindings = torch._C._get_tracing_state(), cast(Any, torch._C)
    bindings._set_tracing_state(None)
    try:
        with _disable_current_modes():
            yield
    finally:
        bindings._set_tracing_state(tracing)


_flush_before_capture._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result


_registry: weakref.WeakSet[Updates] = weakref.WeakSet()
_numbers = itertools.count()
_NOTHING: Any = contextlib.nullcontext()
_registering = threading.Lock()  # a set must not change while another thread iterates over it


def updates_of(stored: Tensor) -> Updates | None:
    """The ``Updates`` of a module's ``stored``: the only way from a parameter, as optimizers have it, to its module."""
    with _registering:
        return next((updates for updates in _registry if updates.stored is stored), None)


class Lookup(NamedTuple):
    """What was looked up in ``stored``."""

    batch: IdBatch
    layout: Layout


Read = Lookup | Tensor  # a lookup, or rows that were read as they are
Reads = Sequence[tuple[Read, Tensor]]  # each with the gradient of its result


def joined(reads: Reads, stored: Tensor) -> tuple[Tensor, Tensor]:
    """The rows ``[N]`` of all reads, repeated or not, and their gradients ``[N, W]``."""
    rows, values = zip(*(_row_grads(read, grad, stored) for read, grad in reads), strict=True)
    return torch.cat(rows), torch.cat(values)


def _row_grads(read: Read, grad: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(read, Lookup):
        rows, grad = declare.call("row_grads", grad, read.batch, stored, read.layout)
    else:
        rows = read
    return rows.flatten(), grad.flatten(0, -2).to(accumulator(stored))


def update_(
    reads: Reads,
    stored: Tensor,
    row_rule: RowRule,
    clip_value: float | None = None,
    loss_scale: Tensor | None = None,
) -> None:
    """One step of ``row_rule`` on the rows of ``stored`` that were read, each with the sum of all its gradients."""
    if torch.is_grad_enabled():  # a backward pass has it off
        with torch.no_grad():
            update_(reads, stored, row_rule, clip_value, loss_scale)
        return
    options = row_rule.options
    if clip_value is not None or loss_scale is not None:
        options = {**options, "clip_value": clip_value, "loss_scale": loss_scale}
    read, grad = reads[0] if len(reads) == 1 else joined(reads, stored)
    lr, state = row_rule.lr.tensor, row_rule.state
    with declare.moving if (lags := RULES[row_rule.rule].lags) else _NOTHING:
        if lags:
            row_rule.keep_what_was_written_(stored)
        if isinstance(read, Lookup):
            declare.call("update_", grad, read.batch, stored, lr, state, read.layout, **options)
        else:
            extents = None if loss_scale is None else row_rule.extents
            declare.call("rows_update_", read, grad, stored, lr, state, extents=extents, **options)
        torch.autograd.graph.increment_version(stored)
        if lags:
            row_rule.note_rows(stored)
