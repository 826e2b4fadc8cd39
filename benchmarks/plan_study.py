"""Test log loss of plans against the same bytes spent alike on every table.

    python benchmarks/plan_study.py DATA --out benchmarks/results/plan_study.json --device cuda --workers 8

DATA is prepared. At the bytes that quotient-remainder with 4, 16, 60 and 250 collisions takes on every table that it
shrinks (``alike``), the same bytes are spent by ``quorem.plan``: without frequencies (``plan``), with the counts of the
training rows (``plan, counts``), and both with sums instead of products. DLRM, D = 16, batch 128, Adagrad at 0.01.
"""

import argparse
import json
import statistics
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from quorem import QR, EmbeddingCollection, Full, HotCold, Table, plan
from quorem.data.prepared import Prepared
from quorem.provenance import commit, versions
from quorem.schemes import Composed, Scheme
from quorem.training.config import RunConfig
from quorem.training.loop import train_many
from quorem.training.model import data_identity
from quorem.training.tables import tables_of

COLLISIONS = (4, 16, 60, 250)


def added(scheme: Scheme) -> Scheme:
    """The same with sums."""
    if isinstance(scheme, HotCold):
        return replace(scheme, cold=added(scheme.cold))
    return replace(scheme, operation="add") if isinstance(scheme, Composed) else scheme


def settings(data: Prepared) -> dict[str, dict]:
    """Options of ``RunConfig`` by name of the setting."""
    names = list(zip(data.names, data.cardinalities, strict=True))
    counts = {name: torch.from_numpy(data.frequencies(name)) for name in data.names}
    found: dict[str, dict] = {"full": {"scheme": Full()}}
    for c in COLLISIONS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alike = EmbeddingCollection(tables_of(data.cardinalities, QR(c)), device="meta")
        size = sum(t.numel() * t.element_size() for t in (*alike.parameters(), *alike.buffers()))
        tables = [Table(name, n, 16) for name, n in names]
        found[f"alike, {c}"] = {"scheme": QR(c)}
        found[f"alike, sums, {c}"] = {"scheme": QR(c, operation="add")}
        for label, frequencies in (("plan", None), ("plan, counts", counts)):
            planned = plan(tables, size, optimizer=None, frequencies=frequencies)
            print(f"{label}, {c}\n{planned}", flush=True)
            found[f"{label}, {c}"] = {"plan": dict(planned)}
            found[f"{label}, sums, {c}"] = {"plan": {name: added(scheme) for name, scheme in planned.items()}}
    return found


def main() -> None:
    """Read the command line, train, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    data = Prepared(arguments.data)
    options = settings(data)
    configs = [
        RunConfig(data=data_identity(data), seed=seed, **more)
        for more in options.values()
        for seed in range(arguments.seeds)
    ]
    results = train_many(configs, data, device=arguments.device, workers=arguments.workers)
    rows = []
    for i, name in enumerate(options):
        runs = results[i * arguments.seeds : (i + 1) * arguments.seeds]
        losses = [run["test"]["log_loss"] for run in runs]
        deviation = statistics.stdev(losses) if len(losses) > 1 else None
        row = {
            "setting": name,
            "bytes": runs[0]["embedding_bytes"],
            "test": statistics.mean(losses),
            "deviation": deviation,
        }
        rows.append({**row, "losses": losses})
        print(f"{name:24} {row['bytes']:>12,} {row['test']:.4f} ± {deviation or 0:.4f}", flush=True)
    head = {
        "rows_trained": len(data.split("train")),
        "device": arguments.device,
        "versions": versions(),
        "commit": commit(),
    }
    text = json.dumps(head)[:-1] + ', "rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n"
    arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
