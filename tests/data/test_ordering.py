"""Rows are split by time, and sorted if the file has them in another order."""

import random

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import polars as pl
import torch

from quorem.data.config import PrepareConfig
from quorem.data.table import prepare_table


def timed(rows):
    return "click,when,user,tags\n" + "".join(f"{k % 2},{when},u{user},{tags}\n" for k, when, user, tags in rows)


@pytest.mark.parametrize("kind", ["number", "date", "datetime"])
def test_rows_are_split_by_time_and_sorted_if_they_are_not_in_order(tmp_path, monkeypatch, kind):
    """Against the same rows sorted beforehand, several groups of them."""
    monkeypatch.setattr("quorem.data.prepare.GROUP_ROWS", 7)
    rng = random.Random(0)
    days = {"number": "{:02}.5", "date": "2024-05-{:02}", "datetime": "2024-05-{:02}T10:00:00Z"}[kind]
    rows = [(k, rng.randrange(1, 25), rng.randrange(9), "|".join(rng.choices("abcdef", k=k % 4))) for k in range(60)]
    options = {"label": "click", "categorical": ["user", "tags"], "multi": ["tags"], "time": "when"}
    results = []
    for name, given in (("sorted", sorted(rows, key=lambda row: row[1])), ("given", rows)):
        text = timed([(k, days.format(when), user, tags) for k, when, user, tags in given])
        (tmp_path / f"{name}.csv").write_text(text)
        config = PrepareConfig(ids="frequency", vocabulary="train", days=4)
        results.append(prepare_table(tmp_path / f"{name}.csv", tmp_path / name, **options, config=config))
    whole, in_groups = results
    whole.verify()
    in_groups.verify()
    assert (whole.meta["time"]["steps_back"], in_groups.meta["time"]["steps_back"] > 10) == (0, True)
    for part in ("labels", "dense", "ids"):
        assert torch.equal(getattr(whole.all, part), getattr(in_groups.all, part)), part
    assert torch.equal(whole.all.bags["tags"].values, in_groups.all.bags["tags"].values)
    assert torch.equal(whole.all.bags["tags"].offsets, in_groups.all.bags["tags"].offsets)
    assert (whole.meta["split"], whole.cardinalities) == (in_groups.meta["split"], in_groups.cardinalities)
    for name in whole.names:
        assert whole.vocabulary(name) == in_groups.vocabulary(name)
        assert whole.frequencies(name).tolist() == in_groups.frequencies(name).tolist()
    times = sorted(row[1] for row in rows)
    for _, stop in list(whole.meta["split"].values())[:2]:
        assert times[stop - 1] < times[stop]  # no time is in two splits


def test_times_of_a_parquet_file(tmp_path):
    when = pl.Series([3, 1, None, 2], dtype=pl.Int64).cast(pl.Datetime("ms"))
    pl.DataFrame({"y": [0, 1, 0, 1], "c": ["a", "b", "c", "d"], "when": when}).write_parquet(tmp_path / "t.parquet")
    result = prepare_table(tmp_path / "t.parquet", tmp_path / "out", label="y", categorical=["c"], time="when")
    assert result.vocabulary("c") == [None, "b", "d", "a"]
    assert result.meta["malformed"]["first"] == [[3, "when is missing"]]


def test_a_single_time_is_split_by_rows(tmp_path):
    (tmp_path / "t.csv").write_text(timed([(k, 5, k, "") for k in range(8)]))
    options = {"label": "click", "categorical": ["user"], "time": "when", "config": PrepareConfig(days=2)}
    result = prepare_table(tmp_path / "t.csv", tmp_path / "out", **options)
    assert result.meta["split"] == {"train": [0, 4], "validation": [4, 6], "test": [6, 8]}
