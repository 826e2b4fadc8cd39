"""Huge pages: asked for large CPU tensors only. Scratch memory: kept by a thread from one call to the next."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quorem.ops import memory


@pytest.fixture
def asked(monkeypatch):
    """The first address, the length and the advice of each call."""
    calls = []
    monkeypatch.setattr(memory, "_madvise", lambda: lambda *call: calls.append(call))
    return calls


def test_whole_pages_within_a_large_tensor_are_asked_for(asked):
    large = torch.empty(3 * memory.PAGE, dtype=torch.uint8)
    assert memory.in_huge_pages(large) is large
    ((first, length, advice),) = asked
    assert advice == 14 and first % memory.PAGE == length % memory.PAGE == 0 and length >= 2 * memory.PAGE
    assert large.data_ptr() <= first and first + length <= large.data_ptr() + large.nbytes


@pytest.mark.parametrize("tensor", [torch.empty(1000), torch.empty(1 << 22, device="meta")], ids=["small", "meta"])
def test_other_tensors_are_left_alone(tensor, asked):
    assert memory.in_huge_pages(tensor) is tensor and not asked


def test_a_thread_keeps_its_scratch_memory():
    first = memory.scratch(10_000)
    assert first.data_ptr() % 64 == 0 and first.nbytes >= 10_000
    assert memory.scratch(10).data_ptr() == first.data_ptr()
    assert memory.scratch(2 * first.nbytes).nbytes == 2 * first.nbytes
    with ThreadPoolExecutor(1) as other:
        assert other.submit(memory.scratch, 10).result().data_ptr() != memory.scratch(10).data_ptr()
