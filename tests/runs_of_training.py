"""Small logs and runs for the tests of training."""

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from quorem import QR
from quorem.data.prepared import Prepared
from quorem.data.synthetic import ClickLog, synthesize
from quorem.training.config import RunConfig
from quorem.training.model import data_identity
from quorem.training.run import read_metrics

CARDINALITIES = (400, 90, 7, 2)
TORCHS = {  # of each optimizer, the class for what is not a table
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "adamw": torch.optim.AdamW,
}


def small_log(folder: Path, num_rows: int = 4000, seed: int = 0) -> Prepared:
    return synthesize(ClickLog(cardinalities=CARDINALITIES, num_dense=3, seed=seed), num_rows, folder)


def small_run(prepared: Prepared, **options: object) -> RunConfig:
    defaults = {"scheme": QR(4), "batch_size": 64, "embedding_dim": 4, "data": data_identity(prepared)}
    return RunConfig(**{**defaults, **options})


def assert_same_model(one: Path, other: Path) -> None:
    """Two runs ended with the same bits."""
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)), name


def guess(prepared: Prepared) -> float:
    """Log loss of the test rows' own click rate."""
    rate = prepared.split("test").labels.double().mean()
    return float(-(rate * rate.log() + (1 - rate) * (1 - rate).log()))


class StopAt:
    """Looks like an event that is set once it was asked a number of times: after that many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def is_set(self) -> bool:
        self.left -= 1
        return self.left <= 0

    def set(self) -> None:
        self.left = 0


def lines(path) -> list[dict]:
    """The metrics that a run has logged, none of them damaged."""
    metrics = read_metrics(path / "metrics.jsonl")
    assert not metrics.damaged
    return metrics.lines
