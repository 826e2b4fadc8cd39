"""Huge pages are asked for large CPU tensors only; scratch memory is a thread's; words last as long as their lists."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quorem import QR, Embedding, HotCold
from quorem.ops import memory
from quorem.ops.layout import Layout
from quorem.ops.words import with_words


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


N = 3000


def table(seed: int = 0, num_hot: int = 700, num_rest: int = 0) -> Embedding:
    counts = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
    return Embedding(N, 4, HotCold(num_hot, cold=QR(4), num_rest=num_rest), frequencies=counts)


def test_words_are_kept_until_lists_change() -> None:
    kernel_layout = pytest.importorskip("quorem.ops.cpu.launch").kernel_layout
    module = table()
    layout, first = module.layout, kernel_layout(module.layout)
    assert kernel_layout(Layout(*layout)) is first
    other = table(seed=1).layout
    for ranks in (other.ranks, layout.ranks.clone()):  # lists of another module, and equal ones
        each = layout._replace(ranks=ranks)
        assert kernel_layout(each).maps.equal(first.maps) == ranks.equal(layout.ranks)
    layout.ranks.data = table(seed=2).layout.ranks
    assert kernel_layout(layout).maps.equal(kernel_layout(table(seed=2).layout).maps)
    with torch.inference_mode():  # where writes are not counted
        layout = table().layout
        assert kernel_layout(layout).maps.equal(first.maps)
        layout.ranks.copy_(other.ranks)
        assert kernel_layout(layout).maps.equal(kernel_layout(other).maps)


def test_lookups_follow_lists_that_are_replaced() -> None:
    """By ``to_empty`` and a reset, by writing into them, and by ``load_state_dict``."""
    module, ids = table(num_rest=100), torch.arange(N)
    expected = module(ids)
    rows = module.stored.detach().clone()
    module.to_empty(device="cpu").reset_parameters()
    module.stored.data.copy_(rows)
    assert torch.equal(module(ids), expected)
    other = table(seed=1, num_rest=100)
    module.ranks.copy_(other.ranks)
    other.stored.data.copy_(rows)
    assert torch.equal(module(ids), other(ids)) and not torch.equal(module(ids), expected)
    third = table(seed=2, num_rest=100)
    module.load_state_dict(third.state_dict())
    assert torch.equal(module(ids), third(ids)) and not torch.equal(module(ids), other(ids))


def test_lists_that_do_not_rise_have_no_words() -> None:
    for change in ([5, 3], [3, 3], [-1, 3], [3, N]):
        layout = table(num_hot=2).layout
        layout.ranks.copy_(torch.tensor(change))
        with pytest.raises(ValueError, match=rf"ranks must hold lists of rising ids in \[0, {N}\): were they replaced"):
            with_words(layout, layout.slots)
    layout = table().layout
    with pytest.raises(ValueError, match="ranks must hold lists of rising ids"):
        with_words(layout._replace(ranks=layout.ranks[:-1]), layout.slots)


def test_a_thread_keeps_its_scratch_memory():
    first = memory.scratch(10_000)
    assert first.data_ptr() % 64 == 0 and first.nbytes >= 10_000
    assert memory.scratch(10).data_ptr() == first.data_ptr()
    assert memory.scratch(2 * first.nbytes).nbytes == 2 * first.nbytes
    with ThreadPoolExecutor(1) as other:
        assert other.submit(memory.scratch, 10).result().data_ptr() != memory.scratch(10).data_ptr()
