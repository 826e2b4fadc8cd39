"""Compress the embeddings of an existing model, in place: one line, no other edit."""

import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .bags import EmbeddingBag
from .checks import DTYPES
from .embeddings import Embedding
from .ops.rows import lookup_reads
from .schemes import Full, Scheme
from .tables import Tables
from .tied import TiedLinear

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
Replaced = dict[nn.Module, nn.Module]


@dataclass(frozen=True)
class Entry:
    """What became of one table."""

    name: str
    num_embeddings: int
    embedding_dim: int
    bytes_before: int
    bytes_after: int
    scheme: Scheme | None  # None: left as it was
    reason: str

    def cells(self) -> tuple[str, ...]:
        """A row of the report."""
        stored = f"as it was: {self.reason}" if self.scheme is None else repr(self.scheme)
        size = (f"{self.num_embeddings:,}", str(self.embedding_dim))
        return self.name, *size, _size(self.bytes_before), _size(self.bytes_after), stored


@dataclass
class Report:
    """What ``compress_`` or ``decompress_`` did, table by table. ``print`` shows it as a table."""

    entries: list[Entry] = field(default_factory=list)
    references: list[str] = field(default_factory=list)  # to parameters that were replaced: rewritten, or still there

    @property
    def bytes_before(self) -> int:
        """Bytes of all tables before."""
        return sum(entry.bytes_before for entry in self.entries)

    @property
    def bytes_after(self) -> int:
        """Bytes of all tables after."""
        return sum(entry.bytes_after for entry in self.entries)

    @property
    def swapped(self) -> list[str]:
        """Names of the modules that were replaced."""
        return [entry.name for entry in self.entries if entry.scheme is not None]

    @property
    def left(self) -> dict[str, str]:
        """Names of the modules that were left as they were, with the reason."""
        return {entry.name: entry.reason for entry in self.entries if entry.scheme is None}

    def __str__(self) -> str:
        head = ("table", "ids", "D", "before", "after", "stored as")
        rows = [e.cells() for e in self.entries]
        rows.append(("all", "", "", _size(self.bytes_before), _size(self.bytes_after), ""))
        widths = [max(len(row[c]) for row in (head, *rows)) for c in range(5)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[5]]) for row in (head, *rows)
        ]
        return "\n".join([*(line.rstrip() for line in lines), *self.references])


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

    Shared modules and tied weights stay shared; ``padding_idx``, mode, dtype, device, ``sparse``, ``requires_grad``,
    hooks and training mode are kept. A linear layer whose weight is an embedding's becomes a ``TiedLinear``. What
    cannot be replaced stays, and the report says why. Lists, tuples, dicts and attributes of modules, and the
    optimizer, that hold a replaced parameter are given the new one, and the report says so.

    Args:
        model: the model; works on the meta device too.
        scheme_or_plan: one scheme for all tables, or a mapping of module name to scheme, such as a ``quorem.plan``.
        budget: instead, bytes that all tables and their optimizer state may take, as a number or such as "2GB".
        threshold: tables of at most this many ids stay as they are.
        filter_fn: called with name and module; tables for which it is false stay as they are.
        fit: fit the stored rows to the trained tables (least squares); else they are drawn anew, with the deviation of
            the table that they replace.
        optimizer: the optimizer of the model, whose parameters and state follow; for a budget also its name, such as
            "adagrad", or None for weights alone.
        frequencies: how often each id occurs, by module name: weights of the fit, and ranks of ``HotCold``.

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
    tables = _tables(model)
    if budget is not None:
        scheme_or_plan = _planned(model, budget, optimizer, frequencies, threshold)
    chosen = _schemes(scheme_or_plan, tables)
    for name in frequencies or {}:
        if name not in tables:
            raise ValueError(f"frequencies ({name!r}) must be named as a table of the model: {', '.join(tables)}")
    report, replaced = Report(), Replaced()
    by_weight: dict[Tensor, Embedding] = {}
    for name, module in tables.items():
        weight = module.weight
        scheme, reason = _scheme_of(name, module, chosen, threshold, filter_fn)
        if scheme is not None:
            reason = _refused(model, module)
            scheme = None if reason else scheme
        if scheme is not None:
            counts = (frequencies or {}).get(name)
            new = _composed(module, scheme, counts, fit, by_weight.get(weight))
            by_weight.setdefault(weight, new)
            replaced[module] = new
        after = _bytes(replaced[module].stored if module in replaced else weight)  # type: ignore[arg-type]
        entry = Entry(name, module.num_embeddings, module.embedding_dim, _bytes(weight), after, scheme, reason)
        report.entries.append(entry)
    _swap(model, replaced, by_weight, optimizer, report)
    return report


def decompress_(model: nn.Module) -> Report:
    """Replace every composed ``Embedding`` and ``EmbeddingBag`` in ``model`` by the ``torch.nn`` module it stands for.

    A ``TiedLinear`` becomes a linear layer whose weight is the embedding's again.

    Returns:
        What became of each table.

    >>> from quorem import QR
    >>> model = nn.Sequential(nn.Embedding(10_000, 16))
    >>> _ = compress_(model, QR(num_collisions=4))
    >>> decompress_(model).swapped, model[0].weight.shape
    (['0'], torch.Size([10000, 16]))
    """
    report, replaced = Report(), Replaced()
    weights: dict[Tensor, nn.Parameter] = {}
    for name, module in model.named_modules():
        if not isinstance(module, Tables):
            continue
        before = _bytes(module.stored)
        if not isinstance(module, Embedding) or module.specs[0].operation == "feature":
            reason = f"{type(module).__name__} stands for no module of torch.nn"
            report.entries.append(Entry(name, 0, 0, before, before, None, reason))
            continue
        weight = weights.get(module.stored)
        if weight is None:
            weight = nn.Parameter(module.to_dense().detach(), requires_grad=module.stored.requires_grad)
            weights[module.stored] = weight
        options: dict[str, Any] = {"padding_idx": module.padding_idx, "sparse": module.sparse, "device": "meta"}
        new: nn.Embedding | nn.EmbeddingBag
        if isinstance(module, EmbeddingBag):
            options |= {"mode": module.mode, "include_last_offset": module.include_last_offset}
            new = nn.EmbeddingBag(module.num_embeddings, module.embedding_dim, **options)
        else:
            new = nn.Embedding(module.num_embeddings, module.embedding_dim, **options)
        new.weight = weight
        _keep(module, new)
        replaced[module] = new
        sizes = (module.num_embeddings, module.embedding_dim, before, _bytes(weight))
        report.entries.append(Entry(name, *sizes, Full(), "decompressed"))
    for parent in list(model.modules()):
        for child_name, child in parent._modules.items():
            if isinstance(child, TiedLinear) and child.embedding in replaced:
                linear = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
                linear.weight = replaced[child.embedding].weight  # type: ignore[assignment]
                linear.bias = child.bias  # type: ignore[assignment]
                parent._modules[child_name] = linear
    _swap(model, replaced, {}, None, report)
    return report


def _tables(model: nn.Module) -> dict[str, Any]:
    """The embeddings of a model by the first name that each has."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}


def _planned(model: nn.Module, budget: int | str, optimizer: Any, frequencies: Any, threshold: int) -> Any:
    plan = import_module(".planner", __package__).plan
    names = {"Adagrad": "adagrad", "Adam": "adam", "AdamW": "adamw", "SGD": "sgd", "AMSGrad": "amsgrad"}
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        if kind not in names:
            raise ValueError(f"optimizer ({kind}) must be one of {', '.join(names)} for a budget, or its name")
        amsgrad = kind == "Adam" and optimizer.defaults.get("amsgrad")
        optimizer = "amsgrad" if amsgrad else names[kind]
    return plan(model, budget, optimizer=optimizer, frequencies=frequencies)


def _schemes(scheme_or_plan: Any, tables: Mapping[str, Any]) -> Scheme | dict[str, Scheme]:
    if isinstance(scheme_or_plan, Scheme):
        return scheme_or_plan
    if not isinstance(scheme_or_plan, Mapping):
        kind = type(scheme_or_plan).__name__
        raise TypeError(f"scheme_or_plan ({kind}) must be a Scheme, or a mapping of module names to schemes")
    for name, scheme in scheme_or_plan.items():
        if name not in tables:
            raise ValueError(f"scheme_or_plan ({name!r}) must be named as a table of the model: {', '.join(tables)}")
        if not isinstance(scheme, Scheme):
            raise TypeError(f"scheme_or_plan[{name!r}] ({scheme!r}) must be a Scheme")
    return dict(scheme_or_plan)


def _scheme_of(name: str, module: Any, chosen: Any, threshold: int, filter_fn: Any) -> tuple[Scheme | None, str]:
    """The scheme of a table, or None and why it stays as it is."""
    if module.num_embeddings <= threshold:
        return None, f"{module.num_embeddings} ids are at most the threshold ({threshold})"
    if filter_fn is not None and not filter_fn(name, module):
        return None, "filter_fn left it out"
    scheme = chosen.get(name) if isinstance(chosen, dict) else chosen
    if scheme is None:
        return None, "the plan does not name it"
    spec = scheme.spec(module.num_embeddings, module.embedding_dim)
    if spec.fallback:
        return None, spec.fallback
    if isinstance(scheme, Full) and not scheme.force:
        return None, "the plan keeps it full"
    return scheme, ""


def _refused(model: nn.Module, module: Any) -> str:
    """Why a module cannot be replaced, or nothing."""
    kind = nn.EmbeddingBag if isinstance(module, nn.EmbeddingBag) else nn.Embedding
    if type(module) is not kind and type(module).forward is not kind.forward:
        return f"{type(module).__name__} has a forward of its own"
    extra = [n for n, _ in [*module.named_parameters(), *module.named_buffers()] if n != "weight"]
    if parametrize.is_parametrized(module) or extra or "weight" not in module._parameters:
        return f"its weight is parametrized, pruned or joined by others ({', '.join(extra)})"
    if module.max_norm is not None:
        return "max_norm renormalizes rows in place, and a composed vector has no row of its own"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq counts ids, and ids share rows"
    if module.weight.dtype not in DTYPES:
        return f"dtype ({module.weight.dtype}) is none of {', '.join(map(str, DTYPES))}"
    for name, other in model.named_modules():
        if other is not module and any(p is module.weight for p in other._parameters.values()):
            tied_linear = type(other) is nn.Linear and other.weight is module.weight
            same = isinstance(other, nn.Embedding | nn.EmbeddingBag) and type(other).forward in (
                nn.Embedding.forward,
                nn.EmbeddingBag.forward,
            )
            if not tied_linear and not same:
                return f"its weight is also a parameter of {name} ({type(other).__name__})"
    return ""


def _composed(module: Any, scheme: Scheme, counts: Tensor | None, fit: bool, shared: Embedding | None) -> Embedding:
    """The module that takes the place of an ``nn.Embedding`` or ``nn.EmbeddingBag``."""
    weight = module.weight
    options: dict[str, Any] = {"padding_idx": module.padding_idx, "sparse": module.sparse, "frequencies": counts}
    options |= {"device": weight.device, "dtype": weight.dtype}
    if not fit and not weight.is_meta:
        with torch.no_grad():
            deviation = float(weight[torch.randint(len(weight), (10_000,), device=weight.device)].float().std())
        options["init_std"] = deviation if 0 < deviation < float("inf") else None
    new: Embedding
    if isinstance(module, nn.EmbeddingBag):
        options |= {"mode": module.mode, "include_last_offset": module.include_last_offset}
        new = EmbeddingBag(module.num_embeddings, module.embedding_dim, scheme, **options)
    else:
        new = Embedding(module.num_embeddings, module.embedding_dim, scheme, **options)
    if shared is not None:
        new.stored = shared.stored
    elif fit and not weight.is_meta:
        new.fit_(weight.detach(), counts)
    new.stored.requires_grad_(weight.requires_grad)
    _keep(module, new)
    return new


def _keep(module: nn.Module, new: nn.Module) -> None:
    """Give ``new`` the hooks and the mode of ``module``."""
    for hooks in HOOKS:
        getattr(new, hooks).update(getattr(module, hooks))
    new.training = module.training


def _swap(
    model: nn.Module, replaced: Replaced, by_weight: dict[Tensor, Embedding], optimizer: Any, report: Report
) -> None:
    """Put the new modules in place, wherever the old ones or their weights are held."""
    weights = {weight: new.stored for weight, new in by_weight.items()}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in replaced:
                parent._modules[name] = replaced[child]
            elif type(child) is nn.Linear and child.weight in by_weight:
                parent._modules[name] = TiedLinear(by_weight[child.weight], child.bias)
                report.references.append(f"{name} is tied to an embedding: it scores by the composed table")
    for name, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            if attribute.startswith("_") and attribute in nn.Module().__dict__:
                continue
            rewritten, count = _rewritten(value, {**replaced, **weights})
            if count:
                object.__setattr__(module, attribute, rewritten) if rewritten is not value else None
                place = f"{name}.{attribute}" if name else attribute
                report.references.append(f"{place} held {count} replaced: given the new")
    if isinstance(optimizer, torch.optim.Optimizer):
        _follow(optimizer, by_weight, report)
    watched = {_name_of(report, weight): weakref.ref(weight) for weight in by_weight}
    by_weight.clear()
    replaced.clear()
    weights.clear()
    del weights
    gc.collect()
    for label, reference in watched.items():
        if reference() is not None:
            holders = [
                type(holder).__name__ for holder in gc.get_referrers(reference()) if type(holder).__name__ != "frame"
            ]
            report.references.append(f"{label}: the old weight is still held, by {', '.join(sorted(set(holders)))}")


def _name_of(report: Report, weight: Tensor) -> str:
    shape = tuple(weight.shape)
    names = [e.name for e in report.entries if e.scheme is not None and (e.num_embeddings, e.embedding_dim) == shape]
    return "/".join(names) or str(shape)


def _rewritten(value: Any, new: Mapping[Any, Any], depth: int = 4) -> tuple[Any, int]:
    """``value`` with every key of ``new`` replaced, within lists, tuples, dicts and sets too; and how many were."""
    if isinstance(value, Tensor | nn.Module):
        return (new[value], 1) if value in new else (value, 0)
    if depth == 0 or not isinstance(value, list | tuple | dict | set):
        return value, 0
    items = value.items() if isinstance(value, dict) else enumerate(value)
    pairs = {key: _rewritten(item, new, depth - 1) for key, item in items}
    count = sum(c for _, c in pairs.values())
    if not count:
        return value, 0
    if isinstance(value, dict | list):
        for key, (item, _) in pairs.items():
            value[key] = item
        return value, count
    rewritten = [item for item, _ in pairs.values()]
    if isinstance(value, set):
        value.clear()
        value.update(rewritten)
        return value, count
    return (type(value)(*rewritten) if hasattr(value, "_fields") else type(value)(rewritten)), count


def _follow(optimizer: torch.optim.Optimizer, by_weight: Mapping[Tensor, Embedding], report: Report) -> None:
    """Give an optimizer the new parameters, and its state of the old ones, composed as the tables are."""
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            if p in by_weight:
                new = by_weight[p]
                state = optimizer.state.pop(p, {})
                group["params"][i] = new.stored
                if state:
                    optimizer.state[new.stored] = {name: _state(value, p, new) for name, value in state.items()}
                report.references.append(
                    f"the optimizer held a table {tuple(p.shape)}: given the new one and its state"
                )


def _state(value: Any, weight: Tensor, module: Embedding) -> Any:
    """A tensor of an optimizer's state, for the stored rows: of each row, the mean over the ids that read it."""
    if not isinstance(value, Tensor) or value.shape != weight.shape:
        return value
    stored = module.stored
    total = torch.zeros(stored.shape, dtype=torch.float32, device=stored.device)
    count = torch.zeros(len(stored), dtype=torch.float32, device=stored.device)
    layout, width = module.layout, module.width
    for ids in torch.arange(len(weight), device=stored.device).split(2**16):
        reads = lookup_reads(ids[:, None], layout)
        values = value[ids].float().view(len(ids), -1, 1, width).expand(-1, -1, reads.rows.shape[2], -1)
        used = reads.valid[..., None] & reads.used
        rows = reads.rows.expand(values.shape[:3])[used.expand(values.shape[:3])]
        total.index_add_(0, rows, values[used.expand(values.shape[:3])])
        count.index_add_(0, rows, torch.ones_like(rows, dtype=torch.float32))
    return (total / count.clamp(min=1)[:, None]).to(value.dtype)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _size(size: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"
