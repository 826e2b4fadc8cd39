"""A finished run that scores raw rows, and files of them: the same probabilities whichever way they come in."""

import dataclasses
import gzip
import math
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import numpy as np
import onnxruntime
import polars as pl
import torch
from click_logs import random_lines
from commands import invoke
from runs_of_training import small_run
from runs_to_serve import COLUMNS, ROWS, table

import quorem
from quorem.data.batches import Batch
from quorem.data.config import PrepareConfig
from quorem.data.criteo import prepare_criteo
from quorem.data.prepared import Prepared
from quorem.data.table import prepare_table
from quorem.serving.predict import predict
from quorem.serving.scorer import Scorer
from quorem.training.config import RunConfig
from quorem.training.loop import Options, train
from quorem.training.model import data_identity


def oracle(folder: Path) -> torch.Tensor:
    """The probability of every row of the prepared data, straight from the model."""
    data, model = Prepared(folder / "log"), quorem.load(folder / "run" / "model.safetensors")
    with torch.no_grad():
        return model(data.all.dense, *data.all.jagged(data.names)).sigmoid()


def read(scores: Path) -> pl.DataFrame:
    """The file of scores that ``predict`` wrote."""
    return pl.read_parquet(scores) if scores.suffix == ".parquet" else pl.read_csv(scores)


def test_raw_rows_score_as_prepared_rows(folder: Path) -> None:
    scorer = quorem.load(folder / "run")
    assert isinstance(scorer, Scorer)
    rows = table().to_dict(as_series=False)
    torch.testing.assert_close(scorer(rows), oracle(folder))
    one = {name: values[3:4] for name, values in rows.items()}
    torch.testing.assert_close(scorer(one), oracle(folder)[3:4])


class Pandas:
    """What a pandas frame offers where pyarrow is missing."""

    def __init__(self, columns: dict[str, list[object]]) -> None:
        self.columns = columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __getitem__(self, name: str) -> np.ndarray:
        return np.array([math.nan if value is None else value for value in self.columns[name]], object)

    def __arrow_c_stream__(self, schema: object = None) -> object:
        raise ImportError("pyarrow is missing")


@pytest.mark.parametrize("reader", ["polars", "text", "pandas"])
def test_a_frame_straight_from_a_csv_file(reader: str, folder: Path, tmp_path: Path) -> None:
    table().with_columns(pl.col("tags").list.join("|")).write_csv(tmp_path / "rows.csv")
    rows = pl.read_csv(tmp_path / "rows.csv", infer_schema=reader != "text")
    scorer = quorem.load(folder / "run")
    scores = scorer(Pandas(rows.to_dict(as_series=False)) if reader == "pandas" else rows)
    torch.testing.assert_close(scores, oracle(folder))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_labelled_file_has_metrics_and_unseen_values(kind: str, folder: Path, tmp_path: Path) -> None:
    data, scorer = Prepared(folder / "log"), Scorer(folder / "run", unknown="missing")
    start, stop = data.meta.split["test"]
    rows = table()[start:stop].with_columns(pl.col("tags").list.join("|"))
    file = tmp_path / f"rows.{kind}"
    rows.write_csv(file) if kind == "csv" else rows.write_parquet(file)
    done = predict(scorer, file, tmp_path / "scores.csv", label="click")
    assert done.metrics is not None and done.unseen == {}
    expected = dataclasses.asdict(scorer.evaluate(data))
    assert dataclasses.asdict(done.metrics) == pytest.approx(expected, rel=1e-6)
    rows.with_columns(user=pl.lit("nobody")).write_csv(tmp_path / "new.csv")
    options = ("--out", tmp_path / "scores.csv", "--unknown", "missing", "--label", "click")
    shown = invoke("predict", folder / "run", tmp_path / "new.csv", *options)
    assert f"user: {stop - start} values not in the training rows" in shown.output
    assert "log loss" in shown.output and "AUC" in shown.output
    with pytest.raises(ValueError, match="has no column clock"):
        predict(scorer, file, tmp_path / "scores.csv", label="clock")


def test_values_that_only_later_rows_have_are_counted(folder: Path, tmp_path: Path) -> None:
    """By ``evaluate`` from the prepared data, and by ``predict`` from the file, whatever becomes of them."""
    rows = table().with_columns(user=pl.when(pl.int_range(pl.len()) >= 650).then(pl.lit("late")).otherwise("user"))
    rows.write_parquet(tmp_path / "log.parquet")
    for vocabulary in ("all", "train"):
        config = PrepareConfig(vocabulary=vocabulary)
        data = prepare_table(tmp_path / "log.parquet", tmp_path / f"log-{vocabulary}", **COLUMNS, config=config)
        start, stop = data.meta.split["test"]
        assert data.unseen("test") == {"user": stop - max(start, 650)}
        run = tmp_path / vocabulary
        train(RunConfig(data=data_identity(data), scheme=quorem.QR(4), embedding_dim=4), data, run)
        done = predict(Scorer(run), tmp_path / "log.parquet", tmp_path / "scores.csv")
        assert done.unseen == {"user": 50}
    shown = invoke("evaluate", run, "--split", "test")
    assert f"user: {stop - max(start, 650)} values not in the training rows" in shown.output, shown.output


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
@pytest.mark.parametrize("out", ["scores.csv", "scores.parquet"])
def test_files(kind: str, out: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorem.data.source.PARQUET_ROWS", 64)  # of a block
    file = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        table().write_parquet(file)
    else:
        text = table().with_columns(pl.col("tags").list.join("|")).write_csv()
        file.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    calls: list[tuple[str, float, int]] = []
    done = predict(Scorer(folder / "run"), file, tmp_path / out, progress=lambda *call: calls.append(call))
    assert (done.rows, done.malformed, done.unseen) == (ROWS, 0, {}) and calls[-1] == ("score", 1.0, ROWS)
    scores = read(tmp_path / out)
    unit, first = ("row", 1) if kind == "parquet" else ("line", 2)  # a CSV file's first line names its columns
    assert scores.columns == [unit, "probability"]
    assert scores[unit].to_list() == list(range(first, first + ROWS))
    torch.testing.assert_close(scores["probability"].to_torch().float(), oracle(folder))


@pytest.mark.parametrize("name", ["scores.csv", "scores.parquet"])
def test_ctrl_c_ends_with_one_line_and_keeps_the_file_from_before(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quorem.serving.predict.BLOCK_BYTES", 2000)
    logits, calls = Scorer.logits_of_rows, []

    def interrupted(scorer: Scorer, batch: Batch) -> torch.Tensor:
        calls.append(len(batch))
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return logits(scorer, batch)

    monkeypatch.setattr(Scorer, "logits_of_rows", interrupted)
    table().drop("tags").with_columns(tags=pl.lit("t1")).write_csv(tmp_path / "rows.csv")
    command = ["predict", folder / "run", tmp_path / "rows.csv", "--out", tmp_path / name]
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        for before, told in ((None, "nothing was written"), (b"before", "the file from before is kept")):
            calls.clear()
            if before is not None:
                (tmp_path / name).write_bytes(before)
            done = invoke(*command, code=130)
            assert len(calls) == 3
            assert done.stderr == f"quorem: interrupted; {tmp_path / name}: {told}\n"
            assert "Traceback" not in capfd.readouterr().err
            assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv", *([name] if before else [])]
            assert before is None or (tmp_path / name).read_bytes() == before
    finally:
        signal.signal(signal.SIGINT, handler)


def test_values_and_lines_that_cannot_be_scored(folder: Path, tmp_path: Path) -> None:
    lines = ["price,user,item,tags", "1,user 3,4,t1|t2", "2,nobody,4,", "inf,user 3,4,", "3,user 3,4", "x,user 3,4,"]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    before = set(tmp_path.iterdir())
    for out in ("scores.csv", "scores.parquet"):
        with pytest.raises(ValueError, match=r"rows.csv has 1 malformed line so far, more than the 0 that"):
            predict(Scorer(folder / "run"), tmp_path / "rows.csv", tmp_path / out)
        with pytest.raises(ValueError, match=r"user \('nobody'\) is not in the vocabulary"):
            predict(Scorer(folder / "run"), tmp_path / "rows.csv", tmp_path / out, max_malformed=3)
    assert set(tmp_path.iterdir()) == before
    scorer = Scorer(folder / "run", unknown="missing")
    done = predict(scorer, tmp_path / "rows.csv", tmp_path / "scores.csv", max_malformed=3)
    assert (done.rows, done.malformed, done.unseen) == (3, 2, {"user": 1})
    assert pl.read_csv(tmp_path / "scores.csv")["line"].to_list() == [2, 3, 4]


@pytest.mark.parametrize("policy", ["rest", "hash"])
def test_unknown_values_follow_the_tables(policy: str, folder: Path, tmp_path: Path) -> None:
    """In the tables that can: those of users, and of tags; items stay full."""
    data, cold = Prepared(folder / "log"), quorem.QR(4, operation="add")
    hot = quorem.HotCold(2, cold=cold, num_rest=1, force=True)
    plan = {"user": hot, "tags": hot, "item": quorem.Full()}
    config = RunConfig(data=data_identity(data), plan=plan, embedding_dim=4, unknown=policy)
    train(config, data, tmp_path / "run")
    scorer = quorem.load(tmp_path / "run")
    assert scorer.model.embeddings.unknown == (policy, "error", policy)
    rows = {"price": [1.0] * 3, "user": ["user 3", "nobody", "no one"], "item": [4] * 3, "tags": [["t1", "t9"]] * 3}
    scores = scorer(rows)
    assert (scores[1] == scores[2]) == (policy == "rest") and scores[0] != scores[1]
    assert scorer.encoder.unseen_counts == {"user": 2, "item": 0, "tags": 3}
    batch = scorer.encoder(rows)
    wide = [-1, -1] if policy == "rest" else (-1 - (quorem.hash_strings(["nobody", "no one"]) & (2**31 - 1))).tolist()
    assert batch.ids[1:, 0].tolist() == wide
    with pytest.raises(ValueError, match=r"item \('77'\) is not in the vocabulary"):
        scorer({**rows, "item": [4, 4, 77]})


def test_files_of_criteos_form(tmp_path: Path) -> None:
    """With labels and without."""
    lines = random_lines(140)
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    data = prepare_criteo(tmp_path / "train.txt", tmp_path / "log", PrepareConfig(days=2))
    train(small_run(data), data, tmp_path / "run")
    model = quorem.load(tmp_path / "run" / "model.safetensors")
    expected = model(data.all.dense, data.all.ids).sigmoid().detach()
    for rows in (lines, [line.split("\t", 1)[1] for line in lines]):
        (tmp_path / "rows.txt").write_text("\n".join(rows) + "\n")
        predict(Scorer(tmp_path / "run"), tmp_path / "rows.txt", tmp_path / "scores.csv")
        torch.testing.assert_close(read(tmp_path / "scores.csv")["probability"].to_torch().float(), expected)


def test_made_up_data_and_half_precision(log: Prepared, tmp_path: Path) -> None:
    result = train(small_run(log, precision="bfloat16"), log, tmp_path / "run")
    scorer = quorem.load(tmp_path / "run")
    assert dataclasses.asdict(scorer.evaluate(log)) == pytest.approx(result["test"], rel=1e-6)
    quorem.quantize_(scorer.model, 8)
    assert scorer.model.embeddings.bits == 8
    assert scorer.evaluate(log).log_loss == pytest.approx(result["test"]["log_loss"], abs=1e-3)


def test_runs_that_cannot_score(log: Prepared, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing is not the folder of a run: run.json is missing"):
        Scorer(tmp_path / "nothing")
    train(small_run(log), log, tmp_path / "run", options=Options(keep_model=False))
    with pytest.raises(FileNotFoundError, match=r"run has no model.safetensors: the run did not keep its model"):
        quorem.load(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"run has no result.json: the run is not finished"):
        quorem.load(tmp_path / "run")
    with pytest.raises(ValueError, match=r"unknown \('missing'\) must be 'error' for a file: only a run has a"):
        quorem.load(folder / "run" / "model.safetensors", unknown="missing")
    with pytest.raises(ValueError, match=r"log \([0-9a-f]+\) must be the data that .*run was trained on"):
        Scorer(folder / "run").evaluate(log)
    with pytest.raises(ValueError, match=r"unknown \('rest'\) must be one of 'error', 'missing'"):
        quorem.load(folder / "run", unknown="rest")
    (tmp_path / "run" / "result.json").touch()
    shutil.copy(folder / "run" / "model.safetensors", tmp_path / "run")
    shutil.copy(folder / "run" / "encoding.safetensors", tmp_path / "run")
    with pytest.raises(ValueError, match=r"encoding.safetensors is of other data \([0-9a-f]+\) than the run"):
        quorem.load(tmp_path / "run")
    for text, reason in (("[]", r"it \(\[\]\) must be an object"), ('{"data": 3}', r"data \(3\) must be a str")):
        (tmp_path / "run" / "run.json").write_text(text)
        with pytest.raises(ValueError, match=f"run.json is damaged: {reason}"):
            quorem.load(tmp_path / "run")


def test_commands(folder: Path, tmp_path: Path) -> None:
    loss = f"{Scorer(folder / 'run').evaluate(Prepared(folder / 'log')).log_loss:.5f}"
    assert loss in invoke("evaluate", folder / "run").output
    invoke("evaluate", folder / "run", "--data", folder / "log", "--split", "validation", "--bits", "4")
    table().write_parquet(tmp_path / "rows.parquet")
    files = tmp_path / "rows.parquet", "--out", tmp_path / "scores.csv"
    assert f"{ROWS} rows, " in invoke("predict", folder / "run", *files, "--bits", "8").output
    assert len(pl.read_csv(tmp_path / "scores.csv")) == ROWS
    done = invoke("export", folder / "run", "--out", tmp_path / "model.onnx")
    assert "DLRM, onnx" in done.output and "bags given by offsets" in done.output
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert [put.name for put in session.get_inputs()] == ["dense", "ids", "offsets"]  # the run has lists
    assert "is not the folder of a run" in invoke("predict", tmp_path, *files, code=1).output


def test_the_file_that_is_scored_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    table().write_parquet(tmp_path / "rows.parquet")
    before = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "rows.parquet")
    for out in ("rows.parquet", "link"):
        with pytest.raises(ValueError, match=r"out \(.*\) must be another file than the one that is scored"):
            predict(quorem.load(folder / "run"), tmp_path / "rows.parquet", tmp_path / out)
    with pytest.raises(ValueError, match="is a folder and must be a file"):
        predict(quorem.load(folder / "run"), tmp_path / "rows.parquet", tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist: make it first"):
        predict(quorem.load(folder / "run"), tmp_path / "rows.parquet", tmp_path / "nowhere" / "scores.csv")
    assert (tmp_path / "rows.parquet").read_bytes() == before


def test_a_run_knows_the_separators_of_its_file(tmp_path: Path) -> None:
    """Given other ones, lists would be taken for values that no training row had."""
    text = table().with_columns(pl.col("tags").list.join(" "))
    text.write_csv(tmp_path / "log.csv", separator=";")
    arguments = ("prepare", "table", tmp_path / "log.csv", tmp_path / "log", "--label", "click")
    names = ("--dense", "price", "--categorical", "user,item,tags", "--multi", "tags", "--multi-separator", " ")
    assert "fields are separated by ';'" in invoke(*arguments, *names, "--vocabulary", "train").output
    data = Prepared(tmp_path / "log")
    train(small_run(data, scheme=quorem.QR(4), threshold=20), data, tmp_path / "run")
    predict(quorem.load(tmp_path / "run"), tmp_path / "log.csv", tmp_path / "scores.parquet")
    torch.testing.assert_close(read(tmp_path / "scores.parquet")["probability"].to_torch(), oracle(tmp_path))
    text.write_csv(tmp_path / "tabs.csv", separator="\t")
    predict(quorem.load(tmp_path / "run"), tmp_path / "tabs.csv", tmp_path / "tabs.parquet")
    assert read(tmp_path / "tabs.parquet").equals(read(tmp_path / "scores.parquet"))


def test_without_polars_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = quorem.load(folder / "run")
    for name in [name for name in sys.modules if name.split(".")[0] == "polars" or name == "quorem.data.encoder"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ModuleNotFoundError, match=r'scoring raw rows needs polars: pip install "quorem\[data\]"'):
        scorer({"user": ["a"]})
