"""Compress a trained model and train it on: python examples/compress_and_finetune.py

``fit=True`` makes each table the nearest composition of itself, and ``optimizer=`` converts the optimizer's state, so
that training goes on where it was. Frequencies make the fit exact where it matters: at the ids that occur.
"""

import torch
from replace_tables import ACTIVE_ITEMS, ACTIVE_USERS, ITEMS, USERS, Recommender, train

import quorem


def main() -> dict[str, float]:
    """Train, compress, train on; returns the losses."""
    torch.manual_seed(0)
    model = Recommender()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    losses = {}
    before = train(model, optimizer, steps=200)
    losses["at first"], losses["trained"] = before[0], before[-1]
    counts = {"user": torch.zeros(USERS), "item": torch.zeros(ITEMS)}  # yours come from your log
    counts["user"][:ACTIVE_USERS], counts["item"][:ACTIVE_ITEMS] = 1, 1
    report = quorem.compress_(
        model, quorem.QR(4, operation="add"), threshold=100, fit=True, optimizer=optimizer, frequencies=counts
    )
    print(report)
    after = train(model, optimizer, steps=100)
    losses["right after"], losses["trained on"] = after[0], after[-1]
    print(", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))
    quorem.decompress_(model, optimizer=optimizer)  # and back to nn.Embedding, if need be
    return losses


if __name__ == "__main__":
    main()
