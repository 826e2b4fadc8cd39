"""Which networks have a fused training step."""

import torch
from torch import nn

from ..models.dcn import DCN
from ..models.dlrm import DLRM
from ..ops import gpu

LARGEST_BATCH = 1024  # for larger batches the products, which cuBLAS does faster, take longer than the launches
MOST_VECTORS, WIDEST_VECTOR = 128, 128  # for DLRM
WIDEST_INPUT, MOST_LAYERS = 4096, 32  # inputs of the output unit, all in one program; cross layers of DCN


def can_fuse(model: nn.Module, batch_size: int) -> bool:
    """Whether ``step.FusedStep`` supports the model and is faster: on a GPU, in float32, with a small batch."""
    if type(model) not in (DLRM, DCN) or batch_size > LARGEST_BATCH or not gpu.kernels():
        return False
    if any(not p.is_cuda or p.dtype != torch.float32 for p in model.parameters()):
        return False
    assert isinstance(model, DLRM | DCN)
    if model.output.in_features > WIDEST_INPUT:
        return False
    if isinstance(model, DLRM):
        return model.num_vectors <= MOST_VECTORS and model.embedding_dim <= WIDEST_VECTOR
    return len(model.cross_weight) < MOST_LAYERS
