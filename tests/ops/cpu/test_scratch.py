"""Memory that a thread keeps from one call to the next."""

import gc
from threading import Thread

import pytest

from quorem.ops.cpu import scratch
from quorem.ops.cpu.scratch import Scratch


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(scratch._kept, "memory", None, raising=False)


def address_of_next(num_bytes: int) -> int:
    return Scratch(num_bytes).memory.data_ptr()


def test_it_starts_with_a_cache_line_and_is_large_enough():
    for num_bytes in (1, 64, 1000):
        memory = Scratch(num_bytes)
        assert memory.address % 64 == 0
        end = memory.memory.data_ptr() + memory.memory.nbytes
        assert memory.memory.data_ptr() <= memory.address <= end - num_bytes


def test_the_next_call_has_the_same_memory_if_it_is_large_enough():
    large = address_of_next(10_000)
    assert address_of_next(10_000) == address_of_next(10) == large
    assert Scratch(20_000).memory.nbytes >= 20_000


def test_memory_in_use_is_not_given_twice():
    first, second = Scratch(5000), Scratch(5000)
    assert first.memory.data_ptr() != second.memory.data_ptr()
    addresses = []
    other = Thread(target=lambda: addresses.append(address_of_next(5000)))
    other.start()
    other.join()
    assert addresses[0] not in (first.memory.data_ptr(), second.memory.data_ptr())


def test_the_larger_one_is_kept_but_none_above_the_limit(monkeypatch):
    small, large = Scratch(5000), Scratch(9000)
    size = large.memory.nbytes
    del large, small
    assert scratch._kept.memory.nbytes == size
    monkeypatch.setattr(scratch, "MOST_KEPT", 10_000)
    address_of_next(10_001)
    assert scratch._kept.memory is None


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_without_enough_memory_there_is_one_error():
    with pytest.raises(RuntimeError):
        Scratch(10**17)
    gc.collect()
