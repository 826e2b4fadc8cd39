"""The paper's two networks (section 5.1), and your own. They are handed their embeddings, whatever these are.

Shapes: B batch, F' vectors that the embeddings give, D their width.
"""

from .networks import DCN, DLRM
from .presets import NETWORKS, PRESETS, build, check_network, pinned

__all__ = ["DCN", "DLRM", "NETWORKS", "PRESETS", "build", "check_network", "pinned"]
