"""A SASRec over a catalogue of a million items, compressed sixtyfold: python examples/sequential.py

The model reads the items of a session and predicts the next one among all of them. The loss, ``cross_entropy``, and the
recommendations, ``topk``, never hold the scores of the catalogue, and the table is never as large as the catalogue.
"""

import torch
from torch import Tensor, nn

import quorem

ITEMS, D, LENGTH = 1_000_000, 64, 20
TOPICS, TOPIC_ITEMS = 100, 40  # the made-up sessions visit these items only, as most sessions visit few


class SASRec(nn.Module):
    """Self-attentive sequential recommendation (Kang and McAuley, 2018), with the items' table as its output layer."""

    def __init__(self, items: nn.Module, dim: int = D, length: int = LENGTH, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.items, self.positions = items, nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, 0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, sessions: Tensor) -> Tensor:
        """The query ``[B, L, D]`` for the next item after each of a session ``[B, L]``."""
        length = sessions.shape[1]
        x = self.items(sessions) * D**0.5 + self.positions(torch.arange(length, device=sessions.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=sessions.device)
        return self.norm(self.encoder(x, mask=mask, is_causal=True))


def made_up_sessions(count: int, seed: int) -> Tensor:
    """Sessions ``[count, LENGTH + 1]``: each stays within a topic, and mostly goes on to the item after the last."""
    generator = torch.Generator().manual_seed(seed)
    topic = torch.randint(TOPICS, (count, 1), generator=generator)
    jump = torch.rand(count, LENGTH + 1, generator=generator) < 0.2
    step = torch.where(jump, torch.randint(TOPIC_ITEMS, jump.shape, generator=generator), 1)
    within = step.cumsum(1) % TOPIC_ITEMS
    spread = ITEMS // (TOPICS * TOPIC_ITEMS)  # the visited items lie all over the catalogue
    return (topic * TOPIC_ITEMS + within) * spread


def recall(model: SASRec, sessions: Tensor, k: int = 20) -> float:
    """The share of sessions whose last item is among the best k that the session has not visited before."""
    model.eval()
    with torch.no_grad():
        seen, following = sessions[:, :-1], sessions[:, -1]
        fresh = (seen != following[:, None]).all(1)
        seen, following = seen[fresh], following[fresh]
        _, best = model.items.topk(model(seen)[:, -1], k, exclude=seen)  # type: ignore[operator]
    model.train()
    return float((best == following[:, None]).any(1).float().mean())


def main(steps: int = 200, batch: int = 32) -> tuple[float, float]:
    """Train; returns the recall before and after."""
    torch.manual_seed(0)
    items = quorem.Embedding(ITEMS, D, quorem.QR(60, operation="add"), init_std=0.1)
    model = SASRec(items)
    full = ITEMS * D * 4
    print(f"{ITEMS:,} items in {items.stored.nbytes / 1e6:.1f} MB; the full table has {full / 1e6:.0f} MB")
    quorem.optim.apply_in_backward(items, quorem.optim.Adagrad, lr=0.1)
    rest = torch.optim.Adam([p for p in model.parameters() if p is not items.stored], lr=2e-3)
    test = made_up_sessions(500, seed=1)
    before = recall(model, test)
    for step in range(steps):
        sessions = made_up_sessions(batch, seed=2 + step)
        loss = quorem.cross_entropy(model(sessions[:, :-1]), items, sessions[:, 1:])
        rest.zero_grad()
        loss.backward()
        rest.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.2f}, recall@20 {recall(model, test):.3f}")
    return before, recall(model, test)


if __name__ == "__main__":
    main()
