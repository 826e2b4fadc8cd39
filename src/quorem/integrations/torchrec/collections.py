"""``EmbeddingBagCollection`` and ``EmbeddingCollection`` on top of TorchRec's own, which its planner shards.

``constraints`` tells the planner what it needs to know.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules import embedding_modules as stock
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ...checks import InvalidIdMode, Pooling, check_choice, check_int
from ...modules import collection as single
from .compose import Compose
from .rows import Part, RowNumbers

DATA_TYPES = {torch.float32: DataType.FP32, torch.float16: DataType.FP16}


class Collection(nn.Module):
    """What both collections share: ``vectors`` has TorchRec's tables by width, among which all rows are divided.

    Each rank requests the distinct rows of its batch, and composes and pools by itself. ``template`` is a single-device
    collection of the same tables on the meta device.
    """

    template: single.EmbeddingCollection
    mode: Pooling | None = None  # how bags are pooled, if they are

    def __init__(
        self,
        tables: Sequence[single.Table],
        *,
        num_shards: int = 8,
        on_invalid_id: InvalidIdMode = "warn",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        device = torch.device("cpu" if device is None else device)
        if dtype not in (None, *DATA_TYPES):
            raise ValueError(f"dtype ({dtype}) must be torch.float32 or torch.float16")
        template = single.EmbeddingCollection(tables, on_invalid_id=on_invalid_id, device="meta")
        self.__dict__["template"] = template  # not as a module: its parameters hold nothing
        self.tables, self.embedding_dims = tuple(tables), template.embedding_dims
        self.rows = RowNumbers(template, check_int("num_shards", num_shards))
        for part in (part for parts in self.rows.parts_read for part in parts):
            if part.width % 4:
                rule = "must be a multiple of 4 for FBGEMM: for a plan, give row_multiple=4"
                raise ValueError(f"width ({part.width}) of {part.name} {rule}")
        data_type = DATA_TYPES[dtype or torch.float32]
        self.vectors = nn.ModuleList()
        for group in self.rows.groups:
            configs = [
                EmbeddingBagConfig(
                    name=shard.name,
                    num_embeddings=shard.num_rows,
                    embedding_dim=shard.width,
                    feature_names=[shard.name],
                    data_type=data_type,
                    init_fn=partial(_init_, parts=shard.parts),
                )
                for shard in group
            ]
            self.vectors.append(stock.EmbeddingBagCollection(configs, device=device))
        self.compose = Compose(template, self.rows, device)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """The vectors of the features: pooled, as a KeyedTensor ``[B, sum D]``, or else a JaggedTensor for each.

        Raises:
            KeyError: if a feature is missing.
            ValueError: if weights are missing, or keys have batch sizes of their own.
            TypeError: if the ids are not integers.
            IndexError: if an id on the CPU is outside its table.
        """
        rows = self.rows(features)
        return self.compose(rows, [group(rows.rows[i]) for i, group in enumerate(self.vectors)])

    def parts_of_weights(self) -> dict[str, tuple[Part, ...]]:
        """The stored tables of the single-device collection in each of TorchRec's weights, by its name."""
        return {
            f"vectors.{i}.embedding_bags.{shard.name}.weight": shard.parts
            for i, group in enumerate(self.rows.groups)
            for shard in group
        }

    def _replaced_configs(self) -> list[dict[str, Any]]:
        """The arguments of TorchRec's configs for the full tables that the composed ones replace."""
        configs: list[dict[str, Any]] = []
        for table, spec in zip(self.tables, self.template.specs, strict=True):
            sizes = {"num_embeddings": spec.num_embeddings, "embedding_dim": spec.embedding_dim * spec.num_vectors}
            configs.append({"name": table.name, **sizes, "feature_names": list(table.features)})
        return configs


class EmbeddingBagCollection(Collection):
    """Pooled vectors of every feature, like ``torchrec.EmbeddingBagCollection``, from composed tables.

    The rows of all tables are divided among a few pooled tables of TorchRec's, which ``DistributedModelParallel``
    shards like any others. A rank requests every row of its batch once, and composes and pools the rows itself.

    Args:
        tables: as in ``quorem.EmbeddingCollection``; every stored width must be a multiple of 4.
        mode: ``"sum"`` or ``"mean"``.
        is_weighted: whether the features have weights.
        num_shards: the most tables of TorchRec's of one width; give at least the number of ranks.
        on_invalid_id: as in ``quorem.Embedding``, for GPUs; on the CPU such an id raises IndexError.
        device: device of the tables; with ``"meta"`` they are allocated when they are sharded.
        dtype: float32 or float16.

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
        num_shards: int = 8,
        on_invalid_id: InvalidIdMode = "warn",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice("mode", mode, Pooling)
        super().__init__(tables, num_shards=num_shards, on_invalid_id=on_invalid_id, device=device, dtype=dtype)
        self.mode = self.compose.mode = mode
        self.rows.weighted = is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configs of the full tables that the composed ones replace, in the form that TorchRec's models expect."""
        assert self.mode is not None
        pooling = PoolingType(self.mode.upper())
        return [EmbeddingBagConfig(**config, pooling=pooling) for config in self._replaced_configs()]

    def is_weighted(self) -> bool:
        """Whether the features have weights."""
        return self.rows.weighted


class EmbeddingCollection(Collection):
    """Vectors of every id, like ``torchrec.EmbeddingCollection``, from composed tables. Weights are not used.

    The arguments are those of ``EmbeddingBagCollection``.

    >>> from quorem import QR, Table
    >>> vectors = EmbeddingCollection([Table("user", 1000, 16, QR(4))])
    >>> ids = KeyedJaggedTensor(["user"], torch.tensor([7, 999, 5]), lengths=torch.tensor([1, 0, 2]))
    >>> vectors(ids)["user"].values().shape
    torch.Size([3, 16])
    """

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Configs of the full tables that the composed ones replace, in the form that TorchRec's models expect."""
        return [EmbeddingConfig(**config) for config in self._replaced_configs()]


def constraints(
    model: nn.Module,
    *,
    batch_size: int,
    ids_per_sample: Mapping[str, float] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, ParameterConstraints]:
    """Constraints for ``EmbeddingShardingPlanner``: how many rows a sample reads, and that tables stay whole by rows.

    No table is replicated, since a row is sent once however often a batch reads it.

    Args:
        model: a model with collections of ``quorem.integrations.torchrec``, not yet sharded.
        batch_size: batch size of each rank.
        ids_per_sample: mean number of ids by feature; 1 where absent.
        device: device that the tables will be on.

    Raises:
        ValueError: if the model contains no such collection, or ``ids_per_sample`` names a feature that none has.

    >>> from quorem import Table
    >>> from quorem.integrations.torchrec import EmbeddingBagCollection
    >>> by_table = constraints(EmbeddingBagCollection([Table("day", 7, 16)]), batch_size=70)
    >>> by_table["rows16:0"].pooling_factors, by_table["rows16:0"].sharding_types[0]
    ([0.1], 'table_wise')
    """
    ids_per_sample = {} if ids_per_sample is None else ids_per_sample
    collections = [module for module in model.modules() if isinstance(module, Collection)]
    if not collections:
        raise ValueError(f"model ({type(model).__name__}) must contain a collection of quorem.integrations.torchrec")
    names = {name for collection in collections for name in collection.rows.names}
    if extra := sorted(set(ids_per_sample) - names):
        raise ValueError(f"ids_per_sample names {', '.join(map(repr, extra))} but must name features of the model")
    types = EmbeddingBagCollectionSharder().sharding_types(torch.device(device).type)
    by_table = {}
    for collection in collections:
        distinct = collection.rows.expected_rows(batch_size, ids_per_sample)
        for shard in (shard for group in collection.rows.groups for shard in group):
            by_table[shard.name] = ParameterConstraints(
                sharding_types=[kind for kind in types if kind in ("table_wise", "column_wise", "table_column_wise")],
                pooling_factors=[sum(distinct[part.name] for part in shard.parts) / batch_size],
                bounds_check_mode=BoundsCheckMode.NONE,  # row numbers are in range by construction
            )
    return by_table


@torch.no_grad()
def _init_(weight: Tensor, parts: Sequence[Part]) -> None:
    """Draw a table of TorchRec's, or the columns of it that a rank has, from the intervals of its parts."""
    total = sum(part.num_rows for part in parts)
    if weight.dim() != 2 or not len(weight):  # this rank has none of it
        return
    if len(weight) % total:
        raise ValueError("a table must not be split by rows: plan with quorem.integrations.torchrec.constraints")
    for columns in weight.split(total):  # TorchRec stacks the shards of columns
        for rows, part in zip(columns.split([part.num_rows for part in parts]), parts, strict=True):
            rows.uniform_(part.low, part.high)
