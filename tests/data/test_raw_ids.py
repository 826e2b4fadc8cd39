"""``prepare --ids raw``: data without a vocabulary, trained on and scored, tokens that no row had included."""

import dataclasses
import shutil
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import numpy as np
import polars as pl
import torch
from typer.testing import CliRunner

import quorem
from quorem import GeneralizedQR, HotCold, hash_strings
from quorem.cli import app
from quorem.data.config import PrepareConfig
from quorem.data.prepared import Prepared
from quorem.data.table import prepare_table
from quorem.serving.predict import predict
from quorem.training.config import RunConfig
from quorem.training.loop import train
from quorem.training.metrics import Evaluation
from quorem.training.model import data_identity

ROWS = 700
COLUMNS = {"label": "click", "dense": ["price"], "categorical": ["user", "item", "tags"]}


def table() -> pl.DataFrame:
    return pl.DataFrame(
        {
            "click": [i * 7 % 3 == 0 for i in range(ROWS)],
            "price": [i / 10 for i in range(ROWS)],
            "user": [None if i % 50 == 0 else f"user {i % 97}" for i in range(ROWS)],
            "item": [i * i % 31 for i in range(ROWS)],
            "tags": [[f"t{j}" for j in range(i % 4)] for i in range(ROWS)],
            "when": [i * 389 % ROWS for i in range(ROWS)],
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw")
    table().write_parquet(path / "log.parquet")
    prepare_table(path / "log.parquet", path / "log", **COLUMNS, config=PrepareConfig(ids="raw"))
    return path


def hashed(values: list[object]) -> list[int]:
    return [0 if value is None else int(hash_strings([str(value)])) for value in values]


def test_ids_are_the_hashes_of_the_tokens_and_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, rows = Prepared(folder / "log"), table()
    data.verify()
    assert data.cardinalities == [2**40] * 3 and data.all.ids.dtype == torch.int64
    assert data.all.ids[:, 0].tolist() == hashed(rows["user"].to_list())
    assert data.all.ids[:, 1].tolist() == hashed(rows["item"].to_list())
    assert data.all.bags["tags"].values.tolist() == hashed([tag for tags in rows["tags"].to_list() for tag in tags])
    counts = Counter(hashed(rows["user"][: data.meta["split"]["train"][1]].to_list()))
    ids, times = data.raw_counts("user")
    assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == counts and (np.diff(ids) > 0).all()
    assert not (folder / "log" / "vocabulary").exists()
    with pytest.raises(ValueError, match="has raw ids, which raw_counts counts: frequencies needs a vocabulary"):
        data.frequencies("user")
    with pytest.raises(ValueError, match="has no vocabulary: its ids are raw"):
        data.vocabulary("user")
    monkeypatch.setattr("quorem.data.prepare.GROUP_ROWS", 64)
    small = prepare_table(folder / "log.parquet", folder / "small", **COLUMNS, config=PrepareConfig(ids="raw"))
    assert data_identity(small) == data_identity(data)


def test_rows_in_the_order_of_their_times(folder: Path) -> None:
    config = PrepareConfig(ids="raw")
    data = prepare_table(folder / "log.parquet", folder / "sorted", **COLUMNS, time="when", config=config)
    assert data.all.ids[:, 0].tolist() == hashed(table().sort("when")["user"].to_list())


@pytest.mark.parametrize("hot", [0, 10])
def test_a_run_scores_tokens_that_no_row_had(hot: int, folder: Path, tmp_path: Path) -> None:
    data, cold = Prepared(folder / "log"), GeneralizedQR(4, operation="add", num_rows=4 * 1024)
    scheme = HotCold(hot, cold=cold) if hot else cold
    plan = {"user": scheme, "item": cold, "tags": cold}
    train(RunConfig(data=data_identity(data), plan=plan, embedding_dim=4, lr=0.1), data, tmp_path / "run")
    scorer = quorem.load(tmp_path / "run")
    assert all(scorer.model.embeddings.raw_ids)
    if hot:
        ids, counts = data.raw_counts("user")
        mixed = quorem.hashing.mixed_ids(torch.from_numpy(ids.copy()), 2**40)
        is_hot = torch.isin(mixed, scorer.model.embeddings.ranks_of[0].hot).numpy()
        assert is_hot.sum() == hot and counts[is_hot].min() >= counts[~is_hot].max()
    start, stop = data.meta["split"]["test"]
    table()[start:stop].write_parquet(tmp_path / "test.parquet")
    predict(scorer, tmp_path / "test.parquet", tmp_path / "scores.parquet")
    scores = torch.from_numpy(pl.read_parquet(tmp_path / "scores.parquet")["probability"].to_numpy().copy())
    evaluation = Evaluation()
    evaluation.update(scores.logit(), data.split("test").labels.float())
    expected = dataclasses.asdict(scorer.evaluate(data))
    assert dataclasses.asdict(evaluation.compute()) == pytest.approx(expected, rel=1e-5)
    rows = {"price": [1.0] * 3, "user": ["never seen", "nor this", None], "item": ["x", "x", None], "tags": [[]] * 3}
    assert scorer(rows).shape == (3,) and scorer.encoder.unseen_counts["user"] == 0
    batch = scorer.encoder(rows)
    assert len(scorer.model.embeddings(*batch.jagged(data.names))[:, 0].unique(dim=0)) == 3


def test_schemes_for_a_vocabulary_are_refused(folder: Path, tmp_path: Path) -> None:
    data = Prepared(folder / "log")
    with pytest.raises(ValueError, match=r"scheme \(QR\(num_collisions=4\)\) would store .* raw ids of user: General"):
        train(RunConfig(data=data_identity(data)), data, tmp_path / "run")


def test_the_commands(folder: Path, tmp_path: Path) -> None:
    names = [str(folder / "log.parquet"), str(tmp_path / "log"), "--label", "click", "--categorical", "user,item"]
    done = CliRunner().invoke(app, ["prepare", "table", *names, "--ids", "raw"])
    assert done.exit_code == 0 and "in a space of 1,099,511,627,776 raw ids" in done.output, done.output
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "log"), "--verify"])
    assert done.exit_code == 0 and "every checksum is right" in done.output
    done = CliRunner().invoke(
        app, ["plan", str(tmp_path / "log"), "--budget", "1MB", "--out", str(tmp_path / "p.json")]
    )
    assert done.exit_code == 0 and (tmp_path / "p.json").is_file(), done.output


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match=r"vocabulary \('train'\) must be 'all' with ids='raw'"):
        PrepareConfig(ids="raw", vocabulary="train")


@pytest.mark.parametrize("size", [3, 40, 100])
def test_damaged_counts_are_named(size: int, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "log" / "counts" / "user.npy"
    shutil.copytree(folder / "log", tmp_path / "log")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"counts/user.npy is damaged or cut off \(\d+ bytes\)"):
        Prepared(tmp_path / "log").raw_counts("user")
