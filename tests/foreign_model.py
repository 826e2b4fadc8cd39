"""A model of torch.nn that is compressed and trained, for tools that save it, and processes without its data."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import quorem
from quorem.planner import Plan

KINDS = ("qr", "counts", "quantized")
SCHEMES = {"qr": quorem.QR(4), "quantized": quorem.QR(4, width=4)}
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)  # also of dicts of tensors


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(3000, 16)
        self.items = nn.EmbeddingBag(2000, 16, mode="sum")
        self.top = nn.Linear(32, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.top(torch.cat([self.users(users), self.items(items)], 1)).flatten()


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randint(0, 3000, (64,), generator=draw), torch.randint(0, 2000, (64, 5), generator=draw)


def counts() -> dict[str, Tensor]:
    """Few ids are frequent, and they are not the first."""
    draw = torch.Generator().manual_seed(9)
    sizes = {"users": 3000, "items": 2000}
    return {
        key: (10_000 / torch.arange(1, n + 1)).long()[torch.randperm(n, generator=draw)] for key, n in sizes.items()
    }


def empty(kind: str, folder: Path) -> nn.Module:
    """The model as a process builds it that has the plan, but neither counts nor data."""
    model = Recommender()
    quorem.compress_(model, SCHEMES.get(kind) or Plan.from_json((folder / "plan.json").read_text()))
    return quorem.quantize_(model) if kind == "quantized" else model


def trained(kind: str, folder: Path) -> nn.Module:
    torch.manual_seed(0)
    model = Recommender()
    plan = quorem.plan(model, 24_000, frequencies=counts())
    assert all(table.ranked for table in plan.tables), plan
    (folder / "plan.json").write_text(plan.to_json())
    quorem.compress_(model, SCHEMES.get(kind) or plan, frequencies=counts())
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), range(3))
    return quorem.quantize_(model) if kind == "quantized" else model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(*batch(step)).square().mean().backward()
        optimizer.step()


def facts_of(model: nn.Module) -> dict[str, Tensor]:
    """Everything that must come back: the state, the vectors of all ids, and what the model answers."""
    tables = {f"{name} dense": getattr(model, name).to_dense().detach() for name in ("users", "items")}
    return {**model.state_dict(), **tables, "answers": model.eval()(*batch(99)).detach()}
