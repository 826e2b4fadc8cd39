"""TorchRec's collections in a model: if one table of a collection is to be composed, quorem's replaces the collection.

Imported only if TorchRec is. Tables are named by the path of their ``nn.Embedding`` or ``nn.EmbeddingBag``, like all
others: ``sparse.embedding_bags.user``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule
from torchrec.modules import embedding_modules as stock

from ..fit import fit_, fit_matrix_
from ..fit.target import weights_of
from ..integrations import torchrec as integration
from ..integrations.torchrec.collections import DATA_TYPES
from ..integrations.torchrec.collections import Collection as Ours
from ..modules.collection import EmbeddingCollection, Table
from ..modules.holders import held_by
from ..ops.layout import StoredPool
from ..paper import init
from ..paper.schemes import Full, HotCold, TableSpec
from ..paper.schemes.frequency import cold_ids
from ..planner.footprint import StateBytes
from .groups import ChosenScheme, WeightGroup
from .report import Entry
from .swap import keep_

POOLED, UNPOOLED = stock.EmbeddingBagCollection, stock.EmbeddingCollection
OURS = (integration.EmbeddingBagCollection, integration.EmbeddingCollection)


@dataclass(eq=False)
class TorchRecCollection:
    """A collection of TorchRec's, and the group of each of its tables by the table's name."""

    name: str
    module: Any
    parent: nn.Module
    groups: dict[str, WeightGroup] = field(default_factory=dict)

    @property
    def is_replaced(self) -> bool:
        """Whether one of its tables is to be composed."""
        return any(group.choice is not None for group in self.groups.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tables."""
        return next(iter(self.groups.values())).first.weight.dtype

    def reason_against(self, choice: ChosenScheme, spec: TableSpec) -> str:
        """Why TorchRec's kernels do not support a choice for one of the tables; empty if they do."""
        if choice.dtype not in (None, self.dtype):
            return f"the plan has it in {choice.dtype}, but a collection has one dtype"
        if odd := [width for _, width in spec.shapes if width % 4]:
            return f"its parts would be {odd[0]} wide, which is no multiple of 4, as FBGEMM needs it"
        return ""

    def replacement(self, fit: bool) -> Ours:
        """quorem's collection in place of TorchRec's, with full tables where there is no choice."""
        module, groups, configs, tables = self.module, self.groups, configs_of(self.module), []
        for config in configs:
            group = groups[config.name]
            table = Table(config.name, config.num_embeddings, config.embedding_dim, features=config.feature_names)
            if group.choice is not None:
                table = replace(table, scheme=group.choice.scheme, frequencies=group.ranking)
            tables.append(table)
        first = next(iter(groups.values())).first.weight
        options: dict[str, Any] = {"device": first.device, "dtype": first.dtype}
        if is_pooled := isinstance(module, POOLED):
            options |= {"mode": configs[0].pooling.value.lower(), "is_weighted": module.is_weighted()}
        new = OURS[0 if is_pooled else 1](tables, **options)
        if not first.is_meta:
            single = EmbeddingCollection(tables, device=first.device, dtype=first.dtype)
            _fill_(single, groups, fit)
            integration.copy_state_(new, single)
        new.requires_grad_(first.requires_grad)
        keep_(module, new)
        return new

    def entries(self, new: Ours | None, counted: StateBytes) -> list[Entry]:
        """What was done with each table; ``new`` is quorem's collection, or None if there is none."""
        kept = replace(counted, dtype=self.dtype, sparse=True, lags=False, state_dtype="float32")
        sizes = {} if new is None else _sizes(new, kept)
        entries = []
        for name, group in self.groups.items():
            module, choice = group.first, group.choice
            n, d = module.num_embeddings, module.embedding_dim
            after, state = sizes.get(name, (module.weight.nbytes, n * kept.row(d)))
            scheme, why = (None, group.reason) if choice is None else (choice.scheme, choice.why)
            entries.append(Entry(group.name, n, d, module.weight.nbytes, after, state, scheme, why))
        return entries

    def check_free(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError if the collection will be replaced and an optimizer holds its tables."""
        replaced = {id(g.first.weight): g.first.weight for g in self.groups.values()}
        if self.is_replaced and held_by(optimizer, replaced):
            kind = type(optimizer).__name__
            raise ValueError(f"optimizer ({kind}) holds tables of {self.name}: make it after compress_")


def configs_of(collection: Any) -> list[Any]:
    """TorchRec's configs of the tables of its collection, or of the full tables that quorem's stands for."""
    is_pooled = hasattr(collection, "embedding_bag_configs")
    return list(collection.embedding_bag_configs() if is_pooled else collection.embedding_configs())


def collections_in(model: nn.Module, groups: list[WeightGroup]) -> list[TorchRecCollection]:
    """TorchRec's collections in a model. Tables inside quorem's are composed already and leave ``groups``."""
    if isinstance(model, (POOLED, UNPOOLED, *OURS)):
        raise TypeError(f"model ({type(model).__name__}) must contain collections: one alone cannot be replaced")
    by_module = {id(module): group for group in groups for module in group.members.values()}
    inside = {id(module) for parent in model.modules() if isinstance(parent, OURS) for module in parent.modules()}
    composed = {id(group) for module, group in by_module.items() if module in inside}
    groups[:] = [group for group in groups if id(group) not in composed]
    collections: dict[int, TorchRecCollection] = {}
    for path, parent in _unsharded_modules(model, "compress"):
        for key, child in parent.named_children():
            if isinstance(child, POOLED | UNPOOLED) and id(child) not in inside and id(child) not in collections:
                collections[id(child)] = TorchRecCollection(f"{path}.{key}" if path else key, child, parent)
    for collection in collections.values():
        stored = collection.module
        for name, module in (stored.embedding_bags if isinstance(stored, POOLED) else stored.embeddings).items():
            collection.groups[name] = by_module[id(module)]
            by_module[id(module)].collection = collection
        reason = _reason(collection)
        for group in collection.groups.values():
            group.reason = group.reason or reason
    return list(collections.values())


def _unsharded_modules(model: nn.Module, verb: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model by name; raises ValueError if one is sharded."""
    for path, module in model.named_modules():
        if isinstance(module, ShardedModule):
            raise ValueError(f"model must not be sharded, but {path} is: {verb} it before DistributedModelParallel")
        yield path, module


def _reason(collection: TorchRecCollection) -> str:
    """Why a collection cannot be replaced; empty if it can."""
    module, parent = collection.module, type(collection.parent)
    configs = configs_of(module)
    if type(module) not in (POOLED, UNPOOLED):
        return f"its collection is a {type(module).__name__}"
    if parent.__module__.startswith("torchrec.modules."):
        return f"its collection belongs to a {parent.__name__}, which needs TorchRec's own"
    if len({group.first.weight.requires_grad for group in collection.groups.values()}) > 1:
        return "some tables of its collection are frozen, and others are not"
    if any(len(group.members) > 1 for group in collection.groups.values()):
        return "tables of its collection share their weight with others"
    if any(hasattr(group.first.weight, "_in_backward_optimizers") for group in collection.groups.values()):
        return "tables of its collection have an optimizer in the backward pass already: give it to them afterwards"
    if len({config.data_type for config in configs}) > 1 or configs[0].data_type not in DATA_TYPES.values():
        return "tables of its collection must have one dtype, float32 or float16"
    if wrong := next((config for config in configs if config.embedding_dim % 4), None):
        return f"the width ({wrong.embedding_dim}) of {wrong.name} is no multiple of 4, as FBGEMM needs it"
    if wrong := next((config for config in configs if "." in config.name), None):
        return f"the name of table {wrong.name} has a dot"
    features = [feature for config in configs for feature in config.feature_names]
    if len(set(features)) < len(features):
        return "several tables of its collection read one feature"
    if any(config.use_virtual_table or config.num_embeddings_post_pruning for config in configs):
        return "tables of its collection are virtual or pruned"
    if isinstance(module, POOLED) and len({config.pooling for config in configs}) > 1:
        return "tables of its collection are pooled in different ways"
    if isinstance(module, UNPOOLED) and module.need_indices():
        return "its collection returns the ids too (need_indices)"
    return ""


def _sizes(new: Ours, by_row: StateBytes) -> dict[str, tuple[int, int]]:
    """Bytes of each table and of its optimizer state; the bytes of a pool count for the first of its tables."""
    template, sizes = new.template, {}
    for t, (name, spec) in enumerate(zip(template.names, template.specs, strict=True)):
        shapes, numbers, pool = list(spec.shapes), spec.num_parameters, template.pool_of(t)
        if pool is not None and t == min(pool.offsets):
            shapes += [(extent.rows, spec.width) for extent in pool.extents]
            numbers += sum(extent.rows for extent in pool.extents) * spec.width
        lists = sum(ids.nbytes for ids in template.ranks_of[t] or ())
        state = sum(rows * by_row.row(width) for rows, width in shapes)
        if spec.is_narrow:
            state += spec.width * replace(by_row, sparse=False).row(spec.embedding_dim)
        sizes[name] = numbers * by_row.dtype.itemsize + lists, state
    return sizes


def decompress(
    model: nn.Module, modules: dict[nn.Module, nn.Module], targets: dict[Tensor, list[Tensor]]
) -> list[Entry]:
    """Add to ``modules`` TorchRec's collection for each of quorem's, and what replaces its parameters to ``targets``.

    Its tables replace the first parameter, and nothing the others. Returns what was done with each table.
    """
    entries = []
    for path, module in list(_unsharded_modules(model, "decompress")):
        if not isinstance(module, OURS):
            continue
        first, reason = next(module.parameters()), _not_plain(module)
        sizes = _sizes(module, StateBytes(None, first.dtype, sparse=True))
        if not reason:
            new = modules[module] = _plain(module, first)
            targets |= {p: list(new.parameters()) if p is first else [] for p in module.parameters()}
        for table in module.tables:
            n, d, before = table.num_embeddings, table.embedding_dim, sizes[table.name][0]
            after, scheme = (before, None) if reason else (n * d * first.itemsize, Full())
            entries.append(Entry(f"{path}.{table.name}", n, d, before, after, 0, scheme, reason or "decompressed"))
    return entries


def _not_plain(module: Any) -> str:
    """Why quorem's collection has no equivalent of TorchRec's; empty if it has one."""
    for table, spec in zip(module.tables, module.template.specs, strict=True):
        if spec.num_vectors > 1 or table.raw_ids or table.unknown != "error":
            return f"TorchRec has no table as {table.name}: of several vectors an id, or of ids outside a table"
        if table.padding_idx is not None and getattr(module, "mode", "sum") == "mean":
            return f"TorchRec's tables have no padding id, which a mean does not count ({table.name})"
    return ""


def _plain(module: Any, first: Tensor) -> nn.Module:
    """TorchRec's collection with the full tables that are equivalent to quorem's, of which ``first`` is a parameter."""
    dense = {} if first.is_meta else integration.to_collection(module).to_dense()
    configs, device = configs_of(module), torch.device("meta")
    for config in configs:
        config.data_type = DATA_TYPES[first.dtype]
    is_pooled = isinstance(module, integration.EmbeddingBagCollection)
    new = POOLED(configs, module.is_weighted(), device) if is_pooled else UNPOOLED(configs, device)
    new._device = first.device
    for name, embedding in (new.embedding_bags if is_pooled else new.embeddings).items():
        if name in dense:
            embedding.weight = nn.Parameter(dense[name].detach().to(first.device), requires_grad=first.requires_grad)
    keep_(module, new)
    return new


def _fill_(single: EmbeddingCollection, groups: Mapping[str, WeightGroup], fit: bool) -> None:
    """Fill a collection from the trained tables of ``groups``; those without a choice are copied.

    With ``fit`` composed tables are fitted; otherwise they are drawn with the deviation of the trained table.
    """
    targets: list[Tensor] = []  # what the rows of each table are to be composed to
    counts = [groups[name].counts for name in single.names]
    for t, (name, spec) in enumerate(zip(single.names, single.specs, strict=True)):
        stored, trained = single.tables(t), groups[name].first.weight.detach()
        if fit and (matrix := single.projection(t)) is not None:
            with torch.no_grad():
                trained = fit_matrix_(matrix, trained, weights_of(counts[t], trained.device), None)
            spec = replace(spec, embedding_dim=spec.width)
        targets.append(trained)
        if fit or groups[name].choice is None:  # a full table keeps its rows
            fit_(stored, spec, trained, counts[t], ranks=single.ranks_of[t])
        else:
            init.init_(stored, spec, std=init.deviation(trained))
    for pool in single.pools.values():
        rows = [extent.of(single.stored.detach()) for extent in pool.extents]
        if fit:
            _fit_pool_(rows, single, pool, targets, counts)
        else:
            deviations = [std for t in pool.offsets if (std := init.deviation(targets[t])) is not None]
            std = sum(deviations) / len(deviations) if deviations else None
            init.pool_(rows, [single.specs[t] for t in pool.offsets], std=std)


def _fit_pool_(
    rows: Sequence[Tensor],
    single: EmbeddingCollection,
    pool: StoredPool,
    targets: Sequence[Tensor],
    counts: Sequence[Tensor | None],
) -> None:
    """Fit the rows of a pool to the cold ids of all its tables."""
    numbers = {t: torch.arange(single.specs[t].num_composed, device=single.stored.device) for t in pool.offsets}
    cold = {t: cold_ids(nth, single.specs[t], single.ranks_of[t]) for t, nth in numbers.items()}
    vectors = torch.cat([targets[t][ids] for t, ids in cold.items()])
    of_cold = [count[ids.cpu()] for t, ids in cold.items() if (count := counts[t]) is not None]
    some_occur = len(of_cold) == len(cold) and any(count.any() for count in of_cold)
    scheme = single.specs[min(cold)].pool
    assert scheme is not None
    spec = HotCold(0, cold=scheme, force=True).spec(len(vectors), vectors.shape[1])
    fit_(rows, spec, vectors, torch.cat(of_cold) if some_occur else None)
