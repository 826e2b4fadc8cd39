"""The base class of the optimizers."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ..modules.lookup import module_of
from ..modules.storage import is_sharded
from ..ops import replay
from ..ops.lagging import LaggingParameter, unwatched, updates_of
from ..ops.memory import in_huge_pages
from ..ops.rounding import SEED, converted_state
from ..ops.rows import accumulator
from ..ops.state import NARROW, RULES, STATE_DTYPES, AdamState, RowRule, Rule, check_state_dtype, present
from ..ops.updates import Updates, update_
from ..optimizer_names import StateDtype

CODES = "_log8"  # ends the name of saved codes, which ``torch.optim`` must not take for numbers


class RowOptimizer(torch.optim.Optimizer):
    """A ``torch.optim`` optimizer for parameters with dense gradients, and a row-wise rule for sparse gradients.

    Dense gradients are left to the ``torch.optim`` class; in a CUDA graph, use that class itself for them. Its
    ``state_dict`` and that of the ``torch.optim`` class can be loaded into each other.

    Args:
        params: parameters, or groups of them, of any modules; tables with sparse gradients are updated row by row.
        defaults: options of the ``torch.optim`` class.

    >>> import quorem
    >>> table = quorem.Embedding(1000, 16, quorem.QR(4), sparse=True)
    >>> isinstance(quorem.optim.Adagrad(table.parameters(), lr=0.01), quorem.optim.RowOptimizer)
    True
    """

    torch_class: ClassVar[Any]  # the class of torch.optim
    rule: ClassVar[str]  # a key of ``RULES``
    moves_every_row: ClassVar[tuple[str, ...]] = ("weight_decay",)  # options that must be 0 for tables
    state_dtype: StateDtype = "float32"

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        self._reset()
        super().__init__(params, self.torch_class([torch.empty(0)], **defaults).defaults)

    def _reset(self) -> None:
        self._row_rules: dict[Tensor, RowRule] = {}  # of the parameters that are updated row by row
        self._dense = self.torch_class([torch.empty(0)])  # takes the steps of parameters with dense gradients

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return {**super().__getstate__(), "state_dtype": self.state_dtype}

    @property
    def entry(self) -> Rule:
        """What is known of the rule."""
        return RULES[self.rule]

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
        options = inspect.signature(type(self)).parameters
        for key, default in self.defaults.items():
            if key not in options and group.get(key, default) != default:
                name = type(self).__name__
                raise ValueError(f"{key} ({group[key]}) must be {default}: quorem.optim.{name} has no such option")
        for p in group["params"]:
            if self.state_dtype != "float32" and is_sharded(p):
                raise ValueError(f"state_dtype ({self.state_dtype!r}) must be 'float32' for sharded parameters")
            if self._has_rows(p):
                self._check_rows(group, p)

    def _check_rows(self, group: dict[str, Any], p: Tensor) -> None:
        """Raise ValueError if the rows of ``p`` cannot be updated one by one."""
        name = type(self).__name__
        for option in self.moves_every_row:
            if group[option]:
                raise ValueError(
                    f"{option} ({group[option]}) must be 0 for tables: under {name} it would move rows that have no"
                    " gradient; use AdamW"
                )
        if group.get("maximize"):
            raise ValueError(f"maximize ({group['maximize']}) must be False for tables: change the sign of the loss")
        check_state_dtype(self.rule, p.dtype, self.state_dtype)
        if p.dim() != 2:
            raise ValueError(f"a parameter of shape {tuple(p.shape)} with a sparse gradient must be 2-D")
        if self.entry.lags and module_of(p) is None:
            raise ValueError(
                f"a parameter {tuple(p.shape)} with a sparse gradient must belong to a quorem module: under {name} rows"
                " lag behind, and only such a module brings them up to date before it reads; use"
                " torch.optim.SparseAdam instead"
            )
        if self.entry.lags and type(p) not in (nn.Parameter, LaggingParameter):
            raise ValueError(
                f"a table's parameter ({type(p).__name__}) must be an nn.Parameter: under {name} rows lag behind, and"
                " reads of another class would not be noticed"
            )
        self._constants(group, p)

    def _constants(self, group: dict[str, Any], p: Tensor) -> Any:
        """The rule's constants; SGD has none."""
        return ()

    def _average_dtype(self, p: Tensor) -> torch.dtype:
        return accumulator(p) if self.state_dtype == "float32" else STATE_DTYPES[self.state_dtype]

    def _initial_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
        """The state of ``p`` before its first step, as the ``torch.optim`` class names it."""
        like, dtype = p[:, 0] if self.entry.by_row else p, self._average_dtype(p)
        zeros = {name: in_huge_pages(torch.empty_like(like, dtype=dtype)).zero_() for name in self.entry.averages}
        if start := group.get("initial_accumulator_value"):
            numbers = torch.tensor(start, dtype=accumulator(p), device=p.device).expand(like.shape)
            zeros["sum"] = converted_state(numbers, dtype)
        return {"step": torch.tensor(0, device="cpu"), **zeros}

    def _row_state(self, state: dict[str, Tensor], p: Tensor, constants: Any) -> Any:
        """The rule's state, made from the optimizer's state of ``p``."""
        tensors = {name: state[name] for name in ("step", *self.entry.averages)}
        if self.entry.lags:
            last = state["step"].to(torch.int32).expand(len(p)).clone()
            lrs, moments = replay.empty_history(p.device, constants, p.dtype)
            decays = torch.zeros_like(lrs) if self.entry.decays else None
            return AdamState(**tensors, last=last, lrs=lrs, moments=moments, decays=decays)
        if self.entry.by_row:
            tables = module_of(p)
            extents = [[0, 1]] if tables is None else [[e.base, e.pitch] for e in tables.all_extents]
            tensors["extents"] = torch.tensor(extents, device=p.device)
        return self.entry.state(**tensors)

    def _row_rule(self, group: dict[str, Any], p: Any) -> RowRule:
        """The rule of ``p`` for its next step; made anew if the group's constants or the parameter's dtype changed."""
        constants, rule, made_for = self._constants(group, p), self._row_rules.get(p), (p.dtype, p.device)
        refused = group.get("maximize") or any(group[option] for option in self.moves_every_row)  # set in between
        if rule is None or rule.constants != constants or rule.made_for != made_for or refused:
            self._check_rows(group, p)
            updates = updates_of(p) or Updates(p)
            updates.flush_()  # rows may lag behind under other constants or another optimizer
            state = self._row_state(self._fitted_state(group, p), p, constants)
            lr = torch.zeros((), dtype=torch.float64, device=p.device)
            rule = self._row_rules[p] = RowRule(self.rule, constants, state, lr, SEED, made_for, updates)
        lagging = rule if self.entry.lags else None
        if rule.updates.lagging is not lagging:
            rule.updates.lag_under(lagging)
        rule.set_lr(group["lr"])
        return rule

    def _next_rule(self, p: Tensor) -> RowRule:
        """The rule of the step that a backward pass takes on ``p``, a table of ``apply_in_backward``."""
        self._opt_called = True  # so that schedulers know that a step was taken
        return self._row_rule(self.param_groups[0], p)

    def _fitted_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
        """The optimizer's state of ``p``, completed, and in the dtype and on the device that the rule needs."""
        state: dict[str, Tensor] = self.state[p]
        if any(state.get(name) is None for name in ("step", *self.entry.averages)):
            known = {name: value for name, value in state.items() if value is not None}
            state.update({**self._initial_state(group, p), **known})
        state["step"] = torch.as_tensor(state["step"], dtype=torch.int64, device=p.device)
        shape, dtype = p.shape[:1] if self.entry.by_row else p.shape, self._average_dtype(p)
        for name in self.entry.averages:
            average = state[name].to(p.device).contiguous()
            if average.shape != shape:
                rule = f"must be {tuple(shape)}, as the table's rows: it was saved under another scheme or size"
                raise ValueError(f"{name} {tuple(average.shape)} of the optimizer's state {rule}")
            state[name] = average if average.dtype == dtype else converted_state(average, dtype)
        return state

    def _init_dense_state(self, p: Tensor) -> None:
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
        dense: dict[int, dict[str, Any]] = {}
        with unwatched():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and self._is_by_row(p):
                        self._step_by_row(group, p)
                    elif p.grad is not None:
                        if not self.state[p]:
                            self._init_dense_state(p)
                        dense.setdefault(id(group), {**group, "params": []})["params"].append(p)
        if dense:
            self._dense.param_groups, self._dense.state = list(dense.values()), self.state
            self._dense.step()
            self._dense.param_groups = []  # ``compress_`` looks for optimizers that hold tables: it must find only self
        return loss

    def _step_by_row(self, group: dict[str, Any], p: Tensor) -> None:
        grad: Any = p.grad
        if grad.is_sparse:
            rows, values = grad._indices()[0], grad._values()
        else:  # DistributedDataParallel, for one, makes it dense
            rows = (grad != 0).any(1).nonzero()[:, 0]
            values = grad[rows]
        update_([(rows, values)], p, self._row_rule(group, p))

    def _is_by_row(self, p: Tensor) -> bool:
        """Whether ``p``, which has a gradient, is updated row by row."""
        assert p.grad is not None
        return p.grad.is_sparse or p in self._row_rules or self._has_rows(p)

    def _has_rows(self, p: Tensor) -> bool:
        """Whether ``p`` is a table that is updated row by row whatever its gradient is."""
        tables = module_of(p)
        return tables is not None and (tables.sparse or self.state_dtype != "float32")

    def flush(self) -> None:
        """Bring every row up to date.

        Whoever reads or writes the parameter meets rows that are up to date without it. Only a tensor that shares the
        parameter's memory since before the last step (``.data``, ``.detach()``, ``.numpy()``) needs it.
        """
        for updates in self._owners():
            updates.flush_()

    def _owners(self) -> list[Updates]:
        """The ``Updates`` of all tables."""
        found = (updates_of(p) for group in self.param_groups for p in group["params"])
        return [updates for updates in found if updates is not None]

    def live_state(self) -> dict[Tensor, list[Tensor]]:
        """The tensors of the rule's state for each parameter that is updated row by row.

        Rows are not brought up to date first. A run that is resumed from these tensors and ``stored`` continues bit by
        bit as if it had not stopped.
        """
        return {p: [*present(row_rule.state)] for p, row_rule in self._row_rules.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state, as the ``torch.optim`` class would have it, with every row up to date."""
        self.flush()
        saved = super().state_dict()
        for i, values in saved["state"].items():
            codes = {n for n, value in values.items() if isinstance(value, Tensor) and value.dtype == torch.uint8}
            values = saved["state"][i] = {n + CODES * (n in codes): value for n, value in values.items()}
            if isinstance(step := values.get("step"), Tensor) and not step.is_floating_point():
                values["step"] = step.float()  # torch's foreach code rejects integers
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this optimizer or the ``torch.optim`` class has saved."""
        self.flush()
        state = {i: {n.removesuffix(CODES): v for n, v in each.items()} for i, each in state_dict["state"].items()}
        state_dict = {**state_dict, "state": state}
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            self._check(group)
            for p, i in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(i, {}).items():
                    # torch has converted it to the parameter's dtype
                    if name in self.entry.averages and (accumulator(p) != p.dtype or value.dtype in NARROW):
                        self.state[p][name] = value.to(p.device)

    def remove(self) -> None:
        """Undo ``apply_in_backward``: from now on ``stored`` gets gradients, and ``step`` applies them.

        Tables that another optimizer updates by now are left to it.
        """
        for updates in self._owners():
            if updates.collector is not None and updates.collector.optimizer is self:
                updates.collect_in(None)
