"""The public names of ``quorem``. This module, and torch with it, is imported when one of them is first used."""

from . import models, optim
from .convert import compress_, decompress_
from .files.saved_model import save
from .modules.bag import EmbeddingBag
from .modules.collection import EmbeddingCollection, Table
from .modules.cross_entropy import cross_entropy
from .modules.embedding import Embedding
from .modules.quantize import quantize_
from .paper import hashing, init, operations, partitions, schemes
from .paper.cooccurrence import order_by_cooccurrence
from .paper.hashing import hash_strings
from .paper.schemes import QR, ChineseRemainder, Custom, Full, GeneralizedQR, Hash, HotCold, Pool, Scheme, TableSpec
from .paper.schemes import Path as Path
from .planner import Plan, plan
from .serving.export import export
from .serving.scorer import load

# By topic, and without Path, which would hide pathlib's under ``import *``.
__all__ = ["Embedding", "EmbeddingBag", "EmbeddingCollection", "Table"]
__all__ += ["Full", "Hash", "QR", "GeneralizedQR", "ChineseRemainder", "Custom", "HotCold", "Pool"]
__all__ += ["Scheme", "TableSpec"]
__all__ += ["compress_", "decompress_", "plan", "Plan", "quantize_"]
__all__ += ["cross_entropy", "order_by_cooccurrence", "hash_strings", "save", "load", "export"]
__all__ += ["partitions", "operations", "hashing", "schemes", "init", "optim", "models"]
