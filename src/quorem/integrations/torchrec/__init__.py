"""The same schemes on TorchRec: tables that its planner, optimizers and checkpoints already know.

``EmbeddingBagCollection`` and ``EmbeddingCollection`` take ``quorem.Table`` objects and KeyedJaggedTensors. Inside are
TorchRec's own collections, which ``DistributedModelParallel`` shards as any other. docs/torchrec.md has the install
line, since TorchRec's metadata asks for the CUDA build of FBGEMM.
"""

try:
    import torchrec as _torchrec  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"quorem.integrations.torchrec needs TorchRec ({error}): pip install 'quorem[torchrec-cpu]'"
        " && pip install --no-deps torchrec==1.8.0"
    ) from error

from .checkpoint import load, save
from .collections import EmbeddingBagCollection, EmbeddingCollection
from .convert import from_collection, to_collection
from .plans import constraints
from .state import copy_state_

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "constraints",
    "from_collection",
    "to_collection",
    "copy_state_",
    "save",
    "load",
]
