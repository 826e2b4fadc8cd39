"""Compositional embeddings using complementary partitions: embedding tables that fit.

>>> import torch
>>> table = Embedding(1_000_000, 16, QR(num_collisions=4))
>>> table(torch.tensor([0, 999_999])).shape, round(table.compression, 2)
(torch.Size([2, 16]), 4.0)
"""

from . import hashing, init, models, operations, optim, partitions, schemes
from .bags import EmbeddingBag
from .collection import EmbeddingCollection, Table
from .embeddings import Embedding
from .hashing import hash_strings
from .schemes import QR, ChineseRemainder, Custom, Full, GeneralizedQR, Hash, Path, Scheme, TableSpec
from .version import __version__ as __version__

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "Table",
    "Full",
    "Hash",
    "QR",
    "GeneralizedQR",
    "ChineseRemainder",
    "Custom",
    "Path",
    "Scheme",
    "TableSpec",
    "hash_strings",
    "partitions",
    "operations",
    "hashing",
    "schemes",
    "init",
    "optim",
    "models",
]
