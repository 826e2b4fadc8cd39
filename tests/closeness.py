"""Where the GPU kernels run in the tests, and how near to the reference they come."""

import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ULPS = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def assert_close(mine: Tensor, truth: Tensor, dtype: torch.dtype, name: str, slack: float = 1) -> None:
    """Relative to the norm: a sum's rounding is relative to its terms, not to itself."""
    assert mine.shape == truth.shape and mine.isfinite().all(), name
    error = (mine.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30)
    assert error <= slack * ULPS[dtype], f"{name}: {error:.2e}"
