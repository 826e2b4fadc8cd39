"""Which rows an id reads: division without dividing, ids of any size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Case, check_lookup

from quorem import QR, ChineseRemainder, Custom, Hash
from quorem.paper.partitions import Partition

pytestmark = pytest.mark.kernels(device="cpu")


@pytest.mark.parametrize("scheme", [Hash(2**24), ChineseRemainder(3, num_rows=50_000), QR(2**20)])
def test_ids_past_two_to_the_31(scheme):
    n = 2**40
    case = Case([(scheme, n, None)], width=4)
    ids = torch.randint(2**31, n, (500, 1))
    check_lookup(case, torch.cat([ids, torch.tensor([[n - 1], [2**31], [2**32], [2**33 + 1]])]))


@settings(max_examples=60)
@given(st.data())
def test_division_is_exact(data):
    n = data.draw(st.sampled_from([2**31, 2**40, 2**52, 2**52 + 1, 2**60]))
    sizes = data.draw(st.lists(st.integers(2, 2000), min_size=1, max_size=3))
    strides = data.draw(st.lists(st.integers(1, n - 1), min_size=len(sizes), max_size=len(sizes)))
    parts = tuple(Partition(stride, size) for stride, size in zip(strides, sizes, strict=True))
    case = Case([(Custom(parts, operation="add", check=False), n, None)], width=1)
    near = [q * d + e for d in [*sizes, *strides] for q in (1, n // d // 2, n // d - 1, n // d) for e in (-1, 0, 1)]
    check_lookup(case, torch.tensor([[i] for i in [*near, 0, n - 1] if 0 <= i < n]))
