"""TorchRec's collections in a model: if one table of a collection is to be composed, quorem's replaces the collection.

Imported only if TorchRec is. Tables are named by the path of their ``nn.Embedding`` or ``nn.EmbeddingBag``, like all
others: ``sparse.embedding_bags.user``.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule
from torchrec.modules import embedding_modules as stock

from ..integrations import torchrec as integration
from ..integrations.torchrec.collections import DATA_TYPES
from ..integrations.torchrec.collections import Collection as Ours
from ..integrations.torchrec.names import table_rows
from ..modules.collection import EmbeddingCollection, Table
from ..optimizer_names import Optimizer
from ..paper.schemes import Full, TableSpec
from ..planner.footprint import TrainedStorage
from .fill import fill_
from .follow import exchange_, has_state
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

    def reason_against(self, choice: ChosenScheme, spec: TableSpec) -> str:
        """Why TorchRec's kernels do not support a choice for one of the tables; empty if they do."""
        if choice.dtype not in (None, next(iter(self.groups.values())).first.weight.dtype):
            return f"the plan has it in {choice.dtype}, but a collection has one dtype"
        if odd := [width for _, width in spec.shapes if width % 4]:
            return f"its parts would be {odd[0]} wide, which is no multiple of 4, as FBGEMM needs it"
        return ""

    def replacement(self, fit: bool) -> Ours | None:
        """quorem's collection in place of TorchRec's, with full tables where there is no choice; None if all are full.

        Args:
            fit: whether rows are fitted to the tables; else they are drawn with the deviation of the table.
        """
        module, groups = self.module, self.groups
        if all(group.choice is None for group in groups.values()):
            return None
        tables = []
        configs = configs_of(module)
        for config in configs:
            group = groups[config.name]
            size = (config.num_embeddings, config.embedding_dim)
            scheme = Full() if group.choice is None else group.choice.scheme
            counts = group.counts if group.choice is not None and group.choice.ranked else None
            tables.append(Table(config.name, *size, scheme, features=tuple(config.feature_names), frequencies=counts))
        first = next(iter(groups.values())).first.weight
        options: dict[str, Any] = {"device": first.device, "dtype": first.dtype}
        new: Ours
        if isinstance(module, POOLED):
            options |= {"mode": configs[0].pooling.value.lower(), "is_weighted": module.is_weighted()}
            new = integration.EmbeddingBagCollection(tables, **options)
        else:
            new = integration.EmbeddingCollection(tables, **options)
        if not first.is_meta:
            single = EmbeddingCollection(tables, device=first.device, dtype=first.dtype)
            fill_(single, groups, fit)
            integration.copy_state_(new, single)
        frozen = {name for name, group in groups.items() if not group.first.weight.requires_grad}
        for parameter, rows in table_rows(new).items():
            if frozen and all(part.split(".")[1] in frozen for part in rows if part.startswith("tables.")):
                new.get_parameter(parameter).requires_grad_(False)
        keep_(module, new)
        return new

    def entries(self, new: Ours | None, kind: Optimizer | None) -> list[Entry]:
        """What was done with each table; ``new`` is quorem's collection, or None if there is none."""
        sizes = {} if new is None else _sizes(new, kind)
        entries = []
        for name, group in self.groups.items():
            module, choice = group.first, group.choice
            n, d = module.num_embeddings, module.embedding_dim
            storage = TrainedStorage((d,), (1,), module.weight.dtype, True, kind, lags=False)
            after, state = sizes.get(name, (module.weight.nbytes, n * storage.rate(d).row_state))
            scheme, why = (None, group.reason) if choice is None else (choice.scheme, choice.why)
            entries.append(Entry(group.name, n, d, module.weight.nbytes, after, state, scheme, why))
        return entries

    def follow_(self, optimizer: torch.optim.Optimizer, new: Ours) -> list[str]:
        """Give an optimizer the parameters of quorem's collection; returns what was done."""
        parameters, by_weight = dict(new.named_parameters()), table_rows(new)
        targets: dict[Tensor, list[Tensor]] = {group.first.weight: [] for group in self.groups.values()}
        for key, rows in by_weight.items():
            table = next(part.split(".")[1] for part in rows if part.startswith("tables."))
            targets[self.groups[table].first.weight].append(parameters[key])
        first = next((p for group in optimizer.param_groups for p in group["params"] if p in targets), None)
        if first is None:
            return []
        # Networks and matrices replace no old parameter.
        targets[first] += [parameters[key] for key in parameters if key not in by_weight]
        count = len(exchange_(optimizer, targets))
        return [f"{type(optimizer).__name__} now has the rows of {count} tables of a collection"]

    def check_followed(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError if the collection will be replaced and an optimizer has gathered a state for its tables."""
        is_replaced = any(group.choice is not None for group in self.groups.values())
        if is_replaced and any(has_state(optimizer, group.first.weight) for group in self.groups.values()):
            raise ValueError(
                f"optimizer ({type(optimizer).__name__}) has a state of tables of {self.name}, which is not converted"
                " to TorchRec's tables: compress the model before the optimizer's first step"
            )


def collections_in(model: nn.Module, groups: list[WeightGroup]) -> list[TorchRecCollection]:
    """TorchRec's collections in a model. Tables inside quorem's collections are composed already and leave ``groups``.

    Raises:
        TypeError: if the model itself is a collection.
        ValueError: if the model is sharded.
    """
    if isinstance(model, (POOLED, UNPOOLED, *OURS)):
        raise TypeError(f"model ({type(model).__name__}) must contain collections: one alone cannot be replaced")
    by_module = {id(module): group for group in groups for module in group.members.values()}
    inside = {id(module) for parent in model.modules() if isinstance(parent, OURS) for module in parent.modules()}
    composed = {id(group) for module, group in by_module.items() if module in inside}
    groups[:] = [group for group in groups if id(group) not in composed]
    collections: dict[int, TorchRecCollection] = {}
    for path, parent in model.named_modules():
        if isinstance(parent, ShardedModule):
            raise ValueError(f"model must not be sharded, but {path} is: compress it before DistributedModelParallel")
        for key, child in parent.named_children():
            if isinstance(child, POOLED | UNPOOLED) and id(child) not in inside and id(child) not in collections:
                collections[id(child)] = TorchRecCollection(f"{path}.{key}" if path else key, child, parent)
    for collection in collections.values():
        for name, module in table_modules(collection.module).items():
            collection.groups[name] = by_module[id(module)]
            by_module[id(module)].collection = collection
        reason = _reason(collection)
        for group in collection.groups.values():
            group.reason = group.reason or reason
    return list(collections.values())


def configs_of(collection: Any) -> list[Any]:
    """The configs of the tables of TorchRec's collection, or of the full tables that quorem's collection stands for."""
    pooled = isinstance(collection, POOLED | integration.EmbeddingBagCollection)
    configs: list[Any] = collection.embedding_bag_configs() if pooled else collection.embedding_configs()
    return configs


def table_modules(collection: Any) -> nn.ModuleDict:
    """The ``nn.EmbeddingBag`` or ``nn.Embedding`` of each table of TorchRec's collection, by the table's name."""
    tables: nn.ModuleDict = collection.embedding_bags if isinstance(collection, POOLED) else collection.embeddings
    return tables


def _reason(collection: TorchRecCollection) -> str:
    """Why a collection cannot be replaced; empty if it can."""
    module, configs, parent = collection.module, configs_of(collection.module), type(collection.parent)
    if type(module) not in (POOLED, UNPOOLED):
        return f"its collection is a {type(module).__name__}"
    if parent.__module__.startswith("torchrec.modules."):
        return f"its collection belongs to a {parent.__name__}, which needs TorchRec's own"
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


def _sizes(new: Ours, kind: Optimizer | None) -> dict[str, tuple[int, int]]:
    """Bytes of each table and of its optimizer state; the bytes of a pool count for the first of its tables."""
    dtype = next(new.parameters()).dtype
    sizes: dict[str, tuple[int, int]] = {}
    pools: set[str] = set()
    for feature in new.rows.features:
        if feature.table in sizes:
            continue
        spec = feature.spec
        shapes, numbers = list(spec.shapes), spec.num_parameters
        for part in feature.stored[0].parts if spec.pool is not None else ():
            if part.name.startswith("pools.") and part.name not in pools:
                pools.add(part.name)
                shapes.append((part.num_rows, spec.width))
                numbers += part.num_rows * spec.width
        lists = sum(span[1] for span in (feature.hot, feature.cold) if span is not None) * new.rows.id_lists.itemsize
        storages = [
            (rows, width, TrainedStorage((width,), (1,), dtype, True, kind, lags=False)) for rows, width in shapes
        ]
        state = sum(rows * storage.rate(width).row_state for rows, width, storage in storages)
        if spec.is_narrow:
            state += storages[0][2].matrix(spec.width, spec.embedding_dim).row_state
        sizes[feature.table] = numbers * dtype.itemsize + lists, state
    return sizes


def decompress(
    model: nn.Module, modules: dict[nn.Module, nn.Module], targets: dict[Tensor, list[Tensor]]
) -> list[Entry]:
    """Add to ``modules`` TorchRec's collection for each of quorem's; returns what was done with each table.

    In ``targets`` its tables replace the first parameter of quorem's collection, and the others are replaced by none.
    """
    entries = []
    for path, module in model.named_modules():
        if not isinstance(module, OURS):
            continue
        sizes, reason = _sizes(module, None), _not_plain(module)
        if not reason:
            new = modules[module] = _plain(module)
            targets |= {p: [] if i else list(new.parameters()) for i, p in enumerate(module.parameters())}
        for table in module.tables:
            before, size = sizes[table.name][0], table.num_embeddings * table.embedding_dim
            after = before if reason else size * next(module.parameters()).itemsize
            name = f"{path}.{table.name}" if path else table.name
            scheme, why = (None, reason) if reason else (Full(), "decompressed")
            entries.append(Entry(name, table.num_embeddings, table.embedding_dim, before, after, 0, scheme, why))
    return entries


def _not_plain(module: Any) -> str:
    """Why quorem's collection has no equivalent of TorchRec's; empty if it has one."""
    specs = {feature.table: feature.spec for feature in module.rows.features}
    if several := [name for name, spec in specs.items() if spec.num_vectors > 1]:
        return f"TorchRec has no table that gives several vectors an id ({', '.join(several)})"
    padded = [table.name for table in module.tables if table.padding_idx is not None]
    if padded and getattr(module, "mode", "sum") == "mean":
        return f"TorchRec's tables have no padding id, which a mean does not count ({', '.join(padded)})"
    if raw := [table.name for table in module.tables if table.raw_ids]:
        return f"TorchRec's tables take no raw ids ({', '.join(raw)})"
    return ""


def _plain(module: Any) -> nn.Module:
    """TorchRec's collection with the full tables that are equivalent to quorem's."""
    first = next(module.parameters())
    dense = {} if first.is_meta else integration.to_collection(module).to_dense()
    configs = configs_of(module)
    for config in configs:
        config.data_type = DATA_TYPES[first.dtype]
    new: Any
    if isinstance(module, integration.EmbeddingBagCollection):
        new = POOLED(configs, is_weighted=module.rows.weighted, device=torch.device("meta"))
    else:
        new = UNPOOLED(configs, device=torch.device("meta"))
    new._device = first.device
    for name, embedding in table_modules(new).items():
        if name in dense:
            embedding.weight = nn.Parameter(dense[name].detach().to(first.device), requires_grad=first.requires_grad)
    keep_(module, new)
    return new
