"""The base class of the optimizers."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..dense.foreach import Foreach
from ..ops.cpu.pages import in_huge_pages
from ..ops.rows import accumulator
from ..ops.state import CATCHES_UP, TYPES_OF_RULE, Constants, DeviceScalar, State
from ..ops.updates import RowRule, Updates, update_, updates_of
from ..tables import module_of

ROUNDED = (torch.bfloat16, torch.float16, torch.uint8)  # dtypes of rows that are rounded at random


class RowOptimizer(torch.optim.Optimizer):
    """A ``torch.optim`` optimizer for parameters with dense gradients, and a row-wise rule for sparse gradients.

    On a GPU the step on dense gradients in float32 is fused, several parameters in a launch, and may be captured in a
    CUDA graph after a first step; ``lr`` may be set between replays. All other dense gradients are left to the
    ``torch.optim`` class.

    Its ``state_dict`` and that of the ``torch.optim`` class can be loaded into each other. ``clip_value`` and
    ``loss_scale`` are those of ``apply_in_backward``.

    Args:
        params: parameters, or groups of them, of any modules; tables with sparse gradients are updated row by row.
        defaults: options of the ``torch.optim`` class.

    >>> import quorem
    >>> table = quorem.Embedding(1000, 16, quorem.QR(4), sparse=True)
    >>> isinstance(quorem.optim.Adagrad(table.parameters(), lr=0.01), quorem.optim.RowOptimizer)
    True
    """

    torch_class: ClassVar[type[torch.optim.Optimizer]]
    rule: ClassVar[str]
    averages: ClassVar[tuple[str, ...]] = ()  # names of the rows' state tensors, as in torch_class
    options: ClassVar[tuple[str, ...]]  # options of torch_class that may be set
    decays_rows: ClassVar[bool] = False  # whether weight_decay is supported for tables
    instead: ClassVar[str] = ""  # name of an optimizer for sparse gradients of modules that are not quorem's

    clip_value: float | None = None
    loss_scale: float | Tensor | None = None
    rounding_seed: int | None = 0

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        self._updates: dict[Tensor, Updates] = {}  # of the parameters that are updated row by row
        self._start(defaults)
        super().__init__(params, self._dense.defaults)

    def _start(self, options: dict[str, Any]) -> None:
        self._row_rules: dict[Tensor, RowRule] = {}
        self._sparse_tables: dict[Tensor, bool] = {}
        self._foreach = Foreach()
        self._dense = self.torch_class([torch.empty(0)], **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_updates", {})
        accepted = inspect.signature(self.torch_class).parameters  # AdamW adds a default that it does not accept
        self._start({name: value for name, value in self.defaults.items() if name in accepted})

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return super().__getstate__()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own, as in ``torch.optim``.

        Raises:
            ValueError: if an option is not supported, or is not supported for a table among the parameters.
        """
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        for key, default in self.defaults.items():
            if key not in self.options and group.get(key, default) != default:
                name = type(self).__name__
                raise ValueError(f"{key} ({group[key]}) must be {default}: quorem.optim.{name} has no such option")
        for p in group["params"]:
            if is_sparse_table(p):
                self._check_rows(group, p)

    def _check_rows(self, group: dict[str, Any], p: Tensor) -> None:
        """Raise ValueError if the rows of ``p`` cannot be updated one by one."""
        decay, name = group["weight_decay"], type(self).__name__
        if decay and not self.decays_rows:
            raise ValueError(
                f"weight_decay ({decay}) must be 0 for tables: under {name} what it does to a row in the steps that it"
                " misses has no closed form; use AdamW, or SGD"
            )
        if p.dim() != 2:
            raise ValueError(f"a parameter of shape {tuple(p.shape)} with a sparse gradient must be 2-D")
        if self._rule(group) in CATCHES_UP and p.dtype == torch.uint8:
            raise ValueError(
                f"rows of 8 bits must not lag behind, as they do under {name}: use {self.instead}, Adagrad or"
                " RowWiseAdagrad, or float rows"
            )
        if self._rule(group) in CATCHES_UP and module_of(p) is None:
            raise ValueError(
                f"a parameter {tuple(p.shape)} with a sparse gradient must belong to a quorem module: under {name} rows"
                " lag behind, and only such a module brings them up to date before it reads; use"
                f" {self.instead} instead"
            )
        self._constants(group, p)

    def _rule(self, group: dict[str, Any]) -> str:
        """The rule for the tables of a group."""
        return self.rule

    def _averages(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the state tensors of a group's rows, as in ``torch_class``."""
        return self.averages

    def _constants(self, group: dict[str, Any], p: Tensor) -> Constants:
        """The rule's constants."""
        raise NotImplementedError

    def _initial_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
        """The state of ``p`` before its first step, as the ``torch.optim`` class names it."""
        zeros = {name: in_huge_pages(empty_state(p)).zero_() for name in self._averages(group)}
        return {"step": torch.tensor(0, device="cpu"), **zeros}

    def _state_shape(self, p: Tensor) -> torch.Size:
        """The shape of each average of ``p``."""
        return empty_state(p).shape

    def _row_state(self, state: dict[str, Tensor], p: Tensor, constants: Any) -> State:
        """The rule's state, made from the optimizer's state of ``p``."""
        row_state: State = TYPES_OF_RULE[self.rule][0](
            step=state["step"], **{name: state[name] for name in self.averages}
        )
        return row_state

    def _row_rule(self, group: dict[str, Any], p: Any) -> RowRule:
        """The rule of ``p``; made from the optimizer's state if there is none yet with the group's constants."""
        constants, row_rule = self._constants(group, p), self._row_rules.get(p)
        decays = group["weight_decay"] and not self.decays_rows  # set since the last step, and refused
        if row_rule is None or row_rule.constants != constants or row_rule.kind != (p.dtype, p.device) or decays:
            self._check_rows(group, p)
            updates = updates_of(p) or Updates(p)
            updates.flush_()  # rows may lag behind under other constants or another optimizer
            state, averages = self.state[p], self._averages(group)
            if not state or any(state.get(name) is None for name in averages):
                known = {name: value for name, value in state.items() if value is not None}
                state.update({**self._initial_state(group, p), **known})
            shape = self._state_shape(p)
            for name, value in state.items():
                if name in averages and value.shape != shape:
                    rule = f"must be {tuple(shape)}, as the table's rows: it was saved under another scheme or size"
                    raise ValueError(f"{name} {tuple(value.shape)} of the optimizer's state {rule}")
                if name == "step" or name in averages:
                    dtype = torch.int64 if name == "step" else accumulator(p)
                    state[name] = torch.as_tensor(value, dtype=dtype, device=p.device)
            row_state, rule = self._row_state(state, p, constants), self._rule(group)
            row_rule = RowRule(rule, constants, DeviceScalar(p.device), row_state, table_extents(p))
            row_rule.kind = (p.dtype, p.device)
            self._row_rules[p], self._updates[p] = row_rule, updates
        updates = self._updates[p]
        lagging = row_rule if row_rule.rule in CATCHES_UP else None
        if updates.lagging is not lagging:
            updates.flush_()  # rows lag behind under another optimizer
            updates.lagging = lagging
        row_rule.lr.set(group["lr"])
        if p.dtype is not torch.float32:
            row_rule.options["rounding_seed"] = self.rounding_seed if p.dtype in ROUNDED else None
        return row_rule

    def _start_dense(self, p: Tensor) -> None:
        """Give ``p`` the state that the constructor of the ``torch.optim`` class makes and its ``step`` expects."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; a parameter without a gradient is left as it is.

        Args:
            closure: computes the loss again and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_row, left = [], []
        for index, group in enumerate(self.param_groups):
            with_grad = [p for p in group["params"] if p.grad is not None]
            dense = [p for p in with_grad if not self._is_by_row(p)]
            if len(dense) < len(with_grad):
                by_row += [(group, p, p.grad) for p in with_grad if self._is_by_row(p)]
            left += [(group, p) for p in self._foreach.step(self, index, group, dense)]
        if left:
            self._step_in_torch(left)
        for group, p, grad in by_row:
            if grad.is_sparse:
                rows, values = grad._indices()[0], grad._values()
            else:
                rows = torch.arange(len(p), device=p.device)
                if self._sparse_tables[p]:  # its gradient was made dense for DistributedDataParallel
                    rows = (grad != 0).any(1).nonzero()[:, 0]
                values = grad[rows]
            update_([(rows, -values if group.get("maximize") else values)], p, self._row_rule(group, p))
        return loss

    def _is_by_row(self, p: Tensor) -> bool:
        """Whether ``p``, which has a gradient, is updated row by row."""
        assert p.grad is not None
        if p not in self._sparse_tables:
            self._sparse_tables[p] = is_sparse_table(p)
        return p.grad.is_sparse or p in self._row_rules or self._sparse_tables[p]

    def _step_in_torch(self, pairs: list[tuple[dict[str, Any], Tensor]]) -> None:
        """Take the step of the ``torch.optim`` class on these parameters only."""
        groups: dict[int, dict[str, Any]] = {}
        for group, p in pairs:
            if not self.state[p]:
                self._start_dense(p)
            groups.setdefault(id(group), {**group, "params": []})["params"].append(p)
        self._dense.param_groups, self._dense.state = list(groups.values()), self.state
        self._dense.step()

    def flush(self) -> None:
        """Bring every row up to date.

        Modules do this themselves for the rows that they read, and when ``module.stored`` is read. Only code that gets
        the parameter in another way, such as by ``module.parameters()``, must call this before it reads the parameter
        or writes to a part of it.
        """
        for updates in self._updates.values():
            updates.flush_()

    def live_state(self) -> dict[Tensor, list[Tensor]]:
        """The tensors of the rule's state for each parameter that is updated row by row, averages first.

        Rows are not brought up to date first. A run that is resumed from these tensors and ``stored`` continues bit by
        bit as if it had not stopped.
        """
        tensors = {}
        for p, row_rule in self._row_rules.items():
            state = {name: tensor for name, tensor in row_rule.state._asdict().items() if tensor is not None}
            first = [state.pop(name) for name in self.averages if name in state]
            tensors[p] = [*first, *state.values()]
        return tensors

    def note_rows(self) -> None:
        """Treat ``stored`` as written by this optimizer; call it after copying back what ``live_state`` returned."""
        for p, row_rule in self._row_rules.items():
            row_rule.note_rows(p)

    def state_dict(self) -> dict[str, Any]:
        """The state, as the ``torch.optim`` class would have it, with every row up to date."""
        self.flush()
        saved = super().state_dict()
        for i, values in saved["state"].items():
            if isinstance(step := values.get("step"), Tensor) and not step.is_floating_point():
                saved["state"][i] = {**values, "step": step.float()}  # torch's foreach code rejects integers
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this optimizer or the ``torch.optim`` class has saved."""
        self.flush()
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            self._check(group)
            for p, i in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(i, {}).items():
                    if name in self.averages and accumulator(p) != p.dtype:  # torch rounded it to the parameter's dtype
                        self.state[p][name] = value.to(p.device)

    @property
    def lr(self) -> float | Tensor:
        """The learning rate of the first group; setting it sets that of every group."""
        return self.param_groups[0]["lr"]

    @lr.setter
    def lr(self, lr: float | Tensor) -> None:
        self._foreach.set_lr(lr)
        for group in self.param_groups:
            group["lr"] = lr
            for p in group["params"]:
                if p in self._row_rules:
                    self._row_rules[p].lr.set(lr)

    def remove(self) -> None:
        """Undo ``apply_in_backward``: from now on ``stored`` gets gradients, and ``step`` applies them."""
        for updates in self._updates.values():
            if updates.collector is not None:
                updates.collector.close()
            updates.collector = None


def is_sparse_table(p: Tensor) -> bool:
    """Whether ``p`` is the ``stored`` of a module with ``sparse=True``."""
    tables = module_of(p)
    return tables is not None and tables.sparse


def empty_state(p: Tensor) -> Tensor:
    """An average for each number in ``p``, or in the rows of 8 bits that ``p`` holds; not filled."""
    tables = module_of(p) if p.dtype == torch.uint8 else None
    if tables is None:
        return torch.empty_like(p, dtype=accumulator(p))
    return torch.empty(len(p), tables.width, dtype=accumulator(p), device=p.device)


def table_extents(p: Tensor) -> Tensor:
    """The first row of each table in ``p``, rising, and its pitch, int64 ``[T, 2]``."""
    tables = module_of(p)
    extents = [[0, 1]] if tables is None else [[e.base, e.pitch] for e in tables.all_extents]
    return torch.tensor(extents, device=p.device)
