"""Compress the embeddings of an existing model, in place: one line, no other edit."""

import gc
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ..bags import EmbeddingBag
from ..checks import check_int, check_mapping
from ..embeddings import Embedding
from ..optimizer_names import Optimizer, check_optimizer
from ..schemes import Full, Scheme
from ..tables import Tables
from ..tied import TiedLinear
from .build import composed_module, plain_module
from .choose import choose, kept_bytes, size_of, state_bytes
from .follow import follow_, optimizer_name
from .groups import WeightGroup, groups_in, leave_out
from .report import Entry, Report
from .swap import keep_, out_of_reach, swap_

__all__ = ["Entry", "Report", "compress_", "decompress_"]


def compress_(
    model: nn.Module,
    scheme_or_plan: Scheme | Mapping[str, Scheme] | None = None,
    *,
    budget: int | str | None = None,
    threshold: int = 0,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
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
    tuples, dicts and attributes of modules, and in the optimizer, are updated and listed in the report.

    Args:
        model: the model; works on the meta device too.
        scheme_or_plan: one scheme for all tables, or a mapping of module name to scheme, such as a ``quorem.plan``.
            Rows that a plan has in int8 keep their dtype until ``quantize_``.
        budget: instead of ``scheme_or_plan``, bytes that all tables and their optimizer state may take, as a number or
            a string such as "2GB"; tables that cannot be replaced count too.
        threshold: tables of at most this many ids stay as they are.
        filter_fn: called with name and module; tables for which it returns false stay as they are.
        fit: whether to fit the stored rows to the trained tables (least squares). Otherwise they are drawn at random,
            with the standard deviation of the table that they replace.
        optimizer: the optimizer of the model; its parameters and state are converted. With a budget it may also be a
            name, such as "adagrad", or None to count the tables alone.
        frequencies: how often each id occurs, by module name. A plan and the fit use them as weights, and ``HotCold``
            schemes rank ids by them.

    Returns:
        A report of what was done with each table.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if neither or both of scheme and budget are given, a name is unknown, or the budget is too small.

    >>> from quorem import QR
    >>> model = nn.Sequential(nn.EmbeddingBag(10_000, 16), nn.Linear(16, 1))
    >>> report = compress_(model, QR(num_collisions=4))
    >>> model[0].num_parameters, report.swapped
    (40064, ['0'])
    """
    _check_model(model, nn.Embedding | nn.EmbeddingBag)
    if (scheme_or_plan is None) == (budget is None):
        raise ValueError("scheme_or_plan or budget must be given, and not both")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn ({filter_fn!r}) must be a function of a name and a module")
    check_int("threshold", threshold, 0)
    check_mapping("frequencies", frequencies)
    kind = optimizer_name(optimizer)
    check_optimizer(kind)
    groups = groups_in(model)
    torchrec = _torchrec()
    collections = [] if torchrec is None else torchrec.collections_in(model, groups)
    leave_out(model, groups, threshold, filter_fn)
    choose(groups, scheme_or_plan, budget, kind, frequencies or {})
    report, new = _replace(model, groups, collections, fit, kind)
    if isinstance(optimizer, torch.optim.Optimizer):
        report.references += follow_(optimizer, new.by_weight)
        for collection in collections:
            if collection.module in new.modules:
                report.references += collection.follow_(optimizer, new.modules[collection.module])
    old_weights = new.old_weights
    del groups, collections, new  # they have references to the replaced modules
    _check_freed(old_weights, report)
    report.references += out_of_reach(model)
    return report


def decompress_(model: nn.Module) -> Report:
    """Replace every composed ``Embedding`` and ``EmbeddingBag`` in ``model`` by the equivalent ``torch.nn`` module.

    Collections of ``quorem.integrations.torchrec`` become TorchRec's own. A ``TiedLinear`` becomes a linear layer that
    shares the weight of the embedding again.

    Args:
        model: the model, changed in place.

    Returns:
        A report of what was done with each table.

    Raises:
        TypeError: if ``model`` is not a module, or is itself an embedding.

    >>> from quorem import QR
    >>> model = nn.Sequential(nn.Embedding(10_000, 16))
    >>> _ = compress_(model, QR(num_collisions=4))
    >>> decompress_(model).swapped, model[0].weight.shape
    (['0'], torch.Size([10000, 16]))
    """
    _check_model(model, Embedding)
    report = Report()
    weights: dict[Tensor, nn.Parameter] = {}
    modules: dict[nn.Module, nn.Module] = {}
    paddings: dict[Tensor, set[int | None]] = {}
    for module in model.modules():
        if isinstance(module, Tables):
            paddings.setdefault(module.stored, set()).update(module.padding)
    for name, module in model.named_modules():
        if not isinstance(module, Tables):
            continue
        before = size_of(module)
        several = module.specs[0].operation == "feature"
        is_torch = type(module) in (Embedding, EmbeddingBag) and not several and module.unknown[0] == "error"
        why = ""
        if not is_torch or module.raw_ids[0]:
            why = f"{type(module).__name__} stands for no module of torch.nn"
        elif len(paddings[module.stored]) > 1:
            why = "its rows are shared by a module with another padding_idx: no weight has both vectors of that id"
        if why:
            report.entries.append(Entry(name, 0, 0, before, before, 0, None, why))
            continue
        assert isinstance(module, Embedding)
        weight = weights.get(module.stored)
        shared = weight is not None
        if weight is None:
            weight = nn.Parameter(module.to_dense().detach(), requires_grad=module.stored.requires_grad)
            weights[module.stored] = weight
        modules[module] = plain_module(module, weight)
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


def _check_model(model: Any, embeddings: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model ({type(model).__name__}) must be an nn.Module")
    if isinstance(model, embeddings):
        kind = type(model).__name__
        raise TypeError(f"model ({kind}) must contain embeddings: one alone cannot be replaced in place")


@dataclass
class _Replacements:
    """What takes the place of what, before anything is changed."""

    modules: dict[nn.Module, nn.Module] = field(default_factory=dict)  # new module by old module
    by_weight: dict[Tensor, Embedding] = field(default_factory=dict)  # new embedding by old weight
    old_weights: dict[str, "weakref.ref[Tensor]"] = field(default_factory=dict)  # by name of their group


def _replace(
    model: nn.Module, groups: list[WeightGroup], collections: list[Any], fit: bool, kind: Optimizer | None
) -> tuple[Report, _Replacements]:
    """Replace the embeddings of the groups, and linear layers that share a weight with them."""
    report, new = Report(), _Replacements()
    for group in groups:
        if group.collection is None:
            report.entries += _replace_group(group, fit, kind, new)
    for collection in collections:
        composed = collection.replacement(fit)
        report.entries += collection.entries(composed, kind)
        if composed is not None:
            new.modules[collection.module] = composed
            new.old_weights |= {group.name: weakref.ref(group.first.weight) for group in collection.groups.values()}
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
    return report, new


def _replace_group(group: WeightGroup, fit: bool, kind: Optimizer | None, new: _Replacements) -> list[Entry]:
    """Add the composed modules of one group to ``new``, if it has a choice; returns the entries of its modules.

    The bytes of the weight, of the stored rows and of their state count for the first module of the group.
    """
    choice, entries, first = group.choice, [], None
    for name, module in group.members.items():
        sizes = (module.num_embeddings, module.embedding_dim)
        shared = name != group.name
        if choice is None:
            size, state = (0, 0) if shared else kept_bytes(module, kind)
            entries.append(Entry(name, *sizes, size, size, state, None, group.reason))
            continue
        composed = composed_module(module, group, fit, first)
        new.modules[module] = composed
        if first is None:
            first = composed
            after, state = size_of(composed), state_bytes(composed, kind)
            entries.append(Entry(name, *sizes, module.weight.nbytes, after, state, choice.scheme, choice.why))
        else:
            after, why = size_of(composed) - composed.stored.nbytes, f"shares the weight of {group.name}"
            entries.append(Entry(name, *sizes, 0, after, 0, choice.scheme, why))
    if first is not None:
        weight = group.first.weight
        new.by_weight[weight], new.old_weights[group.name] = first, weakref.ref(weight)
    return entries


def _torchrec() -> Any:
    """The module ``convert.torchrec``; None if TorchRec is not imported, so that no model can contain its modules."""
    return import_module(".torchrec", __package__) if "torchrec.modules.embedding_modules" in sys.modules else None


def _check_freed(replaced: Mapping[str, "weakref.ref[Tensor]"], report: Report) -> None:
    """Report old weights that something still references, so that their memory is not freed."""
    gc.collect()
    for name, reference in replaced.items():
        weight = reference()
        if weight is not None:
            holders = {type(holder).__name__ for holder in gc.get_referrers(weight)} - {"frame"}
            text = f"its memory is not free: something outside the model still holds it ({', '.join(sorted(holders))})"
            report.references.append(f"the old weight of {name}: {text}")
