"""Updates of the rows that were read, and of rows that lag behind."""

import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import declare
from .layout import Layout
from .rows import accumulator
from .state import Constants, DeviceScalar, State

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
    rounding_seed: int | None = None  # of half-precision rows that are rounded at random


class Updates:
    """What optimizers have to do with one ``stored`` when it is read or gets a gradient.

    The modules whose parameter it is own this object, and hand it to the ops. A copy of a module has an empty one of
    its own: the rows of a copy are up to date, and an optimizer stays with the module it was made for.
    """

    def __init__(self, stored: Tensor | None = None) -> None:
        self.stored = stored
        self.modules: weakref.WeakSet[Any] = weakref.WeakSet()  # those that share ``stored``
        self.lagging: RowRule | None = None  # the rule under which rows lag behind, if there is one
        self.collector: Collector | None = None  # where gradients go, if not into ``stored.grad``
        with _registering:
            _registry.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Updates, ()

    def collector_of(self, stored: Tensor) -> "Collector | None":
        """Where the gradients of ``stored`` go; None for a tensor that stands in for it (``functional_call``)."""
        return self.collector if stored is self.stored else None

    def catch_up_(self, ids: Tensor, offsets: Tensor | None, stored: Tensor, layout: Layout) -> None:
        """Bring the rows that ``ids`` read up to date; a tensor that stands in for ``stored`` is left as it is."""
        if self.lagging is None or stored is not self.stored:
            return
        if offsets is None:
            self._call("lookup_catch_up_", ids, rest=(layout,))
        else:
            self._call("bag_catch_up_", ids, offsets, rest=(layout,))

    def flush_(self) -> None:
        """Bring every row up to date."""
        if self.lagging is not None:
            self._call("rows_catch_up_", None)

    def _call(self, name: str, *inputs: Tensor | None, rest: tuple[Layout, ...] = ()) -> None:
        assert self.stored is not None and self.lagging is not None
        rule = self.lagging
        options = {"rule": rule.rule, "constants": rule.constants, "rounding_seed": rule.rounding_seed}
        # .data: rows that a live graph has read are up to date and do not change, so for autograd nothing changes.
        with torch.no_grad():
            declare.call(name, *inputs, self.stored.data, self.lagging.state, *rest, **options)


_registry: weakref.WeakSet[Updates] = weakref.WeakSet()
_registering = threading.Lock()  # a set must not grow while another thread goes through it


def updates_of(stored: Tensor) -> Updates | None:
    """The ``Updates`` of a module's ``stored``: the one way from a parameter, which optimizers get, to its module."""
    with _registering:
        return next((updates for updates in _registry if updates.stored is stored), None)


@dataclass
class Read:
    """A read of ``stored`` and the gradient that came back, as ``{op}_update_`` takes them around ``stored``."""

    op: str  # "lookup", "bag" or "rows"
    before: tuple[Tensor | None, ...]
    after: tuple[Layout, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def row_grads(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[N]``, repeated or not, and their gradients ``[N, W]``."""
        if self.op == "rows":
            rows, values = self.before
        else:
            rows, values = declare.call(f"{self.op}_row_grads", *self.before, stored, *self.after, **self.options)
        assert rows is not None and values is not None
        return rows.flatten(), values.reshape(-1, stored.shape[1]).to(accumulator(stored))


def update_(
    reads: list[Read],
    stored: Tensor,
    row_rule: RowRule,
    clip_value: float | None = None,
    loss_scale: Tensor | None = None,
) -> None:
    """One step of ``row_rule`` on the rows of ``stored`` that were read, each with the sum of all its gradients."""
    with torch.no_grad():
        if len(reads) > 1:
            rows, values = zip(*(read.row_grads(stored) for read in reads), strict=True)
            reads = [Read("rows", (torch.cat(rows), torch.cat(values)))]
        (read,) = reads
        options = dict(read.options)
        if read.op == "rows" and loss_scale is not None:
            options["extents"] = row_rule.extents
        declare.call(
            f"{read.op}_update_",
            *read.before,
            stored,
            row_rule.lr.tensor,
            row_rule.state,
            *read.after,
            **options,
            rule=row_rule.rule,
            constants=row_rule.constants,
            rounding_seed=row_rule.rounding_seed,
            clip_value=clip_value,
            loss_scale=loss_scale,
        )
    torch.autograd.graph.increment_version(stored)
