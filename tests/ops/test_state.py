"""States of the rules, as ops of torch's dispatcher take them."""

import pytest
import torch

from quorem.ops.state import TYPES_OF_RULE, present


@pytest.mark.parametrize("rule", TYPES_OF_RULE)
def test_only_the_last_field_of_a_state_may_be_missing(rule: str) -> None:
    state_type, _ = TYPES_OF_RULE[rule]
    fields, optional = state_type._fields, state_type._field_defaults
    assert set(optional) <= {fields[-1]}
    needed = {name: torch.tensor(i) for i, name in enumerate(fields) if name not in optional}
    assert [int(tensor) for tensor in present(state_type(**needed))] == list(range(len(needed)))
