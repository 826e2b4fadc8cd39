"""The public names of ``quorem``. This module, and torch with it, is imported when one of them is first used."""

from . import hashing, init, models, operations, optim, partitions, schemes
from .bags import EmbeddingBag
from .collection import EmbeddingCollection, Table
from .convert import compress_, decompress_
from .embeddings import Embedding
from .hashing import hash_strings
from .planner import Plan, plan
from .quantize import quantize_
from .schemes import QR, ChineseRemainder, Custom, Full, GeneralizedQR, Hash, HotCold, Path, Pool, Scheme, TableSpec
from .serving.loading import load
from .store.model_file import save

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
    "HotCold",
    "Pool",
    "Scheme",
    "TableSpec",
    "compress_",
    "decompress_",
    "plan",
    "Plan",
    "quantize_",
    "hash_strings",
    "save",
    "load",
    "partitions",
    "operations",
    "hashing",
    "schemes",
    "init",
    "optim",
    "models",
]
