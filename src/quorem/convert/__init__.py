"""Compress the embeddings of an existing model, in place: one line, no other edit."""

import gc
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ..bags import EmbeddingBag
from ..checks import check_int
from ..embeddings import Embedding
from ..init import deviation
from ..planner import Plan, modules_of, plan_modules
from ..planner.budget import parse_bytes
from ..planner.footprint import Optimizer, Storage, check_optimizer
from ..schemes import Full, Scheme
from ..tables import Tables
from ..tied import TiedLinear
from .follow import follow_, name_of
from .groups import WeightGroup, groups_in, leave_out
from .report import Entry, Report
from .swap import keep_, swap_

MOST_TABLES = 4  # that a planned table is stored in

__all__ = ["Entry", "Report", "compress_", "decompress_"]


@dataclass(frozen=True)
class Choice:
    """How one table is to be stored, and why."""

    scheme: Scheme
    why: str = ""
    dtype: torch.dtype | None = None  # that of the table where None
    ranked: bool = True  # whether frequencies, where given, rank its ids


def compress_(
    model: nn.Module,
    scheme_or_plan: Scheme | Mapping[str, Scheme] | None = None,
    *,
    budget: int | str | None = None,
    threshold: int = 0,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
    fit: bool = False,
    optimizer: torch.optim.Optimizer | str | None = None,
    frequencies: Mapping[str, Tensor] | None = None,
) -> Report:
    """Replace every ``nn.Embedding`` and ``nn.EmbeddingBag`` in ``model`` by a composed one, in place.

    A collection of TorchRec's, not yet sharded, is replaced by that of ``quorem.integrations.torchrec``; its tables are
    named by the path of their module, as all others.

    Shared modules and tied weights stay shared; ``padding_idx``, mode, dtype, device, ``sparse``, ``requires_grad``,
    hooks and training mode are kept. A linear layer whose weight is an embedding's becomes a ``TiedLinear``. What
    cannot be replaced stays, and the report says why. Lists, tuples, dicts and attributes of modules, and the
    optimizer, that hold a replaced module or parameter are given the new one, and the report says so.

    Args:
        model: the model; works on the meta device too.
        scheme_or_plan: one scheme for all tables, or a mapping of module name to scheme, such as a ``quorem.plan``.
        budget: instead, bytes that all tables and their optimizer state may take, as a number or such as "2GB"; tables
            that cannot be replaced count too.
        threshold: tables of at most this many ids stay as they are.
        filter_fn: called with name and module; tables for which it is false stay as they are.
        fit: fit the stored rows to the trained tables (least squares); else they are drawn anew, with the deviation of
            the table that they replace.
        optimizer: the optimizer of the model, whose parameters and state follow; for a budget also its name, such as
            "adagrad", or None for the tables alone.
        frequencies: how often each id occurs, by module name: weights of a plan and of the fit, and for a scheme that
            is given the ranks of ``HotCold``.

    Returns:
        What became of each table.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if neither or both of scheme and budget are given, a name is unknown, or the budget is too small.

    >>> from quorem import QR
    >>> model = nn.Sequential(nn.EmbeddingBag(10_000, 16), nn.Linear(16, 1))
    >>> report = compress_(model, QR(num_collisions=4))
    >>> model[0].num_parameters, report.swapped
    (40064, ['0'])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model ({type(model).__name__}) must be an nn.Module")
    if (scheme_or_plan is None) == (budget is None):
        raise ValueError("scheme_or_plan or budget must be given, and not both")
    if isinstance(model, nn.Embedding | nn.EmbeddingBag):
        raise TypeError(
            f"model ({type(model).__name__}) must contain embeddings: one alone cannot be replaced in place"
        )
    check_int("threshold", threshold, 0)
    kind = name_of(optimizer)
    check_optimizer(kind)
    groups = groups_in(model)
    torchrec = _torchrec()
    collections = [] if torchrec is None else torchrec.collections_in(model, groups)
    names = [name for group in groups for name in group.members]
    for name in frequencies or {}:
        if name not in names:
            raise ValueError(f"frequencies ({name!r}) must be named as a table of the model: {', '.join(names)}")
    leave_out(model, groups, threshold, filter_fn)
    if budget is None:
        choices = _given(scheme_or_plan, groups, names, frequencies or {})
    else:
        choices = _planned(groups, budget, kind, frequencies or {})
    report = Report()
    replaced = _replace(model, groups, collections, choices, fit, frequencies or {}, optimizer, kind, report)
    del groups, collections  # they hold what was replaced
    _check_freed(replaced, report)
    return report


def decompress_(model: nn.Module) -> Report:
    """Replace every composed ``Embedding`` and ``EmbeddingBag`` in ``model`` by the ``torch.nn`` module it stands for.

    Collections of ``quorem.integrations.torchrec`` become TorchRec's own. A ``TiedLinear`` becomes a linear layer whose
    weight is the embedding's again.

    Args:
        model: the model, which is changed.

    Returns:
        What became of each table.

    >>> from quorem import QR
    >>> model = nn.Sequential(nn.Embedding(10_000, 16))
    >>> _ = compress_(model, QR(num_collisions=4))
    >>> decompress_(model).swapped, model[0].weight.shape
    (['0'], torch.Size([10000, 16]))
    """
    report = Report()
    weights: dict[Tensor, nn.Parameter] = {}
    modules: dict[nn.Module, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, Tables):
            continue
        before = _size(module)
        several = module.specs[0].operation == "feature"
        if (
            type(module) not in (Embedding, EmbeddingBag)
            or several
            or module.raw_ids[0]
            or module.unknown[0] != "error"
        ):
            why = f"{type(module).__name__} stands for no module of torch.nn"
            report.entries.append(Entry(name, 0, 0, before, before, 0, None, why))
            continue
        assert isinstance(module, Embedding)
        weight = weights.get(module.stored)
        shared = weight is not None
        if weight is None:
            weight = nn.Parameter(module.to_dense().detach(), requires_grad=module.stored.requires_grad)
            weights[module.stored] = weight
        modules[module] = _plain(module, weight)
        sizes = (module.num_embeddings, module.embedding_dim, before, 0 if shared else weight.nbytes, 0)
        report.entries.append(Entry(name, *sizes, Full(), "decompressed"))
    for tied in list(model.modules()):
        if isinstance(tied, TiedLinear) and tied.embedding in modules:
            linear = nn.Linear(tied.in_features, tied.out_features, bias=False, device="meta")
            linear.weight = weights[tied.embedding.stored]
            linear.bias = tied.bias  # type: ignore[assignment]
            keep_(tied, linear)
            modules[tied] = linear
    if torchrec := _torchrec():
        report.entries += torchrec.decompress(model, modules)
    report.references += swap_(model, modules, weights)
    return report


def _given(
    scheme_or_plan: Any, groups: list[WeightGroup], names: list[str], frequencies: Mapping[str, Tensor]
) -> dict[str, Choice]:
    """The choice of each group, by its first name."""
    if isinstance(scheme_or_plan, Scheme):
        return {group.name: Choice(scheme_or_plan) for group in groups}
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
            choices[group.name] = named[0]
            if isinstance(scheme_or_plan, Plan) and named[0].ranked and _counts(group, frequencies) is None:
                raise ValueError(f"frequencies of {group.name!r} must be given: the plan ranks its ids by them")
    return choices


def _planned(
    groups: list[WeightGroup], budget: int | str, kind: Optimizer | None, frequencies: Mapping[str, Tensor]
) -> dict[str, Choice]:
    """A plan for the tables that can be replaced, in what the others leave of the budget."""
    replaceable = {group.name: group.first for group in groups if not group.reason}
    reserved = sum(sum(_kept_bytes(group.first, kind)) for group in groups if group.reason)
    # Modules that share a weight have a layout each; the plan counts the first one's.
    extra = [module for group in groups if not group.reason for module in list(group.members.values())[1:]]
    reserved += sum(_storage(module, kind).layout(MOST_TABLES) for module in extra)
    counts = {group.name: count for group in groups if (count := _counts(group, frequencies)) is not None}
    if not replaceable:
        if reserved > (size := parse_bytes(budget)):
            raise ValueError(f"budget ({budget!r}, {size} bytes) must be at least {reserved}: no table can be replaced")
        return {}
    counts = {name: count for name, count in counts.items() if name in replaceable}
    planned = plan_modules(
        modules_of(replaceable), budget, optimizer=kind, frequencies=counts, reserved=reserved, bits=()
    )
    return {table.name: Choice(table.scheme, table.why, ranked=table.ranked) for table in planned.tables}


def _replace(
    model: nn.Module,
    groups: list[WeightGroup],
    collections: list[Any],
    choices: Mapping[str, Choice],
    fit: bool,
    frequencies: Mapping[str, Tensor],
    optimizer: Any,
    kind: Optimizer | None,
    report: Report,
) -> dict[str, "weakref.ref[Tensor]"]:
    """Replace the embeddings of the groups; returns references to the old weights by name, none of which keeps it."""
    modules: dict[nn.Module, nn.Module] = {}
    by_weight: dict[Tensor, Embedding] = {}
    watched: dict[str, weakref.ref[Tensor]] = {}
    for group in groups:
        if group.collection is not None:
            continue
        choice, reason = _choice(group, choices)
        counts = _counts(group, frequencies)
        new: Embedding | None = None
        for name, module in group.members.items():
            if choice is None:
                after, state = _kept_bytes(module, kind)
            else:
                previous, new = new, _composed(module, choice, counts, fit, new)
                modules[module] = new
                after = _size(new) - (0 if previous is None else new.stored.nbytes)
                state = _state_bytes(new, kind)
            shared = name != group.name
            why = reason if choice is None else choice.why
            report.entries.append(
                Entry(
                    name,
                    module.num_embeddings,
                    module.embedding_dim,
                    0 if shared else module.weight.nbytes,
                    0 if shared and choice is None else after,
                    0 if shared else state,
                    None if choice is None else choice.scheme,
                    f"shares the weight of {group.name}" if shared and choice is not None else why,
                )
            )
        if new is not None:
            weight = group.first.weight
            by_weight[weight], watched[group.name] = modules[group.first], weakref.ref(weight)  # type: ignore[assignment]
    for collection in collections:
        members = list(collection.groups.values())
        chosen = {group.name: collection.checked(group, *_choice(group, choices)) for group in members}
        counts_of = {group.name: _counts(group, frequencies) for group in members}
        modules |= collection.replacement(chosen, counts_of, fit)
        report.entries += collection.entries(chosen, modules.get(collection.module), kind)
        if collection.module in modules:
            watched |= {group.name: weakref.ref(group.first.weight) for group in members}
    order = {name: i for i, name in enumerate(name for group in groups for name in group.members)}
    report.entries.sort(key=lambda entry: order[entry.name])
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module.weight in by_weight:
            modules[module] = TiedLinear(by_weight[module.weight], module.bias)
            keep_(module, modules[module])
            report.references.append(f"{name} is tied to an embedding: it scores by the composed table")
    report.references += swap_(model, modules, {weight: new.stored for weight, new in by_weight.items()})
    if isinstance(optimizer, torch.optim.Optimizer):
        report.references += follow_(optimizer, by_weight)
        for collection in collections:
            if collection.module in modules:
                report.references += collection.follow_(optimizer, modules[collection.module])
    return watched


def _torchrec() -> Any:
    """The module that knows TorchRec's collections; None where TorchRec is not loaded, hence in no model."""
    return import_module(".torchrec", __package__) if "torchrec.modules.embedding_modules" in sys.modules else None


def _choice(group: WeightGroup, choices: Mapping[str, Choice]) -> tuple[Choice | None, str]:
    """How a group is to be stored, or None and why it stays as it is."""
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


def _composed(module: Any, choice: Choice, counts: Tensor | None, fit: bool, shared: Embedding | None) -> Embedding:
    """The module that takes the place of an ``nn.Embedding`` or ``nn.EmbeddingBag``."""
    weight = module.weight
    options: dict[str, Any] = {"padding_idx": module.padding_idx, "sparse": module.sparse}
    options |= {"device": weight.device, "dtype": choice.dtype or weight.dtype}
    if choice.ranked:
        options["frequencies"] = counts
    if not fit and not weight.is_meta:
        options["init_std"] = deviation(weight)
    new: Embedding
    if isinstance(module, nn.EmbeddingBag):
        options |= {"mode": module.mode, "include_last_offset": module.include_last_offset}
        new = EmbeddingBag(module.num_embeddings, module.embedding_dim, choice.scheme, **options)
    else:
        new = Embedding(module.num_embeddings, module.embedding_dim, choice.scheme, **options)
    if shared is not None:
        new.stored = shared.stored
    elif fit and not weight.is_meta:
        new.fit_(weight.detach(), counts)
    new.stored.requires_grad_(weight.requires_grad)
    keep_(module, new)
    return new


def _plain(module: Embedding, weight: nn.Parameter) -> nn.Module:
    """The module of ``torch.nn`` that a composed one stands for."""
    n, d = module.num_embeddings, module.embedding_dim
    options: dict[str, Any] = {"padding_idx": module.padding_idx, "sparse": module.sparse, "device": "meta"}
    new: nn.Embedding | nn.EmbeddingBag
    if isinstance(module, EmbeddingBag):
        new = nn.EmbeddingBag(n, d, mode=module.mode, include_last_offset=module.include_last_offset, **options)
    else:
        new = nn.Embedding(n, d, **options)
    new.weight = weight
    keep_(module, new)
    return new


def _check_freed(replaced: Mapping[str, "weakref.ref[Tensor]"], report: Report) -> None:
    """Report weights that something still holds, so that their memory is not free."""
    gc.collect()
    for name, reference in replaced.items():
        weight = reference()
        if weight is not None:
            holders = {type(holder).__name__ for holder in gc.get_referrers(weight)} - {"frame"}
            text = f"its memory is not free: something outside the model still holds it ({', '.join(sorted(holders))})"
            report.references.append(f"the old weight of {name}: {text}")


def _size(module: nn.Module) -> int:
    """Bytes of all tensors of a module."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _kept_bytes(module: Any, kind: Optimizer | None) -> tuple[int, int]:
    """Bytes of a table that stays as it is, and of the optimizer's state for it."""
    rate = _storage(module, kind).rate(module.embedding_dim)
    return module.weight.nbytes, module.num_embeddings * rate.row_state


def _storage(module: Any, kind: Optimizer | None) -> Storage:
    return Storage((module.embedding_dim,), (1,), module.weight.dtype, module.sparse, kind)


def _counts(group: WeightGroup, frequencies: Mapping[str, Tensor]) -> Tensor | None:
    """The frequencies of a group's ids, given for any of its members."""
    return next((frequencies[name] for name in group.members if name in frequencies), None)


def _state_bytes(module: Embedding, kind: Optimizer | None) -> int:
    """Bytes of the state that an optimizer keeps for the stored rows."""
    rows, width = module.stored.shape
    storage = Storage((width,), (1,), module.stored.dtype, module.sparse, kind)
    rate = storage.rate(width)
    stored = len(module.extents[0]) + sum(map(len, module.pools.values()))
    return rows * rate.row_state + stored * rate.table_state + storage.shared_state()
