"""Compress the embeddings of an existing model, in place: one line, no other edit."""

import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_int, check_mapping
from ..modules.embedding import Embedding
from ..modules.holders import check_not_wrapped, optimizers_of
from ..modules.tied import TiedLinear
from ..optimizer_names import Optimizer, StateDtype, check_optimizer
from ..paper.schemes import Scheme
from .build import composed_module
from .choose import choose, kept_bytes, size_of, state_bytes
from .declared_ties import declare_, tie_
from .decompress import decompress_
from .follow import check_followed, follow_, optimizer_name
from .groups import WeightGroup, check_model, groups_in, leave_out, torchrec_tools
from .report import Entry, Report
from .swap import computed_before, keep_, out_of_reach, swap_

__all__ = ["Entry", "Report", "compress_", "decompress_"]


def compress_(
    model: nn.Module,
    scheme_or_plan: Scheme | Mapping[str, Scheme] | None = None,
    *,
    scheme: Scheme | Mapping[str, Scheme] | None = None,
    plan: Mapping[str, Scheme] | None = None,
    budget: int | str | None = None,
    threshold: int = 0,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    fit: bool = False,
    optimizer: torch.optim.Optimizer | Optimizer | None = None,
    frequencies: Mapping[str, Tensor] | None = None,
) -> Report:
    """Replace every ``nn.Embedding`` and ``nn.EmbeddingBag`` in ``model`` by a composed one, in place.

    A TorchRec collection that is not yet sharded is replaced by one of ``quorem.integrations.torchrec``. Its tables
    are named by the path of their module, like all others.

    Shared modules and tied weights stay shared; ``padding_idx``, mode, dtype, device, ``sparse``, ``requires_grad``,
    hooks and training mode are kept. A linear layer whose weight is an embedding's becomes a ``TiedLinear``. Tables
    that cannot be replaced stay, and the report says why. References to a replaced module or parameter in lists,
    tuples, dicts and attributes of modules are updated and listed in the report.

    Every optimizer that holds a replaced weight, wherever it is, gets the stored rows instead, and its state is
    converted. If that is not possible, nothing is changed and the error says why.

    Args:
        model: the model; works on the meta device too.
        scheme_or_plan: one scheme for all tables, or a mapping of module name to scheme, such as a ``quorem.plan``.
        scheme: another name for ``scheme_or_plan``.
        plan: another name for ``scheme_or_plan``.
        budget: instead of ``scheme_or_plan``, bytes that all tables and their optimizer state may take, as a number or
            a string such as "2GB"; tables that cannot be replaced count too.
        threshold: tables of at most this many ids stay as they are.
        filter_fn: called with module and name; tables for which it returns false stay as they are.
        fit: whether to fit the stored rows to the trained tables (least squares). Otherwise they are drawn at random,
            with the standard deviation of the table that they replace.
        optimizer: the optimizer whose state counts: one of ``torch.optim`` or ``quorem.optim``, or a name such as
            "adagrad". None takes the one that holds the tables; if there is none, the tables alone count.
        frequencies: how often each id occurs, by module name. A plan and the fit use them as weights, and ``HotCold``
            schemes rank ids by them. A plan that ranks ids can be applied without them to a model whose
            ``state_dict`` is loaded next: it lists the hot and cold ids.

    Returns:
        A report of what was done with each table.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if not exactly one of scheme, plan and budget is given, a name is unknown, the budget is too small,
            the model is inside ``DistributedDataParallel``, or an optimizer cannot be given the stored rows.

    >>> from quorem import QR
    >>> model = nn.Sequential(nn.EmbeddingBag(10_000, 16), nn.Linear(16, 1))
    >>> report = compress_(model, QR(num_collisions=4))
    >>> model[0].num_parameters, report.swapped
    (40064, ['0'])
    """
    check_model(model, nn.Embedding | nn.EmbeddingBag)
    given = [each for each in (scheme_or_plan, scheme, plan) if each is not None]
    if len(given) + (budget is not None) != 1:
        raise ValueError("exactly one of scheme_or_plan, scheme, plan and budget must be given")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn ({filter_fn!r}) must be a function of a module and its name")
    check_int("threshold", threshold, 0)
    check_mapping("frequencies", frequencies)
    kind = optimizer_name(optimizer)
    check_optimizer(kind)
    check_not_wrapped(model)
    tie_(model)
    groups = groups_in(model)
    torchrec = torchrec_tools()
    collections = [] if torchrec is None else torchrec.collections_in(model, groups)
    leave_out(model, groups, threshold, filter_fn)
    optimizers = optimizers_of(group.first.weight for group in groups)
    kind = _counted(optimizer, optimizers, needed=budget is not None)
    lags = not any(isinstance(each, torch.optim.SparseAdam) for each in (optimizer, *optimizers))
    counted = optimizers if optimizer is None else [optimizer]
    state_dtypes: set[StateDtype] = {getattr(each, "state_dtype", "float32") for each in counted}
    state_dtype: StateDtype = state_dtypes.pop() if len(state_dtypes) == 1 else "float32"
    choose(groups, next(iter(given), None), budget, kind, frequencies or {}, fit, lags, state_dtype)
    for each in optimizers:
        check_followed(each, [group.first.weight for group in groups if group.choice is not None])
        for collection in collections:
            collection.check_followed(each)
    report, new = _replace(model, groups, collections, fit, kind, lags, state_dtype)
    for each in optimizers:
        report.references += follow_(each, new.by_weight)
        for collection in collections:
            if collection.module in new.modules:
                report.references += collection.follow_(each, new.modules[collection.module])
    old_weights, shapes = new.old_weights, {tuple(group.first.weight.shape): group.name for group in groups}
    del groups, collections, new, optimizers  # they have references to the replaced modules
    _check_freed(old_weights, report)
    report.outdated += computed_before(model, {shape: name for shape, name in shapes.items() if name in old_weights})
    report.references += out_of_reach(model)
    return report


def _counted(
    optimizer: torch.optim.Optimizer | Optimizer | None, found: list[torch.optim.Optimizer], needed: bool
) -> Optimizer | None:
    """The name of the optimizer whose state counts: the given one, or the one that holds the tables.

    Raises:
        ValueError: if it is ``needed`` for a budget, but optimizers of several kinds hold the tables, or the state of
            the class is not known.
    """
    given = optimizer is not None
    candidates = [optimizer] if given else list(found)
    names = {type(each).__name__ if isinstance(each, torch.optim.Optimizer) else each for each in candidates}
    kinds = {optimizer_name(each) for each in candidates}
    if needed and (len(kinds) > 1 or (kinds == {None} and names)):
        listed = ", ".join(sorted(map(str, names)))
        raise ValueError(
            f"optimizer ({listed}) must be one whose state can be counted: give a budget the name of one that keeps"
            " as many numbers for each weight, such as 'adam' for two, or a scheme instead of a budget"
        )
    return next(iter(kinds), None)


@dataclass
class _Replacements:
    """What takes the place of what, before anything is changed."""

    modules: dict[nn.Module, nn.Module] = field(default_factory=dict)  # new module by old module
    by_weight: dict[Tensor, Embedding] = field(default_factory=dict)  # new embedding by old weight
    old_weights: dict[str, "weakref.ref[Tensor]"] = field(default_factory=dict)  # by name of their group
    changed: list[str] = field(default_factory=list)  # what else changes, in words


def _replace(
    model: nn.Module,
    groups: list[WeightGroup],
    collections: list[Any],
    fit: bool,
    kind: Optimizer | None,
    lags: bool,
    state_dtype: StateDtype,
) -> tuple[Report, _Replacements]:
    """Replace the embeddings of the groups, and linear layers that share a weight with them."""
    report, new = Report(), _Replacements()
    for group in groups:
        if group.collection is None:
            report.entries += _replace_group(group, fit, kind, lags, state_dtype, new)
    for collection in collections:
        composed = collection.replacement(fit)
        report.entries += collection.entries(composed, kind)
        if composed is not None:
            new.modules[collection.module] = composed
            new.old_weights |= {group.name: weakref.ref(group.first.weight) for group in collection.groups.values()}
    report.references += new.changed
    order = {name: i for i, name in enumerate(name for group in groups for name in group.members)}
    report.entries.sort(key=lambda entry: order[entry.name])
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module.weight in new.by_weight:
            embedding = new.by_weight[module.weight]
            new.modules[module] = TiedLinear(embedding, module.bias)
            keep_(module, new.modules[module])
            padding = "" if embedding.padding_idx is None else f", where padding ({embedding.padding_idx}) is zeros"
            report.references.append(f"{name} is tied to an embedding: it scores by the composed table{padding}")
    parameters = {weight: embedding.stored for weight, embedding in new.by_weight.items()}
    report.references += swap_(model, new.modules, parameters)
    declare_(model)
    return report, new


def _replace_group(
    group: WeightGroup, fit: bool, kind: Optimizer | None, lags: bool, state_dtype: StateDtype, new: _Replacements
) -> list[Entry]:
    """Add the composed modules of one group to ``new``, if it has a choice; returns the entries of its modules.

    The bytes of the weight, of the stored rows and of their state count for the first module of the group.
    """
    choice, entries, first = group.choice, [], None
    for name, module in group.members.items():
        sizes = (module.num_embeddings, module.embedding_dim)
        shared = name != group.name
        if choice is None:
            size, state = (0, 0) if shared else kept_bytes(module, kind, lags)
            entries.append(Entry(name, *sizes, size, size, state, None, group.reason))
            continue
        composed = composed_module(module, group, fit, first)
        new.modules[module] = composed
        pad = module.padding_idx if isinstance(module, nn.Embedding) and not module.weight.is_meta else None
        if pad is not None and module.weight[pad].any():
            new.changed.append(f"{name}: the vector of padding_idx ({pad}) was not zero and is zero now")
        if first is None:
            first = composed
            after, state = size_of(composed), state_bytes(composed, kind, lags, state_dtype)
            entries.append(Entry(name, *sizes, module.weight.nbytes, after, state, choice.scheme, choice.why))
        else:
            after, why = size_of(composed, shared=True), f"shares the weight of {group.name}"
            entries.append(Entry(name, *sizes, 0, after, 0, choice.scheme, why))
    if first is not None:
        weight = group.first.weight
        new.by_weight[weight], new.old_weights[group.name] = first, weakref.ref(weight)
    return entries


def _check_freed(replaced: Mapping[str, "weakref.ref[Tensor]"], report: Report) -> None:
    """Report old weights that something still references."""
    gc.collect()
    for name, reference in replaced.items():
        weight = reference()
        if weight is None:
            continue
        holders = {type(holder).__name__ for holder in gc.get_referrers(weight)} - {"frame"}
        if holders:
            text = f"something outside the model ({', '.join(sorted(holders))}) holds it and will go on using it"
            report.outdated.append(f"the old table of {name}: {text}")
        else:
            report.references.append(f"the old table of {name}: its memory is not free, a variable or graph holds it")
