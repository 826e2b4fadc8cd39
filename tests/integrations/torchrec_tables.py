"""Tables and batches that the tests of TorchRec's tables in one process share."""

from typing import Any

import oracles
import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import quorem
from quorem.integrations import torchrec as integration
from quorem.integrations.torchrec import EmbeddingBagCollection

N, D = oracles.N, 48  # every stored width has to be a multiple of 4
FREQUENCIES = torch.randperm(N, generator=torch.Generator().manual_seed(0)) // 3
FEW = [
    quorem.Table("user", 100, 8, quorem.QR(4, operation="add", width=4)),
    quorem.Table("item", 90, 8, quorem.QR(4), padding_idx=3),
    quorem.Table("shop", 80, 8, quorem.QR(4, operation="concat")),
    quorem.Table("word", 70, 8, quorem.Path(4, (4,))),
    quorem.Table("day", 7, 8),
]
NAMES = [table.name for table in FEW]


def features_of(tables: list[quorem.Table]) -> list[str]:
    return [name for table in tables for name in table.features]


def collection_of(tables: list[quorem.Table], mode: str = "sum", **options: Any) -> quorem.EmbeddingCollection:
    """A single-device collection, the same on every rank."""
    made = quorem.EmbeddingCollection(tables, mode=mode, **options)
    oracles.fill_(made)
    return made


def jagged(keys: list[str], batch: int, seed: int = 0, weighted: bool = False) -> KeyedJaggedTensor:
    """Zero to three ids in each bag, some of them the padding id."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(keys) * batch,), generator=draw)
    ids = torch.randint(0, N, (int(lengths.sum()),), generator=draw)
    ids[torch.rand(ids.shape, generator=draw) < 0.1] = 7
    weights = torch.rand(ids.shape, generator=draw) if weighted else None
    return KeyedJaggedTensor(keys, ids, lengths=lengths, weights=weights)


def expected(collection: quorem.EmbeddingCollection, features: KeyedJaggedTensor) -> Tensor:
    """What the single-device collection gives for the same ids, ``[B, sum D]``."""
    parts = [features[name] for name in collection.features]
    lengths = torch.cat([part.lengths() for part in parts])
    weights = None if features.weights_or_none() is None else torch.cat([part.weights() for part in parts])
    ids = torch.cat([part.values() for part in parts])
    return collection(ids, F.pad(lengths.cumsum(0), (1, 0)), weights).flatten(1)


def bags_of(collection: quorem.EmbeddingCollection, tables: list[quorem.Table], **more: Any) -> EmbeddingBagCollection:
    """TorchRec's tables with the weights of a single-device collection of the same tables."""
    module = EmbeddingBagCollection(tables, mode=collection.mode, **more)
    integration.copy_state_(module, collection)
    return module


def few() -> tuple[quorem.EmbeddingCollection, EmbeddingBagCollection]:
    collection = collection_of(FEW)
    return collection, bags_of(collection, FEW)
