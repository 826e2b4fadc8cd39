"""The constants of an optimizer's rule, in the form in which a kernel reads them."""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..state import AdagradConstants, AdamConstants

# Positions of the constants. A kernel can read a global constant only if it is a ``tl.constexpr``.
LR_DECAY, ADAGRAD_EPS = (tl.constexpr(AdagradConstants._fields.index(name)) for name in ("lr_decay", "eps"))
BETA1, BETA2, EPS = (tl.constexpr(AdamConstants._fields.index(name)) for name in ("beta1", "beta2", "eps"))
WINDOW_LENGTH, SETTLED = (tl.constexpr(AdamConstants._fields.index(name)) for name in ("window", "settled"))
LOG_BETA1, LOG_BETA2 = tl.constexpr(len(AdamConstants._fields)), tl.constexpr(len(AdamConstants._fields) + 1)


@cache
def on_device(constants: tuple[float, ...], device: torch.device) -> Tensor:
    """A rule's constants as a float64 tensor: a kernel's scalar arguments would be rounded to float32.

    For Adam and AMSGrad the base-2 logarithms of the betas follow the constants.
    """
    if len(constants) >= 3:
        logs = (math.log2(beta) if beta else -math.inf for beta in constants[:2])
        constants = (*constants, *(0.0,) * (len(AdamConstants._fields) - len(constants)), *logs)
    return torch.tensor(constants or (0.0,), dtype=torch.float64, device=device)


@triton.jit
def power(log, exponent):
    """A number to the ``exponent`` in float64, by its logarithm of base 2; anything to the 0 is one."""
    return tl.where(exponent == 0, 1.0, tl.exp2(log * exponent))
