"""What a trained model loses when it is compressed, and how soon it is back: real click-log rows, averaged over seeds.

    python benchmarks/fine_tune.py --data PATH/train.txt.gz --out benchmarks/results/fine_tune.json

A DLRM with ``nn.Embedding`` tables is trained on the first 90% of the rows. Then ``compress_`` with ``fit=True``, the
counts of the training rows as ``frequencies``, and the optimizer: the test loss right after, and after the last 10%.
Beside it, the same model compressed before it is trained, after all rows, and the full model, which is not compressed,
after 90% and all. The data are the first 80,000 rows of the log in time
order, of which 64,000 train; D = 16, batch 128, Adagrad 0.01.
"""

import copy
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import result_file
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quorem
from quorem.data.batches import Batch
from quorem.data.config import PrepareConfig
from quorem.data.criteo import prepare_criteo
from quorem.data.prepared import Prepared
from quorem.files.provenance import commit, versions
from quorem.models import DLRM

DIM, BATCH, LR, SHARE = 16, 128, 0.01, 0.1
NAME, SCHEME = "QR mult 4x", quorem.QR(4)


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


def losses_of(prepared: Prepared, seed: int) -> dict[str, dict[str, float]]:
    """The losses of the full model, of one fitted to it, and of one that was compressed before it was trained."""
    rows, test = prepared.split("train"), prepared.split("test")
    last = int((1 - SHARE) * len(rows)) // BATCH * BATCH
    early, late = rows.rows(0, last), rows.rows(last, len(rows))
    counts = {f"embeddings.{i}": torch.as_tensor(prepared.frequencies(n)) for i, n in enumerate(prepared.names)}
    full, optimizer = network(list(prepared.cardinalities), seed)
    train(full, optimizer, early)
    fitted, its = copy.deepcopy((full, optimizer))
    losses = {"full": {"at 90%": loss_of(full, test)}}
    train(full, optimizer, late)
    losses["full"]["at 100%"] = loss_of(full, test)
    report = quorem.compress_(fitted, SCHEME, fit=True, frequencies=counts, optimizer=its)
    entry = {"times smaller": report.bytes_before / report.bytes_after, "fitted at 90%": loss_of(fitted, test)}
    train(fitted, its, late)
    scratch, optimizer = network(list(prepared.cardinalities), seed)
    quorem.compress_(scratch, SCHEME, optimizer=optimizer)
    train(scratch, optimizer, early)
    train(scratch, optimizer, late)
    losses[NAME] = entry | {"fitted at 100%": loss_of(fitted, test), "scratch at 100%": loss_of(scratch, test)}
    return losses


def summary(runs: list[dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """Mean and deviation of each loss over the seeds."""
    rows = []
    for name in ("full", NAME):
        row: dict[str, Any] = {"scheme": name}
        for key in runs[0][name]:
            values = [run[name][key] for run in runs]
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            row[key] = {"mean": statistics.mean(values), "deviation": deviation, "seeds": len(values)}
        rows.append(row)
    return rows


def main() -> None:
    """Read the command line, run, write."""
    parser = result_file.parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="rows in the layout of Criteo's train.txt")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    config = {"dim": DIM, "batch": BATCH, "lr": LR, "optimizer": "adagrad", "share": SHARE}
    head: dict[str, Any] = {"config": config, "versions": versions(), "commit": commit()}
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_criteo(arguments.data, Path(folder) / "log", PrepareConfig(days=5, ids="appearance"))
        for seed in range(arguments.seeds):
            runs.append(losses_of(prepared, seed))
            print(seed, json.dumps(runs[-1]), flush=True)
            result_file.write(arguments.out, {**head, "rows": summary(runs), "runs": runs})


if __name__ == "__main__":
    main()
