"""Huge pages: asked for large CPU tensors only, and values do not depend on them."""

import pytest
import torch

from quorem import QR, Embedding
from quorem.ops.cpu import pages


@pytest.fixture
def asked(monkeypatch):
    """The first address, the length and the advice of each call."""
    calls = []
    monkeypatch.setattr(pages, "_madvise", lambda: lambda *call: calls.append(call))
    return calls


def test_whole_pages_within_a_large_tensor_are_asked_for(asked):
    large = torch.empty(3 * pages.PAGE, dtype=torch.uint8)
    assert pages.in_huge_pages(large) is large
    ((first, length, advice),) = asked
    assert advice == 14 and first % pages.PAGE == length % pages.PAGE == 0 and length >= 2 * pages.PAGE
    assert large.data_ptr() <= first and first + length <= large.data_ptr() + large.nbytes


@pytest.mark.parametrize("tensor", [torch.empty(1000), torch.empty(1 << 22, device="meta")], ids=["small", "meta"])
def test_other_tensors_are_left_alone(tensor, asked):
    assert pages.in_huge_pages(tensor) is tensor and not asked


def test_tables_ask_and_a_refusal_does_no_harm(asked):
    assert Embedding(1_000_000, 16, QR(4)).stored.isfinite().all() and len(asked) == 1


def test_the_wish_is_heard_or_refused():
    filled = pages.in_huge_pages(torch.empty(1 << 21)).fill_(1.0)
    assert filled.sum() == 1 << 21
