"""Test log loss on real click-log rows, averaged over seeds: full tables, hashing and the quotient-remainder trick.

    python benchmarks/criteo_sample.py --data PATH/train.txt.gz --out benchmarks/results/criteo_sample.json

The data are 80,000 rows in the layout of the Criteo Kaggle ``train.txt``, in time order: 64,000 train, 8,000 validate,
8,000 test. DLRM, D = 16, batch 128, one epoch, Adagrad 0.01: the defaults of ``RunConfig``.
"""

import json
import statistics
import tempfile
from pathlib import Path

import result_file
import torch

from quorem import QR, Full, Hash
from quorem.data.criteo import prepare_criteo
from quorem.data.prepare import PrepareConfig
from quorem.data.prepared import Prepared
from quorem.provenance import commit, versions
from quorem.schemes import Scheme
from quorem.training.config import RunConfig
from quorem.training.loop import train_many
from quorem.training.model import data_identity

DAYS = 5  # of 16,000 rows: four train, the last is halved
SEEDS = 5
SCHEMES: dict[str, Scheme] = {
    "full": Full(),
    **{f"{name} {c}x": kind(c) for c in (4, 16, 60) for name, kind in {"hash": Hash, "QR mult": QR}.items()},
}


def losses(prepared: Prepared, scheme: Scheme, optimizer: str = "adagrad", seeds: int = SEEDS) -> list[dict]:
    """The result of each seed."""
    name = data_identity(prepared)
    configs = [RunConfig(data=name, scheme=scheme, optimizer=optimizer, seed=seed) for seed in range(seeds)]
    return train_many(configs, prepared, workers=2)


def main() -> None:
    """Read the command line, run, write."""
    parser = result_file.parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="rows in the layout of Criteo's train.txt")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_criteo(arguments.data, Path(folder) / "log", PrepareConfig(days=DAYS, ids="appearance"))
        for optimizer in ("adagrad", "amsgrad"):
            for name, scheme in SCHEMES.items():
                results = losses(prepared, scheme, optimizer)
                test = [result["test"]["log_loss"] for result in results]
                rows.append(
                    {
                        "scheme": name,
                        "optimizer": optimizer,
                        "embedding_parameters": results[0]["embedding_parameters"],
                        "test_log_loss": statistics.mean(test),
                        "deviation": statistics.stdev(test),
                        "test_auc": statistics.mean(result["test"]["auc"] for result in results),
                        "seeds": test,
                    }
                )
                print(f"{optimizer} {name}: {rows[-1]['test_log_loss']:.4f} ± {rows[-1]['deviation']:.4f}", flush=True)
        config = json.loads(RunConfig(data=data_identity(prepared)).to_json())
    head = {"config": config, "threads": torch.get_num_threads(), "versions": versions(), "commit": commit()}
    result_file.write(arguments.out, {**head, "rows": rows})


if __name__ == "__main__":
    main()
