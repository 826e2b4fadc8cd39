"""How many DLRMs lose the units of their bottom network in the first steps, with full tables and with others.

    python benchmarks/dead_units.py DATA --out benchmarks/results/dead_units.json --workers 16

Adagrad's first step moves every weight by the learning rate, whatever the gradient. Some starts of the network do not
survive that: the ReLU after the bottom network gives next to nothing but zeros from then on, and what the dense
features say is lost. Each start is trained for 150 steps at batch 128 with full tables, with hashed ones, and with
plans at a 16th and at a 250th of the bytes; the network starts alike in all four. Counted are the runs in which less
than one in a hundred outputs of that layer is above zero, over 2,000 training rows. Starts are numbered from 1000
on.
"""

import multiprocessing
from typing import Any

import result_file
import torch
from plan_quality import begun, parser_of, settings

from quorem.data.prepared import Prepared
from quorem.provenance import versions

STEPS, ROWS, SHARE = 150, 2000, 0.01
WANTED = [("full", 1), ("hash", 16), ("plan", 16), ("plan", 250)]


def active(task: tuple[str, str, int, dict[str, Any]]) -> tuple[str, int, int, float]:
    """Setting, size and seed of a run, and the share of outputs of the bottom's last layer above zero."""
    folder, device, seed, setting = task
    data, config, trial = begun(folder, device, seed=seed, max_rows=STEPS * 128, **setting["options"])
    for batches in data.training(config, 0, trial.together):
        trial.step(batches)
    dense = data.prepared.split("train").dense[:ROWS].to(device)
    with torch.no_grad():
        share = float((trial.model.bottom(dense) > 0).double().mean())
    return setting["setting"], setting["times"], seed, share


def main() -> None:
    """Read the command line, train, write."""
    arguments = parser_of(__doc__, seeds=200).parse_args()
    sizes = sorted({times for _, times in WANTED if times > 1})
    found = settings(Prepared(arguments.data), sizes, ["full", "hash", "plan"])
    chosen = [setting for setting in found if (setting["setting"], setting["times"]) in WANTED]
    seeds = range(1000, 1000 + arguments.seeds)
    tasks = [(str(arguments.data), arguments.device, seed, setting) for seed in seeds for setting in chosen]
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        runs = pool.map(active, tasks, chunksize=4)
    rows = []
    for setting, times in WANTED:
        shares = {seed: share for name, size, seed, share in runs if (name, size) == (setting, times)}
        dead = [seed for seed, share in sorted(shares.items()) if share < SHARE]
        mean = sum(shares.values()) / len(shares)
        rows.append({"setting": setting, "times": times, "runs": len(shares), "active": mean, "dead": dead})
        print(f"{setting:5} {times:>4}x: {len(dead)} of {len(shares)} below {SHARE:.0%}, {mean:.1%} on average")
    head = {"steps": STEPS, "rows": ROWS, "share": SHARE, "device": arguments.device}
    head |= {"versions": versions(), "commit": arguments.commit, "runs": rows}
    result_file.write(arguments.out, head)


if __name__ == "__main__":
    main()
