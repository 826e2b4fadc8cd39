"""Names of weights that do not depend on the plan: those of the single-device model.

Whatever the number of ranks and the sharding, the rows of partition j of table ``user`` are ``tables.user.j``.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import (  # type: ignore[attr-defined]
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
)
from torchrec.distributed.model_parallel import get_unwrapped_module

from ...modules.lookup import Tables
from .collections import Collection, EmbeddingBagCollection


def collections(model: nn.Module) -> Iterator[tuple[str, Collection]]:
    """The collections of ``quorem.integrations.torchrec`` in a model, each with the prefix of its names."""
    for name, module in get_unwrapped_module(model).named_modules():
        if isinstance(module, Collection):
            yield f"{name}." if name else "", module


def table_rows(collection: Collection) -> dict[str, dict[str, int]]:
    """For each of TorchRec's weights, by name, the names of the stored tables in it and their numbers of rows.

    >>> from quorem import QR, Table
    >>> table_rows(EmbeddingBagCollection([Table("user", 1000, 16, QR(4, operation="add"))]))
    {'bags.embedding_bags.user.weight': {'tables.user.0': 250, 'tables.user.1': 4}}
    """
    prefixes = {}
    for i, group in enumerate(collection.vectors):
        kind = "embeddings" if hasattr(group, "embeddings") else "embedding_bags"  # the latter for num_shards
        tables = dict(group.get_submodule(kind).named_children())
        prefixes.update(dict.fromkeys(tables, f"vectors.{i}.{kind}"))
    if isinstance(collection, EmbeddingBagCollection) and collection.bags is not None:
        prefixes.update(dict.fromkeys(collection.bags.embedding_bags, "bags.embedding_bags"))
    return {
        f"{prefixes[stored.name]}.{stored.name}.weight": {part.name: part.num_rows for part in stored.parts}
        for stored in collection.rows.stored
    }


def id_lists(collection: Collection) -> dict[str, Tensor]:
    """The lists of hot and cold ids by name, for tables that were given frequencies; each is a view."""
    lists = collection.rows.id_lists
    return {
        f"ranks.{f.table}.{kind}": lists[span[0] : span[0] + span[1]]
        for f in collection.rows.features
        for kind, span in (("hot", f.hot), ("cold", f.cold))
        if span is not None
    }


def plain_tables(model: nn.Module) -> Iterator[tuple[str, Tables]]:
    """The modules of quorem itself in a model, each with the prefix of its names."""
    for name, module in get_unwrapped_module(model).named_modules():
        if isinstance(module, Tables):
            yield f"{name}." if name else "", module


def split_rows(value: Any, rows: Mapping[str, int]) -> dict[str, Any]:
    """The named parts of ``value``, a tensor or a sharded tensor, with so many rows each; each part is a view."""
    if not isinstance(value, ShardedTensor):
        return dict(zip(rows, value.split(list(rows.values())), strict=True))
    metadata = value.metadata()
    parts, first = {}, 0
    for name, size in rows.items():
        pieces = [_cut(shard, first, size) for shard in metadata.shards_metadata]
        local = [(shard.tensor, shard.metadata, _cut(shard.metadata, first, size)) for shard in value.local_shards()]
        whole = ShardedTensorMetadata(
            shards_metadata=[piece for piece in pieces if piece is not None],
            size=torch.Size([size, *metadata.size[1:]]),
            tensor_properties=metadata.tensor_properties,
        )
        parts[name] = ShardedTensor._init_from_local_shards_and_global_metadata(
            [Shard(t.narrow(0, *_span(m, first, size)), piece) for t, m, piece in local if piece is not None],
            whole,
            process_group=value._process_group,
        )
        first += size
    return parts


def _cut(shard: ShardMetadata, first: int, size: int) -> ShardMetadata | None:
    """The part of a shard in rows ``[first, first + size)``, its offset counted from ``first``; None if empty."""
    start, length = _span(shard, first, size)
    if length <= 0:
        return None
    offsets = [shard.shard_offsets[0] + start - first, *shard.shard_offsets[1:]]
    return ShardMetadata(offsets, [length, *shard.shard_sizes[1:]], shard.placement)


def _span(shard: ShardMetadata, first: int, size: int) -> tuple[int, int]:
    """The rows of a shard in ``[first, first + size)``: the position of the first within the shard, and how many."""
    begin, end = shard.shard_offsets[0], shard.shard_offsets[0] + shard.shard_sizes[0]
    low, high = max(begin, first), min(end, first + size)
    return low - begin, high - low
