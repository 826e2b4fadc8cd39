"""A DeepFM of torch-rechub, compressed: python examples/rechub_deepfm.py

pip install --no-deps torch-rechub; pip install pandas scikit-learn tqdm
"""

import torch
import torch.nn.functional as F
from torch_rechub.basic.features import DenseFeature, SparseFeature
from torch_rechub.models.ranking import DeepFM

import quorem
from quorem.convert import Report

SIZES = {"user": 100_000, "item": 20_000, "day": 7}


def main() -> tuple[Report, list[float]]:
    """Build it as torch-rechub says, compress, train."""
    torch.manual_seed(0)
    sparse = [SparseFeature(name, vocab_size=n, embed_dim=16) for name, n in SIZES.items()]
    model = DeepFM([DenseFeature("age"), *sparse], sparse, {"dims": [64], "dropout": 0.0})
    report = quorem.compress_(model, budget="4MB", optimizer="adam")  # the line to add
    print(report)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(100):
        batch = {name: torch.randint(min(n, 200), (256,)) for name, n in SIZES.items()} | {"age": torch.rand(256)}
        loss = F.binary_cross_entropy(model(batch), ((batch["user"] + batch["item"]) % 3 == 0).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f}, after {len(losses)} steps {losses[-1]:.3f}")
    return report, losses


if __name__ == "__main__":
    main()
