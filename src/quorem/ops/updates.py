"""Steps on the rows that were read, and on rows that lag behind."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from . import declare, replay
from .lagging import LaggingParameter, known_updates, unwatched
from .layout import Layout
from .pieces import NO_PIECES, Pieces
from .rows import IdBatch, accumulator
from .state import RowRule

if TYPE_CHECKING:
    from .in_backward import Collector

_moving = threading.RLock()  # one thread at a time moves rows: two would take the missed steps of a row twice


class Updates:
    """What must be done for an optimizer when one ``stored`` is read or gets a gradient.

    The modules with this parameter own the object and pass it to the ops. A copy of a module has an empty one of its
    own: the rows of a copy are up to date, and an optimizer stays with the module it was made for.
    """

    def __init__(self, stored: Tensor | None = None) -> None:
        self._stored: Callable[[], Tensor | None] = weakref.ref(stored) if stored is not None else lambda: None
        self.modules: weakref.WeakSet[Any] = weakref.WeakSet()  # the modules that share ``stored``
        self.lagging: RowRule | None = None  # the rule under which rows lag behind, if there is one
        self._flushed: int | None = None  # the step of this rule with which all rows are up to date, where known
        self.collector: Collector | None = None  # where gradients go, if not into ``stored.grad``
        if stored is not None:
            known_updates.set(stored, weakref.ref(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Updates, ()

    @property
    def stored(self) -> Tensor | None:
        """The parameter; None if ``fully_shard`` has put parts of it in its place, which free its memory."""
        return self._stored()

    def collect_in(self, collector: "Collector | None") -> None:
        """Let gradients go to ``collector``, or to ``stored.grad`` if it is None."""
        if self.collector is not None:
            self.collector.close()
        self.collector = collector

    def lag_under(self, rule: RowRule | None) -> None:
        """From now on rows lag behind under ``rule``, or not at all if it is None."""
        self.flush_()
        self.lagging, self._flushed = rule, None
        self.watch()

    def watch(self) -> None:
        """Notice reads of ``stored`` while rows may lag behind; call it after ``stored`` was converted."""
        stored = self.stored
        assert stored is not None
        with unwatched():
            if self.lagging is not None and self.lagging.made_for != (stored.dtype, stored.device):
                self.lagging = None  # the conversion has read every row
            if self.lagging is not None:
                stored.__class__ = LaggingParameter
            elif type(stored) is LaggingParameter:
                stored.__class__ = nn.Parameter  # type: ignore[assignment]

    def catch_up_(self, batch: IdBatch, stored: Tensor, layout: Layout) -> None:
        """Bring the rows that a batch reads up to date; a tensor that replaces ``stored`` is not changed."""
        rule, parameter = self.lagging, self.stored
        assert rule is not None
        if stored is parameter:
            # .data: rows that a live graph has read are up to date and do not change, so nothing changes for autograd.
            with _moving:
                declare.call("catch_up_", batch, stored.data, layout, rule)
        elif parameter is not None and stored.data_ptr() == parameter.data_ptr():
            self.flush_()  # a view that functional_call was given

    def flush_(self) -> None:
        """Bring every row up to date.

        While torch traces, plain PyTorch does it outside of the graph: Numba cannot compile when builtins are replaced.
        """
        rule, stored = self.lagging, self.stored
        if rule is None or stored is None:
            return
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                "rows that lag behind must not be read in a whole graph of the compiler: call the optimizer's flush()"
                " and compile or export a deep copy of the module, or export it with strict=False"
            )
        eager = declare.is_eager()
        catch_up: Any = partial(declare.call, "rows_catch_up_") if eager else replay.rows_catch_up_
        with unwatched(), torch.no_grad(), contextlib.nullcontext() if eager else _outside_graphs(), _moving:
            step = int(rule.state.step) if stored.is_cpu else None  # on a GPU this would wait for it
            if step is None or self._flushed != step:
                catch_up(None, stored.data, rule)
                self._flushed = step


def uncompiled(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Break the compiler's graph, and run ``function`` outside of it; with ``fullgraph=True`` this is an error."""
    torch._dynamo.graph_break(
        msg="lookups of tables that are sparse=True or updated by quorem.optim are not compiled: where a whole graph is"
        " needed, evaluate a deep copy of the module"
    )
    return _skipped(function, *args)


@torch._disable_dynamo  # type: ignore[attr-defined]  # torch.compiler.disable would load the compiler now
def _skipped(function: Callable[..., Tensor], *args: Any) -> Tensor:
    return function(*args)


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


class Lookup(NamedTuple):
    """What was looked up in ``stored``."""

    batch: IdBatch
    layout: Layout
    pieces: Pieces = NO_PIECES  # where narrow rows are projected too, so that the gradient is a ``SplitGradient``


Read = Lookup | Tensor  # a lookup, or rows that were read as they are
ReadGradients = Sequence[tuple[Read, Any]]  # reads, each with the gradient of its result


def joined(reads: ReadGradients, stored: Tensor) -> tuple[Tensor, Tensor]:
    """The rows ``[N]`` of all reads, repeated or not, and their gradients ``[N, W]``."""
    rows, values = [], []
    for read, grad in reads:
        if isinstance(read, Lookup):
            read, grad = declare.call("row_grads", grad, read.batch, stored, read.layout)
        rows.append(read.flatten())
        values.append(grad.flatten(0, -2).to(accumulator(stored)))
    return torch.cat(rows), torch.cat(values)


def update_(reads: ReadGradients, stored: Tensor, rule: RowRule) -> None:
    """One step on the rows of ``stored`` that were read, each with the sum of all its gradients; without autograd."""
    read, grad = reads[0] if len(reads) == 1 else joined(reads, stored)
    with _moving:
        if isinstance(read, Lookup):
            declare.call("update_", grad, read.batch, stored, read.layout, rule)
        else:
            declare.call("rows_update_", read, grad, stored, rule)
        torch.autograd.graph.increment_version(stored)
