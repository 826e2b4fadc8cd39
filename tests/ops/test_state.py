"""States of the rules, as ops of torch's dispatcher take them."""

from typing import get_args

import pytest
import torch

from quorem.ops.state import RULES, present
from quorem.optimizer_names import Optimizer


@pytest.mark.parametrize("rule", RULES)
def test_only_the_last_field_of_a_state_may_be_missing(rule: str) -> None:
    state_type = RULES[rule].state
    fields, optional = state_type._fields, state_type._field_defaults
    assert set(optional) <= {fields[-1]}
    needed = {name: torch.tensor(i) for i, name in enumerate(fields) if name not in optional}
    assert [int(tensor) for tensor in present(state_type(**needed))] == list(range(len(needed)))


def test_every_optimizer_that_has_a_name_has_an_entry() -> None:
    assert tuple(RULES) == get_args(Optimizer)
