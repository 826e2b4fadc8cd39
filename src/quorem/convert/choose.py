"""How each table of a model will be stored, as the caller asks or by a plan, and how many bytes it will take."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..modules.embedding import Embedding
from ..modules.lookup import Tables
from ..ops import cpu, gpu
from ..ops.layout import Layout
from ..optimizer_names import Optimizer, StateDtype
from ..paper.schemes import Full, Scheme
from ..planner import Plan, joined_modules, modules_of, plan_modules
from ..planner.budget import parse_bytes
from ..planner.footprint import TrainedStorage
from ..planner.modules import held_by
from .groups import ChosenScheme, WeightGroup


def choose(
    groups: list[WeightGroup],
    scheme_or_plan: Any,
    budget: int | str | None,
    kind: Optimizer | None,
    frequencies: Mapping[str, Tensor],
    fit: bool,
    lags: bool,
    state_dtype: StateDtype = "float32",
) -> None:
    """Set ``choice`` of each group; or its ``reason``, if it stays as it is."""
    names = [name for group in groups for name in group.members]
    for name in frequencies:
        if name not in names:
            raise ValueError(f"frequencies ({name!r}) must be named as a table of the model: {', '.join(names)}")
    for group in groups:
        group.counts = next((frequencies[name] for name in group.members if name in frequencies), None)
    choices = (
        _given(scheme_or_plan, groups, names) if budget is None else _planned(groups, budget, kind, lags, state_dtype)
    )
    for group in groups:
        group.reason = group.reason or _reason(group, choices.get(group.name))
        group.choice = None if group.reason else choices[group.name]
        if group.choice is not None and group.choice.waits and (fit or group.collection is not None):
            raise ValueError(f"frequencies of {group.name!r} must be given: the plan ranks its ids by them")


def _given(scheme_or_plan: Any, groups: list[WeightGroup], names: list[str]) -> dict[str, ChosenScheme]:
    """The choice of each group, by the name of the group, for a scheme or mapping that the caller gave."""
    if isinstance(scheme_or_plan, Scheme):
        return {group.name: ChosenScheme(scheme_or_plan) for group in groups}
    if not isinstance(scheme_or_plan, Mapping):
        kind = type(scheme_or_plan).__name__
        raise TypeError(f"scheme_or_plan ({kind}) must be a Scheme, or a mapping of module names to schemes")
    for name, scheme in scheme_or_plan.items():
        if name not in names:
            raise ValueError(f"scheme_or_plan ({name!r}) must be named as a table of the model: {', '.join(names)}")
        if not isinstance(scheme, Scheme):
            raise TypeError(f"scheme_or_plan[{name!r}] ({scheme!r}) must be a Scheme")
    chosen = {name: ChosenScheme(scheme) for name, scheme in scheme_or_plan.items()}
    if isinstance(scheme_or_plan, Plan):
        entries = scheme_or_plan.tables
        bits = scheme_or_plan.bits is not None
        chosen = {
            each.name: ChosenScheme(each.scheme, each.why, each.dtype, each.ranked, will_be_quantized=bits)
            for each in entries
        }
    choices: dict[str, ChosenScheme] = {}
    for group in groups:
        named = [chosen[name] for name in group.members if name in chosen]
        if len({choice.scheme for choice in named}) > 1:
            raise ValueError(f"scheme_or_plan must have one scheme for {', '.join(group.members)}: they share a weight")
        if named:
            waits = isinstance(scheme_or_plan, Plan) and named[0].ranked and group.counts is None
            choices[group.name] = replace(named[0], waits=waits)
    return choices


def _planned(
    groups: list[WeightGroup], budget: int | str, kind: Optimizer | None, lags: bool, state_dtype: StateDtype
) -> dict[str, ChosenScheme]:
    """Plan the tables that can be replaced, with the part of the budget that the other tables leave."""
    replaceable = [group for group in groups if not group.reason]
    reserved = sum(sum(kept_bytes(group.first, kind, lags)) for group in groups if group.reason)
    if not replaceable:
        if reserved > (size := parse_bytes(budget)):
            reasons = "; ".join(f"{group.name}: {group.reason}" for group in groups)
            raise ValueError(
                f"budget ({budget!r}, {size} bytes) must be at least {reserved}: no table can be replaced ({reasons})"
            )
        return {}
    counts = {group.name: group.counts for group in replaceable if group.counts is not None}
    collections = {group.name: id(group.collection) for group in groups if group.collection is not None}
    modules = [held_by(modules_of({g.name: g.first})[0], len(g.members)) for g in replaceable]
    if state_dtype != "float32":  # an optimizer with such a state updates rows one by one, whatever their gradient
        modules = [replace(module, sparse=True) for module in modules]
    if not lags:  # SparseAdam, which does not train matrices
        modules = [replace(module, lags=False, row_multiple=module.tables[0].embedding_dim) for module in modules]
    modules = joined_modules(modules, collections)
    planned = plan_modules(
        modules,
        budget,
        optimizer=kind,
        frequencies=counts,
        reserved=reserved,
        bits=(),
        state_dtype=state_dtype,
    )
    return {table.name: ChosenScheme(table.scheme, table.why, ranked=table.ranked) for table in planned.tables}


def _reason(group: WeightGroup, choice: ChosenScheme | None) -> str:
    """Why a group stays as it is, though it could be replaced; empty if it is stored as ``choice`` says."""
    if choice is None:
        return "the plan does not name it"
    module = group.first
    spec = choice.scheme.spec(module.num_embeddings, module.embedding_dim)
    if spec.operation == "feature":
        return "feature generation gives several vectors an id, which the model does not expect"
    if choice.dtype in (None, module.weight.dtype) and not choice.will_be_quantized:
        if spec.fallback:
            return spec.fallback
        if isinstance(choice.scheme, Full) and not choice.scheme.force and not spec.is_narrow:
            return choice.why or "the plan keeps it full"
    return "" if group.collection is None else str(group.collection.reason_against(choice, spec))


def kept_bytes(module: Any, kind: Optimizer | None, lags: bool) -> tuple[int, int]:
    """Bytes of a table that stays as it is, and of the optimizer's state for it."""
    storage = TrainedStorage((module.embedding_dim,), (1,), module.weight.dtype, module.sparse, kind, lags=lags)
    rate = storage.rate(module.embedding_dim)
    return module.weight.nbytes, module.num_embeddings * rate.row_state + rate.table_state + storage.shared_state()


def state_bytes(module: Embedding, kind: Optimizer | None, lags: bool, state_dtype: StateDtype) -> int:
    """Bytes of the state that an optimizer keeps for the stored rows, and for networks and matrices."""
    rows, width = module.stored.shape
    by_one = module.sparse or state_dtype != "float32"  # such an optimizer updates rows one by one
    dtype = module.stored.dtype
    storage = TrainedStorage((width,), (1,), dtype, by_one, kind, lags=lags, state_dtype=state_dtype)
    rate = storage.rate(width)
    by_row = rows * rate.row_state + len(module.all_extents) * rate.table_state + storage.shared_state()
    others = [p for p in module.parameters() if p is not module.stored]
    dense = TrainedStorage((1,), (1,), module.dtype, False, kind)
    return by_row + sum(p.numel() * dense.rate(1).row_state + dense.shared_state() for p in others)


def size_of(module: Tables, shared: bool = False) -> int:
    """Bytes of all tensors of a module, with the words that kernels keep for its lists; without shared parameters."""
    tensors = [*module.buffers(), *([] if shared else module.parameters())]
    layout: Layout | None = vars(module).get("_layout")  # None on the meta device, or if a file will list the ids
    words = 0 if layout is None else (gpu if module.stored.is_cuda else cpu).word_bytes(layout)
    return sum(tensor.nbytes for tensor in tensors) + words
