"""A budget holds for all that exists after the first lookup and step: tied lists, indices, narrow tables, bits."""

import pytest
import torch
from hunt.budgets import bytes_of, step
from torch import nn

from quorem import EmbeddingCollection, Full, Table, compress_, optim, plan, quantize_


def mixed(n: int) -> torch.Tensor:
    """Counts of ids that are not in order of frequency."""
    counts = (1e5 / (1 + torch.arange(n))).long()
    return counts[torch.randperm(n, generator=torch.Generator().manual_seed(0))]


def test_lists_of_tied_modules_and_their_indices_count():
    for budget in (1_000_000, 800_000):
        model = nn.ModuleDict({name: nn.Embedding(100_000, 7) for name in "abc"})  # of 7 numbers no row is narrower
        model["b"].weight = model["c"].weight = model["a"].weight
        compress_(model, budget=budget, frequencies={"a": mixed(100_000)})
        step(model, None)
        assert model["a"].ranks.numel() and 0.8 * budget < bytes_of(model, None) <= budget


def test_a_full_table_of_a_serving_plan_is_quantized():
    torch.manual_seed(0)
    model = nn.ModuleDict({"user": nn.Embedding(5000, 16), "day": nn.Embedding(40, 16)})
    day = model["day"].weight.detach().clone()
    planned = plan(model, "70kB", optimizer=None, frequencies={"user": mixed(5000), "day": torch.full((40,), 10**4)})
    assert planned.bits and planned["day"] == Full()
    compress_(model, planned, frequencies={"user": mixed(5000)})
    torch.testing.assert_close(model["day"].weight, day)  # rows of a full table are kept
    quantize_(model, planned.bits)
    step(model, None)
    assert bytes_of(model, None) <= planned.bytes <= 70_000


def test_a_narrow_table_does_not_grow():
    """The linear term of DeepFM has width 1: a listed id costs as much as a row of its own."""
    model = nn.ModuleDict({"wide": nn.Embedding(100_000, 16), "linear": nn.Embedding(100_000, 1)})
    counts = dict.fromkeys(model, mixed(100_000))
    report = compress_(model, budget="4MB", frequencies=counts)
    step(model, None)
    assert bytes_of(model, None) <= 4_000_000
    assert all(entry.bytes_after <= entry.bytes_before for entry in report.entries)


def test_a_plan_of_a_table_that_hashes_unknown_ids_can_be_applied():
    counts = torch.tensor([1000, 900] + [1] * 5000)
    tables = [Table("user", 5002, 8, frequencies=counts, unknown="hash")]
    applied = plan(tables, "2kB", optimizer=None, bits=()).applied_to(tables)
    assert applied[0].scheme.num_rest and applied[0].unknown == "rest"
    EmbeddingCollection(applied)(torch.tensor([[9999]]))


@pytest.mark.parametrize("sparse", [False, True])
def test_the_state_counts_in_the_dtype_of_the_optimizer(sparse):
    """One byte a number leaves room for wider rows within the same bytes."""
    widths = {}
    for state_dtype in ("float32", "log8"):
        model = nn.ModuleDict({name: nn.Embedding(20_000, 16, sparse=sparse) for name in ("user", "item")})
        optimizer = optim.Adagrad(model.parameters(), state_dtype=state_dtype)
        counts = dict.fromkeys(model, (1e5 / (1 + torch.arange(20_000))).long())
        report = compress_(model, budget=700_000, frequencies=counts)
        step(model, optimizer)
        kept = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        assert report.state_bytes == sum(t.nbytes for t in kept)
        assert bytes_of(model, optimizer) <= 700_000
        widths[state_dtype] = model["user"].specs[0].width
    assert widths["float32"] < widths["log8"]


def test_sparse_adam_has_no_history():
    model = nn.ModuleDict({"user": nn.Embedding(20_000, 8, sparse=True)})
    optimizer = torch.optim.SparseAdam(model.parameters())
    compress_(model, budget="500kB")
    step(model, optimizer)
    assert 400_000 < bytes_of(model, optimizer) <= 500_000
