"""Compress the embeddings of an existing model, in place: one line, no other edit."""

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_int, check_mapping
from ..modules.bag import EmbeddingBag
from ..modules.embedding import Embedding
from ..modules.holders import check_not_wrapped, optimizers_of
from ..modules.tied import TiedLinear
from ..optimizer_names import Optimizer, StateDtype, check_optimizer
from ..paper.init import deviation
from ..paper.schemes import Scheme
from ..planner.footprint import StateBytes
from .choose import choose, size_of, state_bytes
from .decompress import decompress_
from .follow import check_followed, follow_, optimizer_name
from .groups import ChosenScheme, WeightGroup, check_model, groups_in, leave_out, torchrec_tools
from .report import Entry, Report
from .swap import computed_before, declare_, keep_, out_of_reach, swap_, tie_

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
        budget: instead of a scheme or plan, bytes that all tables and their optimizer state may take, as a number or
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
    given = [each for each in (scheme_or_plan, scheme, plan, budget) if each is not None]
    if len(given) != 1:
        raise ValueError("exactly one of scheme_or_plan, scheme, plan and budget must be given")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn ({filter_fn!r}) must be a function of a module and its name")
    check_int("threshold", threshold, 0)
    check_mapping("frequencies", frequencies)
    check_optimizer(optimizer_name(optimizer))
    check_not_wrapped(model)
    tie_(model)
    groups = groups_in(model)
    torchrec = torchrec_tools()
    collections = [] if torchrec is None else torchrec.collections_in(model, groups)
    leave_out(model, groups, threshold, filter_fn)
    optimizers = optimizers_of(group.first.weight for group in groups)
    counted = _counted(optimizer, optimizers, needed=budget is not None)
    choose(groups, None if budget is not None else given[0], budget, counted, frequencies or {}, fit)
    replaced = [group.first.weight for group in groups if group.is_replaced]
    for each in optimizers:
        check_followed(each, replaced)
        for collection in collections:
            collection.check_free(each)
    old_weights = {group.name: weakref.ref(group.first.weight) for group in groups if group.is_replaced}
    shapes = {tuple(group.first.weight.shape): group.name for group in groups if group.is_replaced}
    report, by_weight = _replace(model, groups, collections, fit, counted)
    for each in optimizers:
        report.references += follow_(each, by_weight)
    del groups, collections, by_weight, optimizers, replaced  # they have references to the replaced modules
    if any(reference() is not None for reference in old_weights.values()):
        gc.collect()
    for name, reference in old_weights.items():
        weight = reference()
        holders = set() if weight is None else {type(each).__name__ for each in gc.get_referrers(weight)} - {"frame"}
        if holders:
            text = f"something outside the model ({', '.join(sorted(holders))}) holds it and will go on using it"
            report.outdated.append(f"the old table of {name}: {text}")
    report.outdated += computed_before(model, shapes)
    report.references += out_of_reach(model)
    return report


def _counted(
    optimizer: torch.optim.Optimizer | Optimizer | None, found: list[torch.optim.Optimizer], needed: bool
) -> StateBytes:
    """The state that counts, for tables of float32: of ``optimizer``, or else of the optimizers that hold tables.

    If it is ``needed`` for a budget, these must all be of one kind, and its state must be known.
    """
    candidates: list[Any] = found if optimizer is None else [optimizer]
    kinds = {optimizer_name(each) for each in candidates}
    if needed and (len(kinds) > 1 or None in kinds):
        listed = ", ".join(sorted({type(each).__name__ for each in candidates}))
        raise ValueError(
            f"optimizer ({listed}) must be one whose state can be counted: give a budget the name of one that keeps"
            " as many numbers for each weight, such as 'adam' for two, or a scheme instead of a budget"
        )
    lags = not any(isinstance(each, torch.optim.SparseAdam) for each in (optimizer, *found))
    state_dtypes: set[StateDtype] = {getattr(each, "state_dtype", "float32") for each in candidates}
    state_dtype = state_dtypes.pop() if len(state_dtypes) == 1 else "float32"
    return StateBytes(next(iter(kinds), None), torch.float32, False, lags, state_dtype)


def _replace(
    model: nn.Module, groups: list[WeightGroup], collections: list[Any], fit: bool, counted: StateBytes
) -> tuple[Report, dict[Tensor, Embedding]]:
    """Replace the embeddings of the groups, and linear layers tied to them; also returns the new one of each weight."""
    report = Report()
    new: dict[nn.Module, nn.Module] = {}  # by the module that it replaces
    by_weight: dict[Tensor, Embedding] = {}
    for group in groups:
        if group.collection is None:
            composed = {} if group.choice is None else _composed_modules(group, group.choice, fit)
            report.entries += _entries(group, composed, counted)
            new |= composed
            if composed:
                by_weight[group.first.weight] = composed[group.first]
                report.references += _cleared_paddings(group)
    for collection in collections:
        replacement = collection.replacement(fit) if collection.is_replaced else None
        report.entries += collection.entries(replacement, counted)
        if replacement is not None:
            new[collection.module] = replacement
    order = {name: i for i, name in enumerate(name for group in groups for name in group.members)}
    report.entries.sort(key=lambda entry: order[entry.name])
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module.weight in by_weight:
            embedding = by_weight[module.weight]
            new[module] = TiedLinear(embedding, module.bias)
            keep_(module, new[module])
            padding = "" if embedding.padding_idx is None else f", where padding ({embedding.padding_idx}) is zeros"
            report.references.append(f"{name} is tied to an embedding: it scores by the composed table{padding}")
    report.references += swap_(model, new, {weight: embedding.stored for weight, embedding in by_weight.items()})
    declare_(model)
    return report, by_weight


def _entries(group: WeightGroup, composed: dict[Any, Embedding], counted: StateBytes) -> list[Entry]:
    """What was done with each module of a group, which ``composed`` replaces, if it has a choice.

    The bytes of the weight, of the stored rows and of their state count for the first module of the group.
    """
    entries = []
    for name, module in group.members.items():
        is_first = name == group.name
        before = module.weight.nbytes if is_first else 0
        after, scheme, why = before, None, group.reason
        if group.choice is not None:
            after, scheme = size_of(composed[module], shared=not is_first), group.choice.scheme
            why = group.choice.why if is_first else f"shares the weight of {group.name}"
        state = state_bytes(composed.get(module, module), counted) if is_first else 0
        entries.append(Entry(name, module.num_embeddings, module.embedding_dim, before, after, state, scheme, why))
    return entries


def _cleared_paddings(group: WeightGroup) -> list[str]:
    """The modules of a group whose vector of ``padding_idx`` will be zero, though it was not, in words."""
    weight = group.first.weight
    return [
        f"{name}: the vector of padding_idx ({module.padding_idx}) was not zero and is zero now"
        for name, module in group.members.items()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and not weight.is_meta
        if weight[module.padding_idx].any()
    ]


def _composed_modules(group: WeightGroup, choice: ChosenScheme, fit: bool) -> dict[nn.Module, Embedding]:
    """The composed module for each module of a group, as ``choice`` says; all share the rows of the first."""
    weight, paddings = group.first.weight, {module.padding_idx for module in group.members.values()}
    common: dict[str, Any] = {"device": weight.device, "dtype": choice.dtype or weight.dtype}
    common |= {"frequencies": group.ranking, "init_std": None if fit or weight.is_meta else deviation(weight)}
    composed: dict[nn.Module, Embedding] = {}
    source: Embedding | None = None  # the first one; all others get its parameters
    for module in group.members.values():
        kind = EmbeddingBag if isinstance(module, nn.EmbeddingBag) else Embedding
        options = common | {name: getattr(module, name) for name in ("sparse", *kind.inherited)}
        sizes = (module.num_embeddings, module.embedding_dim, choice.scheme)
        new = composed[module] = kind(*sizes, **options)
        if source is None:
            source = new
            if (fit or new.is_full()) and not weight.is_meta:  # a full table keeps its rows
                if len(paddings) > 1:  # the padding id of one module is an ordinary id of another
                    source = kind(*sizes, **options | {"padding_idx": None})
                source.fit_(weight.detach(), group.counts)
        if source is not new:
            for name, parameter in list(source.named_parameters()):
                owner, _, key = name.rpartition(".")
                setattr(new.get_submodule(owner), key, parameter)
        new.requires_grad_(weight.requires_grad)
        keep_(module, new)
    return composed
