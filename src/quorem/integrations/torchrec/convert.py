"""Between TorchRec's tables, sharded or not, and a single-device ``quorem.EmbeddingCollection``."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import get_unwrapped_module

from ... import collection as single
from .collections import EmbeddingBagCollection, EmbeddingCollection

Collection = EmbeddingBagCollection | EmbeddingCollection


def from_collection(
    collection: single.EmbeddingCollection, *, is_weighted: bool = False, device: torch.device | str | None = None
) -> EmbeddingBagCollection:
    """The tables of a single-device collection as TorchRec's, with their weights.

    ``DistributedModelParallel`` starts tables on the CPU afresh: ``load_collection_`` puts the weights back.

    >>> tables = single.EmbeddingCollection([single.Table("user", 1000, 16)])
    >>> torch.equal(to_collection(from_collection(tables)).dense(0), tables.dense(0))
    True
    """
    _, table = next(collection.named_tables())
    tables = [
        single.Table(name, spec.num_embeddings, spec.embedding_dim, spec.scheme, padding)
        for name, spec, padding in zip(collection.names, collection.specs, collection.padding, strict=True)
    ]
    module = EmbeddingBagCollection(
        tables,
        mode=collection.mode,
        is_weighted=is_weighted,
        on_invalid_id=collection.on_invalid_id,
        device=table.device if device is None else device,
        dtype=table.dtype,
    )
    load_collection_(module, collection)
    return module


def load_collection_(module: nn.Module, collection: single.EmbeddingCollection) -> None:
    """Copy the weights of a single-device collection into TorchRec's tables, each rank its shards.

    Args:
        module: an ``EmbeddingBagCollection`` or ``EmbeddingCollection`` of the same tables, sharded or not.
        collection: the same on every rank.

    Raises:
        ValueError: if the tables differ.
    """
    module = unwrapped(module)
    tables = dict(collection.named_tables())
    state: dict[str, Any] = dict(collection.state_dict())
    stored = {key: torch.cat([tables[name] for name in names]) for key, names in table_names(module).items()}
    paths = {f"compose.{key}": value for key, value in state.items() if key.startswith("paths.")}
    module.load_state_dict({**stored, **paths})


def to_collection(module: nn.Module) -> single.EmbeddingCollection:
    """A single-device collection with the weights of TorchRec's tables.

    Where the tables are sharded all ranks must call it, and each gets the whole.

    Args:
        module: an ``EmbeddingBagCollection`` or ``EmbeddingCollection``, sharded or not.
    """
    module = unwrapped(module)
    state, rows = module.state_dict(), num_rows(module)
    tables: dict[str, Any] = {}
    for key, names in table_names(module).items():
        weight = whole(state.pop(key))
        tables.update(zip(names, weight.split([rows[name] for name in names]), strict=True))
    tables.update({key.removeprefix("compose."): value for key, value in state.items()})
    mode = module.mode if isinstance(module, EmbeddingBagCollection) else "sum"
    dtype = next(iter(tables.values())).dtype
    collection = single.EmbeddingCollection(
        module.tables, mode=mode, on_invalid_id=module.rows.on_invalid_id, device="meta", dtype=dtype
    )
    collection.load_state_dict(tables, assign=True)
    return collection


def unwrapped(module: nn.Module) -> Collection:
    """``module`` without the wrappers that ``DistributedModelParallel`` and ``DistributedDataParallel`` are."""
    module = get_unwrapped_module(module)
    if not isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
        raise TypeError(f"module ({type(module).__name__}) must be a collection of quorem.integrations.torchrec")
    return module


def table_names(module: Collection) -> dict[str, list[str]]:
    """quorem's names of the stored tables, in order, by the name of TorchRec's weight that has their rows."""
    prefixes = {}
    for i, group in enumerate(module.vectors):
        tables = dict(group.get_submodule("embeddings").named_children())
        prefixes.update(dict.fromkeys(tables, f"vectors.{i}.embeddings"))
    if isinstance(module, EmbeddingBagCollection) and module.bags is not None:
        prefixes.update(dict.fromkeys(module.bags.embedding_bags, "bags.embedding_bags"))
    names: dict[str, list[str]] = {}
    for f in module.rows.features:
        parts = [f"tables.{f.table}.{j}" for j in range(len(f.spec.shapes))]
        for stored, part in zip(f.stored, [parts] if f.merged else [[name] for name in parts], strict=True):
            names[f"{prefixes[stored.name]}.{stored.name}.weight"] = part
    return names


def num_rows(module: Collection) -> dict[str, int]:
    """Rows of the stored tables, by quorem's names."""
    return {f"tables.{f.table}.{j}": rows for f in module.rows.features for j, (rows, _) in enumerate(f.spec.shapes)}


def whole(value: Any) -> Tensor:
    """All of a tensor that may be sharded, on every rank."""
    if isinstance(value, ShardedTensor):
        out = torch.zeros(value.size(), dtype=value.dtype)
        for shard in value.local_shards():
            rows, *columns = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            part = out.narrow(0, *rows)
            for first, size in columns:
                part = part.narrow(1, first, size)
            part.copy_(shard.tensor)
        dist.all_reduce(out)
        return out
    return value.full_tensor() if isinstance(value, DTensor) else value
