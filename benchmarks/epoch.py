"""How long the paper's epoch takes on a GPU: ``quorem train`` on as many rows as the Criteo Kaggle log has.

    python benchmarks/epoch.py --out benchmarks/results/epoch_h200.json [--commit SHA]

The log is made up: Criteo's cardinalities, log-uniform ids, labels that mean nothing. 39.3 million rows train, batch
128, ``QR(4)`` at D = 16, by the command that a user would type; rows lie on the GPU. The result has the seconds of the
training loop, with compilation, and of the whole command, with its start, evaluation and saving. The first run is made
twice: the second time torch finds the compiled network on disk.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import result_file
import torch

from quorem.data.folder import new_folder
from quorem.data.meta import Columns, Meta
from quorem.data.shape import CARDINALITIES, CATEGORICAL_NAMES, DENSE_NAMES, NUM_ROWS, day_split
from quorem.experiments.bench.run import facts_of_run
from quorem.files.provenance import versions

RUNS = (("dlrm", "adagrad"), ("dcn", "adagrad"), ("dlrm", "amsgrad"), ("dcn", "amsgrad"))
BLOCK = 1 << 20  # rows drawn at a time


def draw(out: Path, num_rows: int, device: str) -> None:
    """Prepared data of made-up rows, drawn on a device."""
    sizes = torch.tensor(CARDINALITIES, device=device)
    counts = [torch.zeros(n, dtype=torch.int64, device=device) for n in CARDINALITIES]
    split = day_split(num_rows, 7)
    with new_folder(out) as folder:
        labels = folder.array("labels.npy", np.uint8)
        dense = folder.array("dense.npy", np.float32, (len(DENSE_NAMES),))
        ids = folder.array("categorical.npy", np.int32, (len(CARDINALITIES),))
        for start in range(0, num_rows, BLOCK):
            rows = min(BLOCK, num_rows - start)
            uniform = torch.rand(rows, len(sizes), device=device, dtype=torch.float64)
            drawn = ((sizes.double().log() * uniform).exp() - 1).long().clamp_(min=0).minimum(sizes - 1)
            for count, column in zip(counts, drawn[: max(0, split["train"][1] - start)].T, strict=True):
                count.index_add_(0, column, torch.ones_like(column))
            labels.append((torch.rand(rows, device=device) < 0.25).byte().cpu().numpy())
            dense.append(torch.randn(rows, len(DENSE_NAMES), device=device).abs().cpu().numpy())
            ids.append(drawn.int().cpu().numpy())
        columns = Columns("label", DENSE_NAMES, CATEGORICAL_NAMES)
        for name, count in zip(columns.categorical, counts, strict=True):
            folder.save_counts(name, count.cpu().numpy())
        folder.commit(
            Meta(
                num_rows=num_rows,
                columns=columns,
                cardinalities=list(CARDINALITIES),
                split=split,
                transforms=dict.fromkeys(columns.dense, "none"),
                config={},
                versions=versions(),
            )
        )


def train(data: Path, out: Path, network: str, optimizer: str, device: str, compiled: str) -> dict[str, Any]:
    """One epoch; the seconds of its loop and of the whole command."""
    words = ["--data", data, "--out", out, "--network", network, "--optimizer", optimizer, "--device", device]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "quorem", "train", *words], check=True)
    seconds = time.perf_counter() - start
    result = json.loads((out / "result.json").read_text())
    return {
        "network": network,
        "optimizer": optimizer,
        "compiled": compiled,
        "rows": result["rows"],
        "training_s": round(result["seconds"], 1),
        "command_s": round(seconds, 1),
        "rows_per_second": round(result["rows_per_second"]),
    }


def main() -> None:
    parser = result_file.parser_of(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=NUM_ROWS)
    parser.add_argument("--runs", type=int, default=len(RUNS), help="how many of the runs, in their order")
    parser.add_argument("--commit", help="of the code, where there is no repository to ask")
    options = parser.parse_args()
    facts = facts_of_run(torch.device(options.device), "python benchmarks/epoch.py", options.commit)
    results: dict[str, Any] = {"facts": facts, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        draw(data, options.rows, options.device)
        runs = [(*run, "in the run") for run in RUNS[: options.runs]]
        runs.insert(1, (*RUNS[0], "before"))
        for number, (network, optimizer, compiled) in enumerate(runs):
            out = Path(folder) / f"{number}"
            results["rows"].append(train(data, out, network, optimizer, options.device, compiled))
            print(results["rows"][-1], flush=True)
            result_file.write(options.out, results)


if __name__ == "__main__":
    main()
