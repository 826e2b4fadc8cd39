"""The paper's two networks (section 5.1). They are handed their embeddings and know nothing of compression.

Shapes: B batch, F' vectors that the embeddings give, D their width.
"""

from .dcn import DCN
from .dlrm import DLRM
from .presets import NETWORKS, PRESETS, build

__all__ = ["DCN", "DLRM", "NETWORKS", "PRESETS", "build"]
