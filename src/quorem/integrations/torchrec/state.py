"""Weights by the names of the single-device model, to copy them to another model: sharded, unsharded or single-device.

Whatever the number of ranks and the sharding, the rows of partition j of table ``user`` are ``tables.user.j``.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined]
from torchrec.distributed.model_parallel import get_unwrapped_module

from ...modules import collection as single
from ...modules.lookup import Tables
from .collections import Collection


def copy_state_(target: nn.Module, source: nn.Module) -> None:
    """Copy the weights from one model to another with the same tables.

    Either may be sharded by TorchRec, unsharded, or a single-device model. If one is sharded, all ranks must call it.

    Args:
        target: the model to fill.
        source: the model to read; the same on every rank unless it is sharded.

    Raises:
        ValueError: if a weight of ``target`` is missing or has another size, or ids of a table read other rows.

    >>> from quorem import EmbeddingCollection, Table
    >>> from quorem.integrations.torchrec import EmbeddingBagCollection
    >>> tables = [Table("user", 1000, 16)]
    >>> source, target = EmbeddingCollection(tables), EmbeddingBagCollection(tables)
    >>> copy_state_(target, source)
    >>> torch.equal(to_collection(target).dense(0), source.dense(0))
    True
    """
    theirs: dict[str, Tensor] = {}
    for value, parts in _weights(source):
        theirs |= zip(parts, _gathered(value).split(list(parts.values())), strict=True)
    ours = list(_weights(target))
    for value, parts in ours:
        if missing := [name for name in parts if name not in theirs]:
            raise ValueError(f"source must have {missing[0]}")
        for name, size in parts.items():
            ids_differ = name.endswith("meaning") and not torch.equal(value.cpu(), theirs[name].cpu())
            if ids_differ or theirs[name].shape != (size, *value.size()[1:]):
                raise ValueError(f"{name} differs: the tables must have the same sizes, partitions and operations")
    with torch.no_grad():
        for value, parts in ours:
            _fill_(value, torch.cat([theirs[name] for name in parts]))
    for module in target.modules():
        if isinstance(module, Tables):
            module.load_state_dict(module.state_dict())  # takes over the lists of hot and cold ids


def to_collection(module: nn.Module) -> single.EmbeddingCollection:
    """A single-device collection, on the CPU, with the weights of TorchRec's tables.

    If the tables are sharded, all ranks must call it, and each gets the whole collection.

    Args:
        module: an ``EmbeddingBagCollection`` or ``EmbeddingCollection``, sharded or not.

    Raises:
        TypeError: if ``module`` is neither.

    >>> bags = EmbeddingBagCollection([single.Table("user", 1000, 16), single.Table("day", 7, 16)])
    >>> to_collection(bags).names
    ('user', 'day')
    """
    inner = get_unwrapped_module(module)
    if not isinstance(inner, Collection):
        raise TypeError(f"module ({type(inner).__name__}) must be a collection of quorem.integrations.torchrec")
    dtype = next(inner.vectors.parameters()).dtype
    collection = single.EmbeddingCollection(
        inner.tables, mode=inner.mode or "sum", on_invalid_id=inner.rows.on_invalid_id, dtype=dtype, device="cpu"
    )
    copy_state_(collection, module)
    return collection


def _weights(model: nn.Module) -> Iterator[tuple[Any, dict[str, int]]]:
    """Every weight of a model; and the number of rows of each part of it, by the name in the single-device model.

    Writing to a weight changes the model.
    """
    state = {name: value if value.dim() else value[None] for name, value in model.state_dict().items()}
    for name, module in get_unwrapped_module(model).named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, Collection):
            for weight, parts in module.parts_of_weights().items():
                yield state.pop(prefix + weight), {prefix + part.name: part.num_rows for part in parts}
            for own in ("compose.", "rows."):
                for key in [key for key in state if key.startswith(prefix + own)]:
                    state[prefix + key.removeprefix(prefix + own)] = state.pop(key)
        elif isinstance(module, Tables):
            del state[f"{prefix}stored"]
            yield from ((table.detach(), {prefix + key: len(table)}) for key, table in module.named_tables())
    yield from ((value, {name: value.size()[0]}) for name, value in state.items())


def _gathered(value: Any) -> Tensor:
    """A tensor as it is; a sharded one whole, on every rank."""
    if not isinstance(value, ShardedTensor):
        return value
    whole = torch.zeros(value.size(), dtype=value.dtype, device=value._get_preferred_device())
    for shard in value.local_shards():
        _part(whole, shard.metadata).copy_(shard.tensor)
    dist.all_reduce(whole)
    return whole


def _fill_(target: Any, value: Tensor) -> None:
    """Copy ``value`` into a tensor; or into a sharded tensor, of which this rank fills its shards."""
    if isinstance(target, ShardedTensor):
        for shard in target.local_shards():
            shard.tensor.copy_(_part(value, shard.metadata))
    else:
        target.copy_(value)


def _part(value: Tensor, shard: Any) -> Tensor:
    """The view of ``value`` at the place of a shard."""
    for dim, (offset, size) in enumerate(zip(shard.shard_offsets, shard.shard_sizes, strict=True)):
        value = value.narrow(dim, offset, size)
    return value
