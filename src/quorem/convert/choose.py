"""How each table of a model will be stored, as the caller asks or by a plan, and how many bytes it will take."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..embeddings import Embedding
from ..optimizer_names import Optimizer
from ..planner import Plan, joined_modules, modules_of, plan_modules
from ..planner.budget import parse_bytes
from ..planner.footprint import TrainedStorage
from ..schemes import Full, Scheme
from .groups import WeightGroup

MOST_TABLES = 4  # the most stored tables of a planned table


@dataclass(frozen=True, eq=False)
class Choice:
    """How one table will be stored, and why."""

    scheme: Scheme
    why: str = ""
    dtype: torch.dtype | None = None  # None keeps the dtype of the table
    ranked: bool = True  # whether the ids are ranked by frequencies, if these are given
    frequencies: Tensor | None = None  # how often each id occurs


def choices_given(
    scheme_or_plan: Any, groups: list[WeightGroup], names: list[str], frequencies: Mapping[str, Tensor]
) -> dict[str, Choice]:
    """The choice of each group, by the name of the group, for a scheme or mapping that the caller gave."""
    if isinstance(scheme_or_plan, Scheme):
        return {group.name: Choice(scheme_or_plan, frequencies=_frequencies_of(group, frequencies)) for group in groups}
    if not isinstance(scheme_or_plan, Mapping):
        kind = type(scheme_or_plan).__name__
        raise TypeError(f"scheme_or_plan ({kind}) must be a Scheme, or a mapping of module names to schemes")
    for name, scheme in scheme_or_plan.items():
        if name not in names:
            raise ValueError(f"scheme_or_plan ({name!r}) must be named as a table of the model: {', '.join(names)}")
        if not isinstance(scheme, Scheme):
            raise TypeError(f"scheme_or_plan[{name!r}] ({scheme!r}) must be a Scheme")
    chosen = {name: Choice(scheme) for name, scheme in scheme_or_plan.items()}
    if isinstance(scheme_or_plan, Plan):
        entries = scheme_or_plan.tables
        chosen = {entry.name: Choice(entry.scheme, entry.why, entry.dtype, entry.ranked) for entry in entries}
    choices: dict[str, Choice] = {}
    for group in groups:
        named = [chosen[name] for name in group.members if name in chosen]
        if len({choice.scheme for choice in named}) > 1:
            raise ValueError(f"scheme_or_plan must have one scheme for {', '.join(group.members)}: they share a weight")
        if named:
            choice = replace(named[0], frequencies=_frequencies_of(group, frequencies))
            if isinstance(scheme_or_plan, Plan) and choice.ranked and choice.frequencies is None:
                raise ValueError(f"frequencies of {group.name!r} must be given: the plan ranks its ids by them")
            choices[group.name] = choice
    return choices


def choices_planned(
    groups: list[WeightGroup], budget: int | str, kind: Optimizer | None, frequencies: Mapping[str, Tensor]
) -> dict[str, Choice]:
    """Plan the tables that can be replaced, with the part of the budget that the other tables leave."""
    replaceable = {group.name: group.first for group in groups if not group.reason}
    reserved = sum(sum(kept_bytes(group.first, kind)) for group in groups if group.reason)
    # Modules that share a weight have a layout each; the plan counts only the layout of the first.
    extra = [module for group in groups if not group.reason for module in list(group.members.values())[1:]]
    reserved += sum(_storage(module, kind).layout(MOST_TABLES) for module in extra)
    if not replaceable:
        if reserved > (size := parse_bytes(budget)):
            raise ValueError(f"budget ({budget!r}, {size} bytes) must be at least {reserved}: no table can be replaced")
        return {}
    counts = {group.name: _frequencies_of(group, frequencies) for group in groups if group.name in replaceable}
    known = {name: count for name, count in counts.items() if count is not None}
    collections = {group.name: id(group.collection) for group in groups if group.collection is not None}
    modules = joined_modules(modules_of(replaceable), collections)
    planned = plan_modules(modules, budget, optimizer=kind, frequencies=known, reserved=reserved, bits=())
    return {
        table.name: Choice(table.scheme, table.why, ranked=table.ranked, frequencies=counts[table.name])
        for table in planned.tables
    }


def choice_of(group: WeightGroup, choices: Mapping[str, Choice]) -> tuple[Choice | None, str]:
    """How a group will be stored; or None, and why it stays as it is."""
    choice = choices.get(group.name)
    if group.reason:
        return None, group.reason
    if choice is None:
        return None, "the plan does not name it"
    module = group.first
    spec = choice.scheme.spec(module.num_embeddings, module.embedding_dim)
    narrower = choice.dtype not in (None, module.weight.dtype)
    if spec.operation == "feature":
        return None, "feature generation gives several vectors an id, which the model does not expect"
    if narrower:
        return choice, ""
    if spec.fallback:
        return None, spec.fallback
    if isinstance(choice.scheme, Full) and not choice.scheme.force:
        return None, choice.why or "the plan keeps it full"
    return choice, ""


def _frequencies_of(group: WeightGroup, frequencies: Mapping[str, Tensor]) -> Tensor | None:
    """The frequencies of a group's ids, which may be given for any of its members; None if they are not given."""
    return next((frequencies[name] for name in group.members if name in frequencies), None)


def kept_bytes(module: Any, kind: Optimizer | None) -> tuple[int, int]:
    """Bytes of a table that stays as it is, and of the optimizer's state for it."""
    rate = _storage(module, kind).rate(module.embedding_dim)
    return module.weight.nbytes, module.num_embeddings * rate.row_state


def _storage(module: Any, kind: Optimizer | None) -> TrainedStorage:
    """The storage of an ``nn.Embedding``."""
    return TrainedStorage((module.embedding_dim,), (1,), module.weight.dtype, module.sparse, kind)


def state_bytes(module: Embedding, kind: Optimizer | None) -> int:
    """Bytes of the state that an optimizer keeps for the stored rows."""
    rows, width = module.stored.shape
    storage = TrainedStorage((width,), (1,), module.stored.dtype, module.sparse, kind)
    rate = storage.rate(width)
    stored = len(module.extents[0]) + sum(map(len, module.pools.values()))
    return rows * rate.row_state + stored * rate.table_state + storage.shared_state()


def size_of(module: nn.Module) -> int:
    """Bytes of all tensors of a module."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
