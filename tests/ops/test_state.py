"""The table of optimizers: states and bytes."""

from typing import get_args

import pytest
import torch

from quorem.ops import rules
from quorem.ops.cpu import kernels
from quorem.ops.state import RULES, present, row_state_bytes
from quorem.optim import CLASSES
from quorem.optimizer_names import Optimizer


@pytest.mark.parametrize("rule", RULES)
def test_a_state_takes_the_bytes_that_its_entry_says(rule: str) -> None:
    module = torch.nn.Embedding(9, 4)
    made = CLASSES[rule](module.parameters())
    group, p = made.param_groups[0], module.weight
    constants = made._constants(group, p)
    state = made._row_state(made._initial_state(group, p), p, constants)
    assert isinstance(state, RULES[rule].state) and isinstance(constants, RULES[rule].constants)
    by_row = [tensor for tensor in present(state) if tensor.dim() and len(tensor) == len(p)]
    assert sum(tensor.nbytes for tensor in by_row) == len(p) * row_state_bytes(rule, 4, torch.float32)


def test_every_optimizer_that_has_a_name_has_an_entry_a_class_and_kernels() -> None:
    assert tuple(RULES) == get_args(Optimizer) == tuple(CLASSES)
    assert {rule.kernel for rule in RULES.values()} == set(rules.STEPS)
    if kernels():
        from quorem.ops.cpu import rules as compiled

        assert {rule.kernel for rule in RULES.values() if rule.fused} == set(compiled.STEPS)
