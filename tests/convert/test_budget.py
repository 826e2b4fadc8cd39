"""``compress_`` to a budget, and by a plan: what is allocated fits, tied weights count once, what stays counts too."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from quorem import QR, Embedding, Full, HotCold, Plan, compress_, optim, plan


class Model(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.user = nn.Embedding(20_000, 16, sparse=sparse)
        self.item = nn.EmbeddingBag(5000, 16, mode="sum", sparse=sparse)
        self.day = nn.Embedding(7, 16, sparse=sparse)
        self.norm = nn.Embedding(3000, 16, max_norm=1.0, sparse=sparse)
        self.friend = nn.Embedding(20_000, 16, padding_idx=0, sparse=sparse)
        self.friend.weight = self.user.weight
        self.top = nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> Tensor:
        vectors = (
            self.user(ids) + self.friend(ids) + self.item(ids[:, None]) + self.day(ids % 7) + self.norm(ids % 3000)
        )
        return self.top(vectors)


def allocated(model: Model, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of all tables and, after a step, of the state for them."""
    tables = [model.user, model.item, model.day, model.norm, model.friend]
    tensors = {id(t): t for table in tables for t in (*table.parameters(), *table.buffers())}
    if optimizer is not None:
        model(torch.tensor([0, 3, 4999])).sum().backward()
        optimizer.step()
        by_row = optimizer.live_state() if isinstance(optimizer, optim.RowOptimizer) else {}
        states = [[t for t in state if t is not None] for state in by_row.values()]
        rest = {p: s for p, s in optimizer.state.items() if p not in by_row and p not in set(model.top.parameters())}
        states += [[t for t in state.values() if isinstance(t, Tensor) and t.dim()] for state in rest.values()]
        tensors |= {id(t): t for state in states for t in state}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.parametrize(
    ("name", "kind"), [("adagrad", torch.optim.Adagrad), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)]
)
@pytest.mark.parametrize("share", [0.5, 0.2])
def test_what_is_allocated_fits_the_budget(name: str, kind: type[torch.optim.Optimizer], share: float) -> None:
    model = Model()
    numbers = {"sgd": 1, "adagrad": 2, "adam": 3}[name]
    budget = int(share * numbers * 4 * 16 * 28_007)
    optimizer = kind(model.parameters(), lr=0.01)
    report = compress_(model, budget=budget, optimizer=optimizer)
    assert report.swapped[:2] == ["user", "friend"] and {"day", "norm"} <= set(report.left)
    assert "item" in report.swapped
    assert model.friend.stored is model.user.stored
    assert 0.8 * budget < report.bytes_after + report.state_bytes <= budget
    assert 0.8 * budget < allocated(model, optimizer) <= budget
    text = str(report).splitlines()
    assert text[0].split() == ["table", "ids", "D", "before", "after", "state", "stored", "as", "why"]
    assert any("shares the weight of user" in line for line in text) and any("share a row" in line for line in text)


def test_rows_updated_one_by_one_fit_the_budget() -> None:
    model = Model(sparse=True)
    model.norm = nn.Embedding(3000, 16)
    report = compress_(model, budget="900kB", optimizer="adagrad")
    assert report.bytes_after + report.state_bytes <= 900_000
    assert allocated(model, optim.Adagrad(model.parameters())) <= 900_000


def test_a_budget_that_is_too_small_names_the_smallest() -> None:
    with pytest.raises(ValueError, match=r"must be at least (\d+) bytes .* and \d+ bytes that cannot be") as refusal:
        compress_(Model(), budget="100kB")
    least = int(str(refusal.value).split("at least ")[1].split()[0])
    model = Model()
    assert compress_(model, budget=least).bytes_after <= least
    assert allocated(model, None) <= least
    with pytest.raises(
        ValueError, match=r"budget \('100kB', 100000 bytes\) must be at least .*: no table can be replaced"
    ):
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
    report = compress_(model, budget="600kB", frequencies={"user": counts}, fit=True)
    assert report.bytes_after <= 600_000 and model.user.ranks_of == [None]


def test_memory_is_freed_and_nothing_else_is_reported() -> None:
    model = Model()
    padding = "friend: the vector of padding_idx (0) was not zero and is zero now"
    assert compress_(model, budget="900kB").references == [padding]
    held = [model]
    kept = Model()
    weights = {"mine": kept.user.weight}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = compress_(kept, QR(4), threshold=10_000)
    assert report.references == [padding] and len(report.outdated) == 1
    assert "the old table of user: something outside the model (dict) holds it" in str(report).splitlines()[0]
    assert weights and held


def test_subclasses_attributes_and_hooks() -> None:
    class Started(nn.Embedding):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)

    class Scaled(nn.Embedding):
        @property
        def scale(self) -> float:
            return 2.0

    model = nn.ModuleDict({"started": Started(999, 4), "scaled": Scaled(999, 4), "hooked": nn.Embedding(999, 4)})
    model["started"].note = "mine"
    model["hooked"].weight.register_hook(lambda grad: grad * 0)
    report = compress_(model, QR(4))
    assert type(model["started"]) is Embedding and model["started"].note == "mine"
    assert report.left == {
        "scaled": "Scaled has methods of its own (scale)",
        "hooked": "its weight has hooks that expect the gradient of the whole table",
    }
    assert compress_(nn.Sequential(nn.Embedding(99, 4)), QR(4, operation="feature")).left["0"].startswith("feature")
    with pytest.raises(TypeError, match=r"optimizer \(int\) must be an optimizer, its name, or None"):
        compress_(Model(), QR(4), optimizer=3)
    with pytest.raises(ValueError, match=r"optimizer \(LBFGS\) must be one whose state can be counted"):
        compress_(Model(), budget="1MB", optimizer=torch.optim.LBFGS(Model().parameters()))
    with pytest.raises(ValueError, match=r"optimizer \('lion'\) must be None or one of"):
        compress_(Model(), budget="1MB", optimizer="lion")
    assert Full() not in compress_(Model(), QR(4)).left.values()
