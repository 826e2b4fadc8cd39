"""The same schemes on TorchRec, stored in tables that its planner, optimizers and checkpoints support.

``EmbeddingBagCollection`` and ``EmbeddingCollection`` take ``quorem.Table`` objects and KeyedJaggedTensors. They
contain TorchRec's own collections, which ``DistributedModelParallel`` shards like any other. docs/torchrec.md says how
to install TorchRec without the CUDA build of FBGEMM, which its metadata requires.
"""

try:
    import torchrec as _torchrec  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"quorem.integrations.torchrec needs TorchRec ({error}): pip install 'quorem[torchrec-cpu]'"
        " && pip install --no-deps torchrec==1.8.0"
    ) from error

from .collections import EmbeddingBagCollection, EmbeddingCollection, constraints
from .state import copy_state_, to_collection

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection", "constraints", "to_collection", "copy_state_"]
