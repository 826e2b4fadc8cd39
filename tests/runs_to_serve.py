"""A log with a column of lists and a run on it, for the tests of serving."""

from pathlib import Path

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import polars as pl

import quorem
from quorem.data.table import prepare_table
from quorem.training.config import RunConfig
from quorem.training.loop import train
from quorem.training.model import data_identity

ROWS = 700
COLUMNS = {"label": "click", "dense": ["price"], "categorical": ["user", "item", "tags"]}
HOT = quorem.HotCold(5, cold=quorem.QR(4, operation="add"), num_rest=8, force=True)


def table() -> pl.DataFrame:
    return pl.DataFrame(
        {
            "click": [i * 7 % 3 == 0 for i in range(ROWS)],
            "price": [None if i % 11 == 0 else i / 10 for i in range(ROWS)],
            "user": [f"user {i % 97}" for i in range(ROWS)],
            "item": [i * i % 31 for i in range(ROWS)],
            "tags": [[f"t{j}" for j in range(i % 4)] for i in range(ROWS)],
        }
    )


def train_on_table(path: Path) -> None:
    """Writes ``log.parquet``, the data ``log`` and the run ``run``."""
    table().write_parquet(path / "log.parquet")
    data = prepare_table(path / "log.parquet", path / "log", **COLUMNS)
    plan = {"user": HOT, "item": quorem.QR(4), "tags": quorem.Full()}
    train(RunConfig(data=data_identity(data), plan=plan, embedding_dim=4, lr=0.1), data, path / "run")
