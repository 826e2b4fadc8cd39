"""Rules before their first step, as optimizers make them: for the tests of the fused kernels of every device."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quorem.ops.state import RowRule
from quorem.optim import CLASSES


def fresh_rule(name: str, stored: Tensor, lr: float, seed: int | None = None, **options: Any) -> RowRule:
    """The rule of an optimizer with these ``options``, for the rows of a tensor that belongs to no module."""
    optimizer: Any = CLASSES[name]([torch.nn.Parameter(stored)], **options)
    (group,) = optimizer.param_groups
    constants = optimizer._constants(group, stored)
    state = optimizer._row_state(optimizer._initial_state(group, stored), stored, constants)
    state = type(state)(*(t if t is None else t.to(stored.device) for t in state))
    return RowRule(name, constants, state, torch.tensor(lr, dtype=torch.float64, device=stored.device), seed)


def copied(rule: RowRule) -> RowRule:
    """The rule with a state of its own."""
    return replace(rule, state=type(rule.state)(*(t if t is None else t.clone() for t in rule.state)))
