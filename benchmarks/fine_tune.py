"""What a trained model loses when it is compressed, and how soon it is back: real click-log rows, averaged over seeds.

    python benchmarks/fine_tune.py --data PATH/train.txt.gz --out benchmarks/results/fine_tune.json

Each seed has five parts, one for what is trained before it is compressed and one for each scheme from scratch. The file
is written after each: the same command goes on with the parts that it lacks. ``--parts 3`` stops after three of them.

A DLRM with ``nn.Embedding`` tables is trained on the first 90% of the rows. Then ``compress_`` with ``fit=True``, the
counts of the training rows as ``frequencies``, and the optimizer: the test loss right after, and after the last 10%.
Beside it, the same model compressed before it is trained: after the first 10% of the rows, and after all. The full
model, which is not compressed, after 90% and all. The data are the first 80,000 rows of the log in time
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
from quorem.paper.schemes import Scheme

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


def fitted_losses(prepared: Prepared, seed: int) -> dict[str, dict[str, float]]:
    """The losses of the full model, and of each scheme fitted to it."""
    _, early, late, test = splits(prepared)
    counts = {f"embeddings.{i}": torch.as_tensor(prepared.frequencies(n)) for i, n in enumerate(prepared.names)}
    trained, optimizer = network(list(prepared.cardinalities), seed)
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
        losses[name] = entry | {"fitted at 100%": loss_of(model, test)}
    return losses


def scratch_losses(prepared: Prepared, seed: int, name: str) -> dict[str, dict[str, float]]:
    """The losses of a model that was compressed before it was trained."""
    first, early, late, test = splits(prepared)
    model, optimizer = network(list(prepared.cardinalities), seed)
    quorem.compress_(model, SCHEMES[name], optimizer=optimizer)
    train(model, optimizer, first)
    entry = {"scratch at 10%": loss_of(model, test)}
    train(model, optimizer, early.rows(len(first), len(early)))
    train(model, optimizer, late)
    return {name: entry | {"scratch at 100%": loss_of(model, test)}}


def splits(prepared: Prepared) -> tuple[Batch, Batch, Batch, Batch]:
    """The first 10%, the first 90% and the last 10% of the training rows; the test rows."""
    rows = prepared.split("train")
    tenth = int(SHARE * len(rows)) // BATCH * BATCH
    last = (len(rows) - tenth) // BATCH * BATCH
    return rows.rows(0, tenth), rows.rows(0, last), rows.rows(last, len(rows)), prepared.split("test")


def summary(runs: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """Mean and deviation of each loss, over the seeds that have it."""
    rows = []
    for name in ("full", *SCHEMES):
        entries = [run[name] for run in runs.values() if name in run]
        row: dict[str, Any] = {"scheme": name}
        for key in dict.fromkeys(key for entry in entries for key in entry):
            values = [entry[key] for entry in entries if key in entry]
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            row[key] = {"mean": statistics.mean(values), "deviation": deviation, "seeds": len(values)}
        rows.append(row)
    return rows


def main() -> None:
    """Read the command line, run, write."""
    parser = result_file.parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="rows in the layout of Criteo's train.txt")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parts", type=int, default=1000, help="to run at most")
    arguments = parser.parse_args()
    config = {"dim": DIM, "batch": BATCH, "lr": LR, "optimizer": "adagrad", "share": SHARE}
    head: dict[str, Any] = {"config": config, "versions": versions(), "commit": commit()}
    runs: dict[str, dict[str, dict[str, float]]] = {}
    if arguments.out.exists():
        written = json.loads(arguments.out.read_text(encoding="utf-8"))
        if written["config"] == config and written["versions"] == versions():
            runs, head["commit"] = written["runs"], written["commit"]
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_criteo(arguments.data, Path(folder) / "log", PrepareConfig(days=5, ids="appearance"))
        parts = [(seed, name) for seed in range(arguments.seeds) for name in ("full", *SCHEMES)]
        key = {"full": "at 90%"} | dict.fromkeys(SCHEMES, "scratch at 10%")
        missing = [(s, name) for s, name in parts if key[name] not in runs.get(str(s), {}).get(name, {})]
        for seed, name in missing[: arguments.parts]:
            losses = fitted_losses(prepared, seed) if name == "full" else scratch_losses(prepared, seed, name)
            print(seed, json.dumps(losses), flush=True)
            run = runs.setdefault(str(seed), {})
            for scheme, entry in losses.items():
                run[scheme] = run.get(scheme, {}) | entry
            result_file.write(arguments.out, {**head, "rows": summary(runs), "runs": runs})


if __name__ == "__main__":
    main()
