"""Convert between TorchRec's tables, sharded or not, and a single-device ``quorem.EmbeddingCollection``."""

import torch
from torch import nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from ...modules import collection as single
from ...paper.schemes.frequency import Ranks
from .collections import Collection, EmbeddingBagCollection
from .state import copy_state_, weights


def from_collection(
    collection: single.EmbeddingCollection,
    *,
    is_weighted: bool = False,
    num_shards: int | None = None,
    device: torch.device | str | None = None,
) -> EmbeddingBagCollection:
    """Convert a single-device collection, with its weights, to TorchRec's tables.

    Args:
        collection: the collection.
        is_weighted: whether each id has a weight.
        num_shards: as in ``EmbeddingBagCollection``.
        device: device of the tables; None takes that of ``collection``.

    ``DistributedModelParallel`` initializes tables on the CPU again: ``copy_state_`` then restores their weights and
    optimizer state.

    >>> tables = single.EmbeddingCollection([single.Table("user", 1000, 16)])
    >>> torch.equal(to_collection(from_collection(tables)).dense(0), tables.dense(0))
    True
    """
    _, table = next(collection.named_tables())
    module = EmbeddingBagCollection(
        declared_tables(collection),
        mode=collection.mode,
        is_weighted=is_weighted,
        num_shards=num_shards,
        on_invalid_id=collection.on_invalid_id,
        device=table.device if device is None else device,
        dtype=table.dtype,
    )
    copy_state_(module, collection)
    return module


def declared_tables(collection: single.EmbeddingCollection) -> list[single.Table]:
    """The tables that a collection was made of; lists of hot and cold ids take the place of its frequencies."""
    return [
        single.Table(
            name,
            spec.num_embeddings,
            spec.embedding_dim,
            spec.scheme,
            collection.padding_ids[t],
            tuple(collection.features_of(t)),
            None if (ranks := collection.ranks_of[t]) is None else Ranks(*(ids.clone() for ids in ranks)),
            raw_ids=collection.raw_ids[t],
            unknown=collection.unknown[t],
        )
        for t, (name, spec) in enumerate(zip(collection.names, collection.specs, strict=True))
    ]


def to_collection(module: nn.Module) -> single.EmbeddingCollection:
    """A single-device collection, on the CPU, with the weights of TorchRec's tables.

    If the tables are sharded, all ranks must call it, and each gets the whole collection. ``copy_state_`` copies the
    optimizer state.

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
    mode = inner.mode if isinstance(inner, EmbeddingBagCollection) else "sum"
    dtype = next(iter(weights(module).values())).dtype
    collection = single.EmbeddingCollection(
        inner.tables, mode=mode, on_invalid_id=inner.rows.on_invalid_id, dtype=dtype, device="cpu"
    )
    copy_state_(collection, module)
    return collection
