"""What a trained model loses when it is compressed, and how soon it is back: real click-log rows, averaged over seeds.

    python benchmarks/fine_tune.py --data PATH/train.txt.gz --out benchmarks/results/fine_tune.json

A DLRM with ``nn.Embedding`` tables is trained on the first 90% of the rows. Then ``compress_`` with ``fit=True``, the
counts of the training rows as ``frequencies``, and the optimizer: the test loss right after, and after the last 10%.
Beside it, the same model compressed before it is trained: after the first 10% of the rows, and after all. The full
model, which is not compressed, after 90% and all. The data are those of ``criteo_sample.py``: 80,000 rows in time
order, of which 64,000 train; D = 16, batch 128, Adagrad 0.01.
"""

import argparse
import copy
import json
import statistics
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quorem
from quorem.data.batches import Batch, Prepared
from quorem.data.criteo import prepare_criteo
from quorem.data.prepare import PrepareConfig
from quorem.models import DLRM
from quorem.provenance import commit, versions
from quorem.schemes import Scheme

DIM, BATCH, LR, SHARE = 16, 128, 0.01, 0.1
SCHEMES: dict[str, Scheme] = {
    "QR mult 4x": quorem.QR(4),
    "QR add 4x": quorem.QR(4, operation="add"),
    "QR mult 16x": quorem.QR(16),
    "QR add 16x": quorem.QR(16, operation="add"),
}


class Tables(nn.ModuleList):
    """A plain ``nn.Embedding`` a feature; vectors ``[B, F, D]``."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(nn.Embedding(n, DIM) for n in sizes)
        for table in self:
            nn.init.uniform_(table.weight, -((1 / len(table.weight)) ** 0.5), (1 / len(table.weight)) ** 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack([table(column) for table, column in zip(self, ids.unbind(1), strict=True)], 1)


def network(sizes: list[int], seed: int) -> tuple[DLRM, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = DLRM(Tables(sizes), embedding_dims=(DIM,) * len(sizes))
    return model, torch.optim.Adagrad(model.parameters(), lr=LR)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Batch) -> None:
    """One pass over ``rows``."""
    for batch in rows.batches(BATCH):
        optimizer.zero_grad()
        logits = model(batch.dense, batch.ids.long())
        F.binary_cross_entropy_with_logits(logits, batch.labels.float()).backward()
        optimizer.step()


@torch.no_grad()
def loss_of(model: nn.Module, rows: Batch) -> float:
    """The mean test log loss."""
    total = 0.0
    for batch in rows.batches(2048):
        logits = model(batch.dense, batch.ids.long())
        total += F.binary_cross_entropy_with_logits(logits, batch.labels.float(), reduction="sum").item()
    return total / len(rows)


def measure(prepared: Prepared, seed: int) -> dict[str, dict[str, float]]:
    """The losses of each scheme, for one seed."""
    rows, test = prepared.split("train"), prepared.split("test")
    sizes, tenth = list(prepared.cardinalities), int(SHARE * len(rows)) // BATCH * BATCH
    first, early, late = rows.rows(0, tenth), rows.rows(0, len(rows) - tenth), rows.rows(len(rows) - tenth, len(rows))
    counts = {f"embeddings.{i}": torch.as_tensor(prepared.frequencies(n)) for i, n in enumerate(prepared.names)}
    trained, optimizer = network(sizes, seed)
    train(trained, optimizer, early)
    before = copy.deepcopy((trained, optimizer))
    losses = {"full": {"at 90%": loss_of(trained, test)}}
    train(trained, optimizer, late)
    losses["full"]["at 100%"] = loss_of(trained, test)
    for name, scheme in SCHEMES.items():
        model, its = copy.deepcopy(before)
        report = quorem.compress_(model, scheme, fit=True, frequencies=counts, optimizer=its)
        entry = {"times smaller": report.bytes_before / report.bytes_after, "fitted at 90%": loss_of(model, test)}
        train(model, its, late)
        entry["fitted at 100%"] = loss_of(model, test)
        model, its = network(sizes, seed)
        quorem.compress_(model, scheme, optimizer=its)
        train(model, its, first)
        entry["scratch at 10%"] = loss_of(model, test)
        train(model, its, rows.rows(tenth, len(rows)))
        entry["scratch at 100%"] = loss_of(model, test)
        losses[name] = entry
        print(f"seed {seed}, {name}: " + ", ".join(f"{key} {value:.4f}" for key, value in entry.items()), flush=True)
    return losses


def main() -> None:
    """Read the command line, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="rows in the layout of Criteo's train.txt")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_criteo(arguments.data, Path(folder) / "log", PrepareConfig(days=5, ids="appearance"))
        runs = [measure(prepared, seed) for seed in range(arguments.seeds)]
    rows = [
        {"scheme": name}
        | {
            key: {"mean": statistics.mean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}
            for key in entry
            for values in [[run[name][key] for run in runs]]
        }
        for name, entry in runs[0].items()
    ]
    config = {"dim": DIM, "batch": BATCH, "lr": LR, "optimizer": "adagrad", "seeds": arguments.seeds, "share": SHARE}
    head = {"config": config, "versions": versions(), "commit": commit()}
    arguments.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
