"""``compress_`` to a budget, and by a plan: all that exists after the first lookup and step fits."""

import pytest
import torch
from hunt.budgets import bytes_of, step
from torch import nn

from quorem import QR, Embedding, EmbeddingCollection, Full, HotCold, Plan, Table, compress_, optim, plan, quantize_


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(20_000, 16)
        self.item = nn.EmbeddingBag(5000, 16, mode="sum")
        self.day = nn.Embedding(7, 16)
        self.norm = nn.Embedding(3000, 16, max_norm=1.0)
        self.friend = nn.Embedding(20_000, 16, padding_idx=0)
        self.friend.weight = self.user.weight


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("share", [0.5, 0.2])
def test_what_is_allocated_fits_the_budget(kind: type[torch.optim.Optimizer], share: float) -> None:
    model = Model()
    numbers = {"SGD": 1, "Adagrad": 2, "Adam": 3}[kind.__name__]
    budget = int(share * numbers * 4 * 16 * 28_007)
    optimizer = kind(model.parameters(), lr=0.01)
    report = compress_(model, budget=budget, optimizer=optimizer)
    assert report.swapped[:2] == ["user", "friend"] and {"day", "norm"} <= set(report.left)
    assert "item" in report.swapped
    assert model.friend.stored is model.user.stored
    assert 0.8 * budget < report.bytes_after + report.state_bytes <= budget
    step(model, optimizer)
    assert 0.8 * budget < bytes_of(model, optimizer) <= budget
    text = str(report).splitlines()
    assert text[0].split() == ["table", "ids", "D", "before", "after", "state", "stored", "as", "why"]
    assert any("shares the weight of user" in line for line in text) and any("share a row" in line for line in text)


def test_a_budget_that_is_too_small_names_the_smallest() -> None:
    with pytest.raises(ValueError, match=r"must be at least (\d+) bytes .* and \d+ bytes that cannot be") as refusal:
        compress_(Model(), budget="100kB")
    least = int(str(refusal.value).split("at least ")[1].split()[0])
    model = Model()
    assert compress_(model, budget=least).bytes_after <= least
    assert bytes_of(model, None) <= least
    with pytest.raises(ValueError, match=r"budget \('100kB', 100000 bytes\) must be at least .*: no table can be"):
        compress_(Model(), budget="100kB", threshold=10**6)


def test_a_plan_is_followed_dtypes_included() -> None:
    planned = plan(Model(), "400kB", optimizer=None, dtypes=(torch.float32, torch.bfloat16))
    model = Model()
    report = compress_(model, Plan.from_json(planned.to_json()))
    assert model.user.scheme == planned["user"] and model.user.stored.dtype == torch.bfloat16
    assert type(model.day) is Embedding and model.day.weight.dtype == torch.bfloat16
    assert report.left.keys() == {"norm"} and type(model.norm) is nn.Embedding


def test_one_name_of_a_shared_weight_is_enough() -> None:
    for names in (["user"], ["friend"], ["user", "friend"]):
        model = Model()
        report = compress_(model, dict.fromkeys(names, QR(4)))
        assert report.swapped == ["user", "friend"] and model.user.stored is model.friend.stored
        assert model.friend.padding_idx == 0 and model.user.padding_idx is None
    with pytest.raises(ValueError, match="must have one scheme for user, friend: they share a weight"):
        compress_(Model(), {"user": QR(4), "friend": QR(5)})
    report = compress_(Model(), QR(4), filter_fn=lambda module, name: name != "friend")
    assert report.left["user"] == "friend, which has the same weight: filter_fn left it out"


def test_frequencies_are_weights_of_a_plan_and_ranks_of_a_scheme() -> None:
    counts = torch.rand(20_000, generator=torch.Generator().manual_seed(0)).pow(8) * 1000
    model = Model()
    compress_(model, {"user": HotCold(100, cold=QR(4))}, frequencies={"friend": counts})
    hot = model.user.ranks_of[0].hot
    assert set(hot.tolist()) == set(counts.topk(100).indices.tolist())
    model = Model()
    with pytest.warns(UserWarning, match="frequencies has no counts of item, day: all tables are planned as if"):
        report = compress_(model, budget="600kB", frequencies={"user": counts}, fit=True)
    assert report.bytes_after <= 600_000 and model.user.ranks_of == [None]


def mixed(n: int) -> torch.Tensor:
    """Counts of ids that are not in order of frequency."""
    counts = (1e5 / (1 + torch.arange(n))).long()
    return counts[torch.randperm(n, generator=torch.Generator().manual_seed(0))]


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
        planned = plan(model, 700_000, frequencies=counts, state_dtype=state_dtype)
        report = compress_(model, budget=700_000, frequencies=counts)
        assert {name: module.scheme for name, module in model.items()} == dict(planned)
        step(model, optimizer)
        kept = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        assert report.state_bytes == sum(t.nbytes for t in kept)
        assert bytes_of(model, optimizer) <= 700_000
        widths[state_dtype] = model["user"].specs[0].width
    assert widths["float32"] < widths["log8"]


@pytest.mark.parametrize("budget", [200_000, 256_100])
def test_full_tables_keep_their_state_in_few_bits(budget: int) -> None:
    """A module of torch.nn with dense gradients would keep it in float32, whatever was planned."""
    model = nn.ModuleDict({"user": nn.Embedding(3000, 8), "item": nn.Embedding(500, 16)})
    optimizer, before = optim.Adagrad(model.parameters(), state_dtype="log8"), model["user"].weight.detach()
    compress_(model, budget=budget)
    assert model["user"].is_full() and torch.equal(model["user"].weight, before)
    step(model, optimizer)
    assert bytes_of(model, optimizer) <= budget

    class Special(nn.Embedding):
        """Stays as it is, and so does its state."""

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * 2

    model = nn.ModuleDict({"user": nn.Embedding(3000, 8), "other": Special(500, 16)})
    optimizer = optim.Adagrad(model.parameters(), state_dtype="log8")
    report = compress_(model, budget=100_000)
    assert {entry.name: entry.state_bytes for entry in report.entries}["other"] == 500 * 16 * 4 + 4
    step(model, optimizer)
    assert bytes_of(model, optimizer) <= 100_000


def test_sparse_adam_has_no_history():
    model = nn.ModuleDict({"user": nn.Embedding(20_000, 8, sparse=True)})
    optimizer = torch.optim.SparseAdam(model.parameters())
    compress_(model, budget="500kB")
    step(model, optimizer)
    assert 400_000 < bytes_of(model, optimizer) <= 500_000
