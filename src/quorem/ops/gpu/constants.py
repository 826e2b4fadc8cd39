"""A rule's constants where a kernel reads them."""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@cache
def on_device(hyper: tuple[float, ...], device: torch.device) -> Tensor:
    """A rule's constants in float64, which a kernel's scalar arguments would round to float32.

    The logarithms of Adam's and AMSGrad's betas are at 5 and 6.
    """
    if len(hyper) >= 3:
        logs = (math.log2(beta) if beta else -math.inf for beta in hyper[:2])
        hyper = (*hyper, *(0.0,) * (5 - len(hyper)), *logs)
    return torch.tensor(hyper or (0.0,), dtype=torch.float64, device=device)


@triton.jit
def power(log, exponent):
    """A number to the ``exponent`` in float64, by its logarithm of base 2; anything to the 0 is one."""
    return tl.where(exponent == 0, 1.0, tl.exp2(log * exponent))
