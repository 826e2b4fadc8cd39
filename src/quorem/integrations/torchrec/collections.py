"""``EmbeddingBagCollection`` and ``EmbeddingCollection`` on top of TorchRec's own, which its planner shards."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardingType
from torchrec.modules import embedding_modules as stock
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from ...checks import InvalidIdMode, Pooling
from ...modules import collection as single
from ...modules.path_networks import PathNetworks
from ...paper import init
from ..features import Feature, StoredTable, features_of
from ..shards import Shards, balanced_shards
from .compose import Gathered, GatheredBags, Pooled, Unpooled
from .init import Uniform
from .rows import RowNumbers, UniqueRows

CPU = torch.device("cpu")
REPLICATED = ShardingType.DATA_PARALLEL.value
DATA_TYPES = {torch.float32: DataType.FP32, torch.float16: DataType.FP16}


class EmbeddingBagCollection(nn.Module):
    """Pooled vectors of every feature, like ``torchrec.EmbeddingBagCollection``, from composed tables.

    It contains TorchRec's own modules, which ``DistributedModelParallel`` shards: one pooled table for each table with
    ``add`` (its bags contain row numbers), one for each partition with ``concat``, and unpooled tables for ``mult`` and
    path-based tables, whose vectors are composed before they are pooled.

    Args:
        tables: as in ``quorem.EmbeddingCollection``; every stored width must be a multiple of 4.
        mode: ``"sum"`` or ``"mean"``.
        is_weighted: whether the features have weights.
        num_shards: None for tables as above. A number divides the rows of all tables of one width among so many pooled
            tables, usually as many as ranks. Each rank then requests every row of its batch once, and composes and
            pools the rows itself: fewer bytes are sent if ids repeat within a batch.
        on_invalid_id: as in ``quorem.Embedding``, for GPUs; on the CPU such an id raises IndexError.
        device: device of the tables; with ``"meta"`` they are allocated when they are sharded.
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
        num_shards: int | None = None,
        on_invalid_id: InvalidIdMode = "warn",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        device = torch.device("cpu" if device is None else device)
        features, id_lists, paths, projections = _checked(tables, mode, on_invalid_id, dtype, device)
        self.tables, self.mode = tuple(tables), mode
        self.embedding_dims = tuple(f.spec.embedding_dim for f in features for _ in range(f.spec.num_vectors))
        if num_shards is not None:
            shards = balanced_shards(features, id_lists, tables, num_shards)
            self.bags, self.vectors = None, _shard_collections(shards, dtype, device)
            self.rows: RowNumbers = UniqueRows(features, id_lists, shards, is_weighted, on_invalid_id)
            self.compose: Unpooled = GatheredBags(features, paths, projections, shards, mode)
            return
        configs = _configs([f for f in features if f.summed], dtype)
        self.vectors = _collections([f for f in features if not f.summed], dtype, device)
        self.bags = _bags(configs, device, is_weighted) if configs else None
        bag_keys = [key for config in configs for key in config["feature_names"]]
        self.rows = RowNumbers(features, id_lists, bag_keys, _keys(self.vectors), is_weighted, on_invalid_id)
        self.compose = Pooled(features, paths, projections, mode)

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

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configs of the full tables that the composed ones replace, in the form that TorchRec's models expect."""
        pooling = PoolingType(self.mode.upper())
        return [EmbeddingBagConfig(**config, pooling=pooling) for config in _replaced_configs(self.rows.features)]

    def is_weighted(self) -> bool:
        """Whether the features have weights."""
        return self.rows.weighted


class EmbeddingCollection(nn.Module):
    """Vectors of every id, like ``torchrec.EmbeddingCollection``, from composed tables.

    It contains TorchRec's own collections, one for each stored width. Weights of the features are not used.

    Args:
        tables: as in ``quorem.EmbeddingCollection``; every stored width must be a multiple of 4.
        num_shards: None for tables as above. A number divides the rows of all tables of one width among so many pooled
            tables, usually as many as ranks. Each rank then requests every row of its batch once, and composes the
            vectors itself: fewer bytes are sent if ids repeat within a batch.
        on_invalid_id: as in ``quorem.Embedding``, for GPUs; on the CPU such an id raises IndexError.
        device: device of the tables; with ``"meta"`` they are allocated when they are sharded.
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
        num_shards: int | None = None,
        on_invalid_id: InvalidIdMode = "warn",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        device = torch.device("cpu" if device is None else device)
        features, id_lists, paths, projections = _checked(tables, "sum", on_invalid_id, dtype, device)
        self.tables = tuple(tables)
        if num_shards is not None:
            shards = balanced_shards(features, id_lists, tables, num_shards)
            self.vectors = _shard_collections(shards, dtype, device)
            self.rows: RowNumbers = UniqueRows(features, id_lists, shards, False, on_invalid_id)
            self.compose: Unpooled = Gathered(features, paths, projections, shards)
            return
        self.vectors = _collections(features, dtype, device)
        self.rows = RowNumbers(features, id_lists, [], _keys(self.vectors), False, on_invalid_id)
        self.compose = Unpooled(features, paths, projections)

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

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Configs of the full tables that the composed ones replace, in the form that TorchRec's models expect."""
        return [EmbeddingConfig(**config) for config in _replaced_configs(self.rows.features)]


Collection = EmbeddingBagCollection | EmbeddingCollection


def _check_plan(vectors: nn.ModuleList) -> None:
    """Raise RuntimeError if the plan replicates unpooled tables on the CPU, where FBGEMM would pool them."""
    for group in vectors:
        plan = getattr(group, "module_sharding_plan", None) if hasattr(group, "embeddings") else None
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
) -> tuple[list[Feature], Tensor, nn.ModuleList, nn.ParameterList]:
    """Check the arguments.

    Returns:
        The features, the lists of hot and cold ids, the networks of path-based tables, and the matrices of narrow rows.
        Networks and matrices are never on meta.
    """
    if dtype not in (None, *DATA_TYPES):
        raise ValueError(f"dtype ({dtype}) must be torch.float32 or torch.float16")
    template = single.EmbeddingCollection(tables, mode=mode, on_invalid_id=on_invalid_id, device="meta")
    features, id_lists = features_of(template)
    stored = {table.name: table for f in features for table in f.stored}
    for f in features:
        for table in f.stored:
            if "." in table.name:
                raise ValueError(f"name ({f.table!r}) must not contain '.': TorchRec's tables are modules of that name")
            if table.width % 4:
                raise ValueError(
                    f"width ({table.width}) of table {table.name!r} must be a multiple of 4 for FBGEMM: for a plan,"
                    " give row_multiple=4"
                )
            if table != stored[table.name]:
                raise ValueError(f"table name {table.name!r} must not be that of a pool or of another table's part")
    paths = nn.ModuleList(cast(list[PathNetworks], list(template.paths)))
    home = torch.device("cpu") if device.type == "meta" else device
    for networks in cast(list[PathNetworks], list(paths)):
        networks.to_empty(device=home)
        networks.register_integers(home)
        networks.reset_parameters()
    projections = nn.ParameterList(torch.empty_like(matrix, device=home) for matrix in template.projections)
    for matrix in projections:
        init.projection_(matrix)
    return features, id_lists, paths, projections


def _config(table: StoredTable, keys: Sequence[str], dtype: torch.dtype | None) -> dict[str, Any]:
    """The arguments of TorchRec's config for a stored table that is read by these keys."""
    return {
        "name": table.name,
        "num_embeddings": table.num_rows,
        "embedding_dim": table.width,
        "feature_names": list(keys),
        "data_type": DATA_TYPES[dtype or torch.float32],
        "init_fn": Uniform(table.parts),
    }


def _configs(features: Iterable[Feature], dtype: torch.dtype | None) -> list[dict[str, Any]]:
    """The arguments of TorchRec's configs for each stored table of the features."""
    keys: dict[StoredTable, list[str]] = {}
    for f in features:
        for key, table in zip(f.keys, f.stored, strict=True):
            keys.setdefault(table, []).append(key)
    return [_config(table, of_table, dtype) for table, of_table in keys.items()]


def _replaced_configs(features: Iterable[Feature]) -> list[dict[str, Any]]:
    """The arguments of TorchRec's configs for the full tables that the composed ones replace."""
    configs: dict[str, dict[str, Any]] = {}
    for f in features:
        size = {"num_embeddings": f.spec.num_embeddings, "embedding_dim": f.width}
        configs.setdefault(f.table, {"name": f.table, "feature_names": [], **size})["feature_names"].append(f.name)
    return list(configs.values())


def _bags(
    configs: Iterable[dict[str, Any]], device: torch.device, is_weighted: bool = False
) -> stock.EmbeddingBagCollection:
    """TorchRec's collection of pooled vectors."""
    tables = [EmbeddingBagConfig(**config, pooling=PoolingType.SUM) for config in configs]
    return stock.EmbeddingBagCollection(tables, is_weighted=is_weighted, device=device)


def _shard_collections(shards: Shards, dtype: torch.dtype | None, device: torch.device) -> nn.ModuleList:
    """TorchRec's collections for shards, one for each width; every bag in them has one row."""
    configs = [[_config(table, [table.name], dtype) for table in group] for group in shards.groups]
    return nn.ModuleList(_bags(group, device) for group in configs)


def _collections(features: Iterable[Feature], dtype: torch.dtype | None, device: torch.device) -> nn.ModuleList:
    """TorchRec's collections of unpooled vectors, one for each width."""
    by_width: dict[int, list[EmbeddingConfig]] = {}
    for config in _configs(features, dtype):
        by_width.setdefault(config["embedding_dim"], []).append(EmbeddingConfig(**config))
    return nn.ModuleList(stock.EmbeddingCollection(configs, device=device) for configs in by_width.values())


def _keys(collections: nn.ModuleList) -> list[list[str]]:
    """The keys of each of TorchRec's collections of unpooled vectors."""
    return [[key for config in each.embedding_configs() for key in config.feature_names] for each in collections]  # type: ignore[operator]
