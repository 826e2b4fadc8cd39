"""The paper's two networks (section 5.1), DeepFM, and your own. They are handed their embeddings, whatever these are.

Shapes: B batch, F' vectors that the embeddings give, D their width.
"""

from .custom import pinned
from .dcn import DCN
from .deepfm import DeepFM
from .dlrm import DLRM
from .presets import NETWORKS, PRESETS, build, check_network

__all__ = ["DCN", "DLRM", "DeepFM", "NETWORKS", "PRESETS", "build", "check_network", "pinned"]
