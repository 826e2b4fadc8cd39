"""Huge pages: asked for large CPU tensors only. Scratch memory: kept by a thread from one call to the next."""

import gc
from threading import Thread

import pytest
import torch

from quorem import QR, Embedding
from quorem.ops.cpu import pages
from quorem.ops.cpu.pages import Scratch


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


@pytest.fixture
def nothing_kept(monkeypatch):
    monkeypatch.setattr(pages._kept, "memory", None, raising=False)


def address_of_next(num_bytes: int) -> int:
    return Scratch(num_bytes).memory.data_ptr()


def test_it_starts_with_a_cache_line_and_is_large_enough(nothing_kept):
    for num_bytes in (1, 64, 1000):
        memory = Scratch(num_bytes)
        assert memory.address % 64 == 0
        end = memory.memory.data_ptr() + memory.memory.nbytes
        assert memory.memory.data_ptr() <= memory.address <= end - num_bytes


def test_the_next_call_has_the_same_memory_if_it_is_large_enough(nothing_kept):
    large = address_of_next(10_000)
    assert address_of_next(10_000) == address_of_next(10) == large
    assert Scratch(20_000).memory.nbytes >= 20_000


def test_memory_in_use_is_not_given_twice(nothing_kept):
    first, second = Scratch(5000), Scratch(5000)
    assert first.memory.data_ptr() != second.memory.data_ptr()
    addresses = []
    other = Thread(target=lambda: addresses.append(address_of_next(5000)))
    other.start()
    other.join()
    assert addresses[0] not in (first.memory.data_ptr(), second.memory.data_ptr())


def test_the_larger_one_is_kept_but_none_above_the_limit(monkeypatch, nothing_kept):
    small, large = Scratch(5000), Scratch(9000)
    size = large.memory.nbytes
    del large, small
    assert pages._kept.memory.nbytes == size
    monkeypatch.setattr(pages, "MOST_KEPT", 10_000)
    address_of_next(10_001)
    assert pages._kept.memory is None


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_without_enough_memory_there_is_one_error(nothing_kept):
    with pytest.raises(RuntimeError):
        Scratch(10**17)
    gc.collect()
