"""The table of optimizers: states and bytes."""

from typing import get_args

from quorem.ops import rules
from quorem.ops.cpu import kernels
from quorem.ops.state import RULES
from quorem.optim import CLASSES
from quorem.optimizer_names import Optimizer


def test_every_optimizer_that_has_a_name_has_an_entry_a_class_and_kernels() -> None:
    assert tuple(RULES) == get_args(Optimizer) == tuple(CLASSES)
    assert {rule.kernel for rule in RULES.values()} == set(rules.STEPS)
    if kernels():
        from quorem.ops.cpu import rules as compiled

        assert {rule.kernel for rule in RULES.values() if rule.fused} == set(compiled.STEPS)
