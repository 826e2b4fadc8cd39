"""Replace the tables of a plain PyTorch model: python examples/replace_tables.py

The model knows nothing of quorem. One line compresses it to a budget; the training loop stays as it is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quorem
from quorem.convert import Report

USERS, ITEMS, DAYS = 50_000, 20_000, 7
ACTIVE_USERS, ACTIVE_ITEMS = 200, 50  # that occur in the clicks below


class Recommender(nn.Module):
    """Vectors of user, item and day, and a small network on top."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, 16)
        self.item = nn.Embedding(ITEMS, 16)
        self.day = nn.Embedding(DAYS, 16)
        self.top = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user: Tensor, item: Tensor, day: Tensor) -> Tensor:
        return self.top(torch.cat([self.user(user), self.item(item), self.day(day)], 1))[:, 0]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 100) -> list[float]:
    """Train on clicks that depend on user and item; returns the losses."""
    losses = []
    for _ in range(steps):
        user, item, day = (torch.randint(n, (256,)) for n in (ACTIVE_USERS, ACTIVE_ITEMS, DAYS))
        loss = F.binary_cross_entropy_with_logits(model(user, item, day), ((user + item) % 3 == 0).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> tuple[Report, list[float]]:
    """Compress, report, train."""
    torch.manual_seed(0)
    model = Recommender()
    report = quorem.compress_(model, budget="2MB", optimizer="adagrad")  # the line to add
    print(report)
    losses = train(model, torch.optim.Adagrad(model.parameters(), lr=0.05))
    print(f"loss {losses[0]:.3f}, after {len(losses)} steps {losses[-1]:.3f}")
    return report, losses


if __name__ == "__main__":
    main()
