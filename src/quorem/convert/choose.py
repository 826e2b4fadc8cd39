"""How each table of a model will be stored, as the caller asks or by a plan, and how many bytes it will take."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..modules.lookup import Tables
from ..ops.declare import word_bytes
from ..ops.layout import Layout
from ..optimizer_names import StateDtype
from ..paper.schemes import Full, Scheme
from ..planner import Module, Plan, plan_modules
from ..planner.budget import parse_bytes
from ..planner.footprint import StateBytes
from .groups import ChosenScheme, WeightGroup


def choose(
    groups: list[WeightGroup],
    scheme_or_plan: Any,
    budget: int | str | None,
    counted: StateBytes,
    frequencies: Mapping[str, Tensor],
    fit: bool,
) -> None:
    """Set ``choice`` and ``ranking`` of each group; or its ``reason``, if it stays as it is."""
    names = [name for group in groups for name in group.members]
    for name in frequencies:
        if name not in names:
            raise ValueError(f"frequencies ({name!r}) must be named as a table of the model: {', '.join(names)}")
    for group in groups:
        group.counts = next((frequencies[name] for name in group.members if name in frequencies), None)
    if budget is not None:
        scheme_or_plan = _planned(groups, budget, counted)
    plan = scheme_or_plan if isinstance(scheme_or_plan, Plan) else None
    chosen = _by_name(scheme_or_plan, names)
    for group in groups:
        choices = [chosen[name] for name in group.members if name in chosen]
        if len({choice.scheme for choice in choices}) > 1:
            raise ValueError(f"scheme_or_plan must have one scheme for {', '.join(group.members)}: they share a weight")
        if not group.reason:
            group.reason = _reason(group, choices[0], plan) if choices else "the plan does not name it"
        if group.reason:
            continue
        group.choice = choices[0]
        group.ranking = group.counts if group.choice.ranked else None
        if plan is not None and group.choice.ranked and group.counts is None:
            group.ranking = "loaded"
            if fit or group.collection is not None:
                raise ValueError(f"frequencies of {group.name!r} must be given: the plan ranks its ids by them")


def _by_name(scheme_or_plan: Any, names: list[str]) -> dict[str, ChosenScheme]:
    """The scheme that the caller or the planner chose for each module."""
    if isinstance(scheme_or_plan, Scheme):
        return dict.fromkeys(names, ChosenScheme(scheme_or_plan))
    if not isinstance(scheme_or_plan, Mapping):
        kind = type(scheme_or_plan).__name__
        raise TypeError(f"scheme_or_plan ({kind}) must be a Scheme, or a mapping of module names to schemes")
    for name, scheme in scheme_or_plan.items():
        if name not in names:
            raise ValueError(f"scheme_or_plan ({name!r}) must be named as a table of the model: {', '.join(names)}")
        if not isinstance(scheme, Scheme):
            raise TypeError(f"scheme_or_plan[{name!r}] ({scheme!r}) must be a Scheme")
    if isinstance(scheme_or_plan, Plan):
        return {t.name: ChosenScheme(t.scheme, t.why, t.dtype, t.ranked) for t in scheme_or_plan.tables}
    return {name: ChosenScheme(scheme) for name, scheme in scheme_or_plan.items()}


def _planned(groups: list[WeightGroup], budget: int | str, counted: StateBytes) -> Mapping[str, Scheme]:
    """Plan the tables that can be replaced, with the part of the budget that the other tables leave."""
    replaceable = [group for group in groups if not group.reason]
    kept = [group.first for group in groups if group.reason]
    reserved = sum(module.weight.nbytes + state_bytes(module, counted) for module in kept)
    if not replaceable:
        if reserved > (size := parse_bytes(budget)):
            reasons = "; ".join(f"{group.name}: {group.reason}" for group in groups)
            raise ValueError(
                f"budget ({budget!r}, {size} bytes) must be at least {reserved}: no table can be replaced ({reasons})"
            )
        return {}
    modules: dict[Any, Module] = {}
    for group in replaceable:
        module = Module.of(group.name, group.first, copies=len(group.members))
        if not counted.lags:  # SparseAdam, which does not train matrices
            module = replace(module, lags=False, row_multiple=module.tables[0].embedding_dim)
        if group.collection is not None:
            # TorchRec's kernels will update the tables of its collection in the backward pass.
            tables = modules[group.collection].tables if group.collection in modules else ()
            multiple = max(4, module.row_multiple)
            module = replace(module, tables=tables + module.tables, sparse=True, lags=False, row_multiple=multiple)
        modules[group.collection or group] = module
    counts = {group.name: group.counts for group in replaceable if group.counts is not None}
    options: dict[str, Any] = {"state_dtype": counted.state_dtype, "reserved": reserved}
    return plan_modules(list(modules.values()), budget, counted.optimizer, counts, bits=(), **options)


def _reason(group: WeightGroup, choice: ChosenScheme, plan: Plan | None) -> str:
    """Why a group stays as it is, though it could be replaced; empty if it is stored as ``choice`` says.

    A plan may count on a full table's module: only quorem's are quantized, or have few bits for dense gradients' state.
    """
    module, width = group.first, choice.scheme.width
    if width is not None and width >= module.embedding_dim:
        return f"rows of {width} numbers are no narrower than its vectors"
    spec = choice.scheme.spec(module.num_embeddings, module.embedding_dim)
    if spec.operation == "feature":
        return "feature generation gives several vectors an id, which the model does not expect"
    in_few_bits = plan is not None and plan.state_dtype != "float32" and group.collection is None and not module.sparse
    must_be_ours = in_few_bits or (plan is not None and plan.bits is not None)
    if choice.dtype in (None, module.weight.dtype) and not must_be_ours:
        if spec.fallback:
            return spec.fallback
        if isinstance(choice.scheme, Full) and not choice.scheme.force and not spec.is_narrow:
            return choice.why or "the plan keeps it full"
    return "" if group.collection is None else str(group.collection.reason_against(choice, spec))


def state_bytes(module: Any, counted: StateBytes) -> int:
    """Bytes of the state that an optimizer keeps for an embedding, torch's or composed."""
    is_ours = isinstance(module, Tables)
    rows, tables = (module.stored, len(module.all_extents)) if is_ours else (module.weight, 1)
    state_dtype: StateDtype = counted.state_dtype if is_ours or module.sparse else "float32"  # as torch keeps it
    state = replace(counted, dtype=rows.dtype, sparse=module.sparse, state_dtype=state_dtype)
    of_others = sum(state.whole(p.numel(), p.dtype) for p in module.parameters() if p is not rows)
    return len(rows) * state.row(rows.shape[1]) + tables * state.table + state.shared + of_others


def size_of(module: Tables, shared: bool = False) -> int:
    """Bytes of all tensors of a module, with the words that kernels keep for its lists; without shared parameters."""
    tensors = [*module.buffers(), *([] if shared else module.parameters())]
    layout: Layout | None = vars(module).get("_layout")  # None on the meta device, or if a file will list the ids
    return sum(tensor.nbytes for tensor in tensors) + (0 if layout is None else word_bytes(layout))
