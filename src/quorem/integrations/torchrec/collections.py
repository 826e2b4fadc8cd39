"""``EmbeddingBagCollection`` and ``EmbeddingCollection`` over TorchRec's own, which its planner shards."""

from collections.abc import Iterable, Sequence
from functools import reduce
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardingType
from torchrec.modules import embedding_modules as stock
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from ... import collection as single
from ...checks import InvalidIdMode, Pooling
from ...paths import PathNetworks
from ..features import Feature, features_of
from .draw import Uniform
from .rows import Ids, RowBatch, RowNumbers, lengths_of

CPU = torch.device("cpu")
REPLICATED = ShardingType.DATA_PARALLEL.value
DATA_TYPES = {torch.float32: DataType.FP32, torch.float16: DataType.FP16}


class EmbeddingBagCollection(nn.Module):
    """Pooled vectors of every feature, as ``torchrec.EmbeddingBagCollection``, over composed tables.

    Inside are TorchRec's own modules, which ``DistributedModelParallel`` shards: a pooled table for each table that
    adds (its bags hold row numbers), one for each partition that is concatenated, and unpooled tables for ``mult`` and
    path-based ones, composed before they are pooled.

    Args:
        tables: as in ``quorem.EmbeddingCollection``; every stored width must be a multiple of 4.
        mode: ``"sum"`` or ``"mean"``.
        is_weighted: whether the features come with weights.
        on_invalid_id: as in ``quorem.Embedding``, for GPUs; on the CPU such an id raises IndexError.
        device: where the tables are; ``"meta"`` to have them allocated as they are sharded.
        dtype: float32 or float16.

    Raises:
        ValueError: if an argument is not as above.

    >>> from quorem import QR, Table
    >>> bags = EmbeddingBagCollection([Table("user", 1000, 16, QR(4)), Table("day", 7, 16)])
    >>> ids = KeyedJaggedTensor(["day", "user"], torch.tensor([6, 999, 5]), lengths=torch.tensor([1, 0, 0, 2]))
    >>> pooled = bags(ids)
    >>> pooled.keys(), pooled.values().shape
    (['user', 'day'], torch.Size([2, 32]))
    """

    def __init__(
        self,
        tables: Sequence[single.Table],
        *,
        mode: Pooling = "sum",
        is_weighted: bool = False,
        on_invalid_id: InvalidIdMode = "warn",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        device = torch.device("cpu" if device is None else device)
        features, ranks, paths = _checked(tables, mode, on_invalid_id, dtype, device)
        self.tables, self.mode = tuple(tables), mode
        self.embedding_dims = tuple(f.spec.embedding_dim for f in features for _ in range(f.spec.num_vectors))
        configs = _configs([f for f in features if f.summed], dtype)
        bags = [EmbeddingBagConfig(**config, pooling=PoolingType.SUM) for config in configs]
        self.vectors = _collections([f for f in features if not f.summed], dtype, device)
        self.bags = stock.EmbeddingBagCollection(bags, is_weighted=is_weighted, device=device) if bags else None
        keys = [_keys(group.embedding_configs()) for group in self.vectors]  # type: ignore[operator]
        self.rows = RowNumbers(features, ranks, _keys(bags), keys, is_weighted, on_invalid_id)
        self.compose = Pooled(features, paths, mode)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Composed, then pooled vectors: a KeyedTensor ``[B, sum D]``, keys in the order of the tables.

        Raises:
            KeyError: if a feature is missing.
            ValueError: if weights are missing, or keys have batch sizes of their own.
            TypeError: if the ids are not integers.
            IndexError: if an id on the CPU is outside its table.
            RuntimeError: if unpooled tables were replicated on the CPU.
        """
        _check_plan(self.vectors)
        rows = self.rows(features)
        pooled = None if self.bags is None else self.bags(rows.bags)
        vectors = [group(rows.vectors[i]) for i, group in enumerate(self.vectors)]
        return self.compose(rows, pooled, vectors)


class EmbeddingCollection(nn.Module):
    """Vectors of every id, as ``torchrec.EmbeddingCollection``, over composed tables.

    Inside are TorchRec's own collections, one for each stored width. Weights of the features are not used.

    Args:
        tables: as in ``quorem.EmbeddingCollection``; every stored width must be a multiple of 4.
        on_invalid_id: as in ``quorem.Embedding``, for GPUs; on the CPU such an id raises IndexError.
        device: where the tables are; ``"meta"`` to have them allocated as they are sharded.
        dtype: float32 or float16.

    Raises:
        ValueError: if an argument is not as above.

    >>> from quorem import QR, Table
    >>> vectors = EmbeddingCollection([Table("user", 1000, 16, QR(4))])
    >>> ids = KeyedJaggedTensor(["user"], torch.tensor([7, 999, 5]), lengths=torch.tensor([1, 0, 2]))
    >>> vectors(ids)["user"].values().shape
    torch.Size([3, 16])
    """

    def __init__(
        self,
        tables: Sequence[single.Table],
        *,
        on_invalid_id: InvalidIdMode = "warn",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        device = torch.device("cpu" if device is None else device)
        features, ranks, paths = _checked(tables, "sum", on_invalid_id, dtype, device)
        self.tables = tuple(tables)
        self.vectors = _collections(features, dtype, device)
        keys = [_keys(group.embedding_configs()) for group in self.vectors]  # type: ignore[operator]
        self.rows = RowNumbers(features, ranks, [], keys, False, on_invalid_id)
        self.compose = Unpooled(features, paths)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Composed vectors: a JaggedTensor ``[N, D]`` for each feature, in the order of the tables.

        Raises:
            KeyError: if a feature is missing.
            ValueError: if keys have batch sizes of their own.
            TypeError: if the ids are not integers.
            IndexError: if an id on the CPU is outside its table.
            RuntimeError: if unpooled tables were replicated on the CPU.
        """
        _check_plan(self.vectors)
        rows = self.rows(features)
        return self.compose(rows, [group(rows.vectors[i]) for i, group in enumerate(self.vectors)])


class Unpooled(nn.Module):
    """From TorchRec's vectors to those of each feature's ids."""

    def __init__(self, features: Sequence[Feature], paths: Sequence[PathNetworks]) -> None:
        super().__init__()
        self.features = tuple(features)
        self.paths = nn.ModuleList(paths)
        self.member = {  # networks of each path-based feature, and its position among their members
            features[f].name: (group, position)
            for group, networks in enumerate(paths)
            for position, f in enumerate(networks.members)
        }

    def composed(self, feature: Feature, batch: Ids, ranks: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """The feature's vectors ``[N, width]``; zeros for ids that read no row."""
        parts, used = [vectors[key] for key in feature.keys], batch.used
        if feature.merged:
            rows = parts[0] if used is None else _scattered(parts[0], used.flatten(), 0)
            if len(rows) != len(batch.ids):
                rows = rows.view(len(batch.ids), len(feature.bases), rows.shape[1]).sum(1)
            if feature.spec.hidden is None:
                return rows
            group, position = self.member[feature.name]
            return self.paths[group](rows, batch.ids, torch.full_like(batch.ids, position), ranks)
        if used is None:
            return _combined(feature, parts)
        neutral = 1 if feature.spec.operation == "mult" else 0
        own = feature.spec.num_own > 0  # the first part
        parts = [_scattered(part, used[:, j], 0 if own and not j else neutral) for j, part in enumerate(parts)]
        out = torch.where(used[:, -1:], _combined(feature, parts[own:]), 0)
        return out + parts[0] if own else out

    def forward(self, rows: RowBatch, vectors: list[Any]) -> dict[str, JaggedTensor]:
        """Compose each feature's vectors."""
        by_key = _by_key(vectors)
        return {
            f.name: JaggedTensor(self.composed(f, batch, rows.ranks, by_key), lengths=batch.lengths)
            for f, batch in zip(self.features, rows.features, strict=True)
        }


class Pooled(Unpooled):
    """From TorchRec's pooled and unpooled vectors to the pooled vector of each feature."""

    def __init__(self, features: Sequence[Feature], paths: Sequence[PathNetworks], mode: str) -> None:
        super().__init__(features, paths)
        self.mode = mode
        in_order = mode == "sum" and all(f.summed and (f.merged or not f.spec.num_own) for f in features)
        self.order = [key for f in features for key in f.keys] if in_order else []

    def forward(  # type: ignore[override]
        self, rows: RowBatch, pooled: KeyedTensor | None, vectors: list[Any]
    ) -> KeyedTensor:
        """Compose and pool what TorchRec did not, and put the features in order."""
        names, widths = [f.name for f in self.features], [f.width for f in self.features]
        num_samples = len(rows.features[0].lengths)  # of an empty batch, TorchRec was given one sample
        if pooled is not None and self.order:
            return KeyedTensor(names, widths, in_order(pooled, self.order)[:num_samples])
        columns = {} if pooled is None else {key: part[:num_samples] for key, part in pooled.to_dict().items()}
        by_key = _by_key(vectors)
        out = []
        for f, batch in zip(self.features, rows.features, strict=True):
            if f.summed:
                parts, own = [columns[key] for key in f.keys], not f.merged and f.spec.num_own > 0
                part = _combined(f, parts[own:])
                part = part + parts[0] if own else part
            else:
                part = _pool(self.composed(f, batch, rows.ranks, by_key), batch)
            out.append(part if self.mode == "sum" else part / _num_ids(batch).clamp(min=1)[:, None])
        return KeyedTensor(names, widths, torch.cat(out, 1))


def in_order(pooled: KeyedTensor, order: list[str]) -> Tensor:
    """The columns of a KeyedTensor by keys in another order; TorchRec's follows the plan."""
    keys, values = pooled.keys(), pooled.values()
    if keys == order:
        return values
    widths, offsets = dict(zip(keys, pooled.length_per_key(), strict=True)), pooled.offset_per_key()
    unit = gcd(*widths.values())
    first = {key: offset // unit for key, offset in zip(keys, offsets, strict=False)}
    blocks = [block for key in order for block in range(first[key], first[key] + widths[key] // unit)]
    return Reordered.apply(values, torch.tensor(blocks, device=values.device), unit)


class Reordered(torch.autograd.Function):
    """``values`` ``[B, C * unit]`` with its blocks of ``unit`` columns in another order: one copy each way."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, blocks: Tensor, unit: int) -> Tensor:
        """Block j of the result is block ``blocks[j]``."""
        ctx.save_for_backward(blocks)
        ctx.unit = unit
        return values.unflatten(1, (-1, unit)).index_select(1, blocks).flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Each block of the gradient goes back to its place."""
        (blocks,) = ctx.saved_tensors
        back = torch.empty_like(blocks).index_copy_(0, blocks, torch.arange(len(blocks), device=blocks.device))
        return grads[0].unflatten(1, (-1, ctx.unit)).index_select(1, back).flatten(1), None, None


def _combined(feature: Feature, parts: list[Tensor]) -> Tensor:
    """The product of the parts, or the parts end to end."""
    if len(parts) == 1:
        return parts[0]
    return reduce(torch.mul, parts) if feature.spec.operation == "mult" else torch.cat(parts, 1)


def _scattered(rows: Tensor, mask: Tensor, neutral: float) -> Tensor:
    """``rows`` where ``mask`` is true, and ``neutral`` elsewhere."""
    (places,) = mask.nonzero(as_tuple=True)
    return rows.new_full((len(mask), rows.shape[1]), neutral).index_copy(0, places, rows)


def _pool(vectors: Tensor, batch: Ids) -> Tensor:
    """The weighted sum ``[B, D]`` of the vectors ``[N, D]`` of each bag."""
    if batch.weights is not None:
        vectors = vectors * batch.weights[:, None]
    bags = torch.arange(len(batch.lengths), device=vectors.device)
    bags = bags.repeat_interleave(batch.lengths, output_size=len(vectors))
    return vectors.new_zeros(len(batch.lengths), vectors.shape[1]).index_add(0, bags, vectors)


def _num_ids(batch: Ids) -> Tensor:
    """Number of ids ``[B]`` in each bag that read rows."""
    return batch.lengths if batch.used is None else lengths_of(batch.used.any(1), batch.lengths)


def _by_key(vectors: list[Any]) -> dict[str, Tensor]:
    return {key: jagged.values() for group in vectors for key, jagged in group.items()}


def _check_plan(vectors: nn.ModuleList) -> None:
    """Raise RuntimeError where the plan replicates unpooled tables on the CPU: FBGEMM pools them there."""
    for group in vectors:
        plan = getattr(group, "module_sharding_plan", None)
        if plan is not None and getattr(group, "_device", CPU) == CPU:
            replicated = [name for name, table in plan.items() if table.sharding_type == REPLICATED]
            if replicated:
                tables = ", ".join(map(repr, replicated))
                raise RuntimeError(
                    f"tables {tables} are replicated on the CPU, where FBGEMM would pool their vectors: plan with"
                    " quorem.integrations.torchrec.constraints(model, ...)"
                )


def _checked(
    tables: Sequence[single.Table],
    mode: Pooling,
    on_invalid_id: InvalidIdMode,
    dtype: torch.dtype | None,
    device: torch.device,
) -> tuple[list[Feature], Tensor, list[PathNetworks]]:
    """Features, lists of hot and cold ids, and the networks of path-based tables, which are never on meta."""
    if dtype not in (None, *DATA_TYPES):
        raise ValueError(f"dtype ({dtype}) must be torch.float32 or torch.float16")
    template = single.EmbeddingCollection(tables, mode=mode, on_invalid_id=on_invalid_id, device="meta")
    features, ranks = features_of(template)
    stored = {table.name: table for f in features for table in f.stored}
    for f in features:
        for table in f.stored:
            if "." in table.name:
                raise ValueError(f"name ({f.table!r}) must not contain '.': TorchRec's tables are modules of that name")
            if table.width % 4:
                raise ValueError(f"width ({table.width}) of table {table.name!r} must be a multiple of 4 for FBGEMM")
            if table != stored[table.name]:
                raise ValueError(f"table name {table.name!r} must not be that of a pool or of another table's part")
    paths = cast(list[PathNetworks], list(template.paths))
    for networks in paths:
        networks.to_empty(device="cpu" if device.type == "meta" else device)
        networks.place_integers(networks.weights[0].device)
        networks.reset_parameters()
    return features, ranks, paths


def _configs(features: Iterable[Feature], dtype: torch.dtype | None) -> list[dict[str, Any]]:
    """What TorchRec's configs take for each stored table of the features."""
    configs: dict[str, dict[str, Any]] = {}
    for f in features:
        for key, stored in zip(f.keys, f.stored, strict=True):
            config = {
                "name": stored.name,
                "num_embeddings": stored.num_rows,
                "embedding_dim": stored.width,
                "feature_names": [],
                "data_type": DATA_TYPES[dtype or torch.float32],
                "init_fn": Uniform(stored.parts),
            }
            configs.setdefault(stored.name, config)["feature_names"].append(key)
    return list(configs.values())


def _collections(features: Iterable[Feature], dtype: torch.dtype | None, device: torch.device) -> nn.ModuleList:
    """TorchRec's collections of unpooled vectors, one for each width."""
    by_width: dict[int, list[EmbeddingConfig]] = {}
    for config in _configs(features, dtype):
        by_width.setdefault(config["embedding_dim"], []).append(EmbeddingConfig(**config))
    return nn.ModuleList(stock.EmbeddingCollection(configs, device=device) for configs in by_width.values())


def _keys(configs: Iterable[EmbeddingBagConfig | EmbeddingConfig]) -> list[str]:
    return [key for config in configs for key in config.feature_names]
