"""Find the optimizers that hold replaced parameters, give them the new ones, and convert their state.

The gradient of a row is the sum of the gradients of the ids that read it, times the other factors where rows are
multiplied. So the new average of gradients is the sum of the ids' averages times the factors, and the new average or
sum of squares is the sum of theirs times the squares of the factors. This is exact if no two ids of a row were in one
batch, and the fit of the table is exact. The gradient of a narrow row is that of the vector times the matrix; its
squares take the squares of the matrix, as if the columns of a gradient were independent. So the backward pass of a
lookup converts averages, and that of a lookup of squared rows converts squares.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer

from ..modules.embedding import Embedding
from ..modules.holders import exchange_, held_by, unwrapped
from ..ops.declare import call
from ..ops.rounding import converted_state
from ..ops.rows import IdBatch
from ..ops.state import NARROW
from ..optim import RowOptimizer, RowWiseAdagrad
from ..optimizer_names import Optimizer

SQUARES = ("sum", "exp_avg_sq", "max_exp_avg_sq", "square_avg")
FIRST = ("exp_avg", "momentum_buffer", "grad_avg")
BLOCK_NUMBERS = 2**20  # numbers of a state that are processed at a time
# Of torch's classes, by how many numbers they keep for each weight. NAdam and ASGD keep more scalars than is counted.
NAMES: dict[str, Optimizer] = {"Adagrad": "adagrad", "Muon": "adagrad", "AdamW": "adamw"}
NAMES |= dict.fromkeys(("Adam", "SparseAdam", "RAdam", "Adamax", "Adadelta", "Rprop"), "adam")


def optimizer_name(optimizer: TorchOptimizer | Optimizer | None) -> Optimizer | None:
    """The planner's name for an optimizer; None if there is none, or its state has no fixed size for a weight."""
    if optimizer is None or isinstance(optimizer, str):
        return optimizer  # checked by the planner
    if not isinstance(optimizer, TorchOptimizer):
        raise TypeError(f"optimizer ({type(optimizer).__name__}) must be an optimizer, its name, or None")
    optimizer, groups = unwrapped(optimizer), optimizer.param_groups
    if isinstance(optimizer, RowOptimizer):
        return cast(Optimizer, optimizer.rule)
    kind = type(optimizer).__name__
    if kind in ("SGD", "RMSprop"):
        numbers = max((kind == "RMSprop") + bool(g["momentum"]) + bool(g.get("centered")) for g in groups)
        by_number: tuple[Optimizer, ...] = ("sgd", "adagrad", "adam", "amsgrad")
        return by_number[numbers]
    return "amsgrad" if any(group.get("amsgrad") for group in groups) else NAMES.get(kind)


def check_followed(optimizer: TorchOptimizer, parameters: Iterable[Tensor]) -> None:
    """Raise ValueError unless an optimizer can be given other parameters in place of these, and its state converted."""
    kind, held = type(optimizer).__name__, held_by(optimizer, {id(p): p for p in parameters})
    afterwards = "change the model before the optimizer's first step, or delete it and make it anew afterwards"
    if isinstance(optimizer, torch.optim.LBFGS) and held and optimizer.state:
        raise ValueError(f"optimizer ({kind}) has a history over all parameters together: {afterwards}")
    groups = [id(group["params"]) for group in optimizer.param_groups]
    for name, value in vars(optimizer).items():
        if isinstance(value, list) and id(value) not in groups and any(each is p for each in value for p in held):
            raise ValueError(f"optimizer ({kind}) also holds a table in {name}: {afterwards}")
    for p in held:
        for name, value in optimizer.state.get(p, {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            if name not in (*SQUARES, *FIRST) or value.shape not in (p.shape, p.shape[:1]):
                raise ValueError(
                    f"optimizer ({kind}) has the state {name!r} {tuple(value.shape)} of a table {tuple(p.shape)}, which"
                    f" cannot be converted: {afterwards}"
                )


def has_state(optimizer: TorchOptimizer, p: Tensor) -> bool:
    """Whether an optimizer has gathered a state for a parameter, beyond the one that it starts with."""
    values = optimizer.state.get(p, {}).items()
    return any(name in (*SQUARES, *FIRST) and value is not None and bool(value.any()) for name, value in values)


def follow_(optimizer: TorchOptimizer, new: Mapping[Tensor, Embedding]) -> list[str]:
    """Replace the old parameters in an optimizer by the new ones, with their state; returns what was done."""
    states = exchange_(optimizer, {old: list(module.parameters()) for old, module in new.items()})
    for old, state in states.items():
        start = next((g.get("initial_accumulator_value", 0) for g in optimizer.param_groups), 0)
        stored = new[old].stored
        kept = {name: _state_of_rows(name, value, old, new[old], start) for name, value in state.items()}
        if isinstance(optimizer, RowWiseAdagrad) and "sum" in kept and kept["sum"].dim() == 2:
            kept["sum"] = kept["sum"].mean(1)
        if kept:
            optimizer.state[stored] = kept
    kind = type(optimizer).__name__
    return [f"{kind} now has the rows of {len(states)} tables, and their state"] if states else []


def _state_of_rows(name: str, value: Any, weight: Tensor, module: Embedding, start: float) -> Any:
    """One entry of a parameter's state, converted from the table ``weight`` to the stored rows of ``module``.

    ``start`` is what a sum of squares began with.
    """
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.dtype in NARROW:  # the optimizer converts it back
        value = converted_state(value, torch.float32)
    if value.shape == weight.shape[:1]:  # one number for each row
        value = value[:, None].expand(weight.shape)
    power = 2 if name in SQUARES else 1
    start = start if name == "sum" else 0
    factors, matrix = module.stored.detach().float().pow(power), module.projection()
    total = torch.full_like(factors, start)
    for ids in torch.arange(len(weight), device=total.device).split(max(1, BLOCK_NUMBERS // weight.shape[1])):
        values = value[ids].float() - start
        values = values if matrix is None else values @ matrix.detach().float().pow(power).T
        values = values.view(len(ids), -1, module.width)
        total.index_add_(0, *call("row_grads", values, IdBatch(ids[:, None]), factors, module.layout))
    return total.to(value.dtype)
