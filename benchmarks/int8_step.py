"""Time of a step with rows trained in 8 bits and in bfloat16 against float32, on one CPU thread.

    python benchmarks/int8_step.py DATA --out benchmarks/results/int8_step.json

    tables   lookup, backward and update of Adagrad: HotCold tables with a pool, a hundredth of Criteo's ids, D = 16
    network  a whole training step of DLRM, batch 128, on prepared data, with full tables

Rows of 8 bits have no fused update. All three take turns, so that they see the same disturbances.
"""

import itertools
from pathlib import Path
from typing import Any

import result_file
import torch
from cpu_lookups import BATCHES, Call, collection, in_turns, rows_of, step

from quorem import Full, optim, quantize_
from quorem.data.prepared import Prepared
from quorem.data.shape import CARDINALITIES
from quorem.experiments.bench import facts, grid
from quorem.training.config import RunConfig
from quorem.training.feed import Feed
from quorem.training.model import build_model, data_identity
from quorem.training.trial import Trial

DTYPES = ("float32", "bfloat16", "int8")


def tables_steps(batch: int) -> dict[str, Call]:
    """A step of tables of each dtype."""
    cardinalities = tuple(max(n // 100, 2) for n in CARDINALITIES)
    ids = [grid.draw_ids("zipf", cardinalities, batch, seed=seed) for seed in range(BATCHES)]
    calls = {}
    for dtype in DTYPES:
        module = collection(cardinalities, "pool")
        module = quantize_(module, bits=8) if dtype == "int8" else module.to(getattr(torch, dtype))
        optim.apply_in_backward(module, optim.Adagrad, lr=0.01)
        calls[dtype] = step(module, ids)
    return calls


def network_steps(data: Prepared) -> dict[str, Call]:
    """A training step of DLRM with rows of each dtype."""
    calls = {}
    for dtype in DTYPES:
        config = RunConfig(data=data_identity(data), network="dlrm", scheme=Full(), row_dtype=dtype)
        trial = Trial(config, build_model(config, data, "cpu"), data.names)
        batches = list(itertools.islice(Feed(data, "cpu").training(config), BATCHES))
        calls[dtype] = lambda b, trial=trial, batches=batches: trial.step(batches[b])
    return calls


def main() -> None:
    """Read the command line, measure, write."""
    parser = result_file.parser_of(__doc__)
    parser.add_argument("data", type=Path, help="prepared data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for batch in (128, 2048):
        rows += rows_of("tables", {"batch": batch}, in_turns(tables_steps(batch), 6.0, 20), "float32")
    rows += rows_of("network", {"batch": 128}, in_turns(network_steps(Prepared(options.data)), 8.0, 20), "float32")
    found = facts.facts_of_run(torch.device("cpu"), "python benchmarks/int8_step.py DATA")
    result_file.write(options.out, {"facts": found, "rows": rows})


if __name__ == "__main__":
    main()
