"""Section 4's operations on vectors, and the widths of tables that they ask for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quorem.paper.operations import OPERATIONS, widths


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_operations_element_by_element(k: int) -> None:
    vectors = list(torch.randn(k, 4, 3))
    total, product = torch.zeros(4, 3), torch.ones(4, 3)
    for vector in vectors:
        total, product = total + vector, product * vector
    torch.testing.assert_close(OPERATIONS["add"](*vectors), total)
    torch.testing.assert_close(OPERATIONS["mult"](*vectors), product)
    assert OPERATIONS["feature"](*vectors).shape == (4, k, 3)
    assert torch.equal(OPERATIONS["feature"](*vectors)[:, k - 1], vectors[-1])
    assert torch.equal(OPERATIONS["concat"](*vectors)[:, -3:], vectors[-1])


def test_concatenated_vectors_may_differ_in_width() -> None:
    assert OPERATIONS["concat"](torch.zeros(5, 2), torch.ones(5, 3)).sum(1).tolist() == [3.0] * 5


@given(st.integers(1, 100), st.integers(1, 8))
def test_widths_give_the_width_that_comes_out(d: int, k: int) -> None:
    for operation in ("add", "mult", "feature"):
        assert widths(operation, d, k) == (d,) * k
    assert widths("concat", d * k, k) == (d,) * k
    dims = (d, *range(1, k))
    assert widths("concat", sum(dims), k, dims) == dims


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("max", 8, 2), r"operation \('max'\) must be one of 'concat', 'add', 'mult', 'feature'"),
        (("concat", 7, 2), r"embedding_dim \(7\) must be divisible by the number of partitions \(2\)"),
        (("concat", 8, 2, (4, 5)), r"dims \(\(4, 5\)\) must be 2 widths that sum to embedding_dim \(8\)"),
        (("concat", 8, 3, (4, 4)), r"dims \(\(4, 4\)\) must be 3 widths that sum to embedding_dim \(8\)"),
        (("mult", 8, 2, (8, 8)), r"dims \(\(8, 8\)\) must be None unless operation \('mult'\) is 'concat'"),
    ],
)
def test_refusals(arguments: tuple, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        widths(*arguments)
