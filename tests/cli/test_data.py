"""``quorem prepare criteo | table`` and ``quorem synthesize``: what they write, print and refuse."""

import json

import pytest
from click_logs import assert_prepared, random_lines
from commands import invoke

from quorem.data.prepared import Prepared
from quorem.data.shape import scaled_cardinalities
from quorem.data.synthetic import ClickLog

LINES = random_lines(100)


@pytest.fixture
def raw(tmp_path):
    path = tmp_path / "raw.txt"
    path.write_text("".join(text + "\n" for text in LINES))
    return path


def test_prepare_criteo(raw, tmp_path):
    options = ["--ids", "frequency", "--vocabulary", "train", "--days", "4"]
    done = invoke("prepare", "criteo", raw, tmp_path / "out", *options)
    prepared = Prepared(tmp_path / "out")
    assert_prepared(prepared, LINES)
    assert prepared.meta.config.items() >= {"ids": "frequency", "vocabulary": "train", "days": 4}.items()
    assert "100 rows (train 75, validation 13, test 12)" in done.output
    lines = [line.split(",")[:2] for line in done.output.splitlines() if ": 100%, " in line]
    assert lines == [[f"{stage}: 100%", " 100 rows"] for stage in ("parse", "number", "write")]


def test_malformed_lines_are_shown(raw, tmp_path):
    raw.write_text(raw.read_text() + "a\tb\n")
    done = invoke("prepare", "criteo", raw, tmp_path / "out")
    assert "malformed lines left out: 1, the first: 101: 2 fields where 40 are expected" in done.output
    refused = invoke("prepare", "criteo", raw, tmp_path / "other", "--max-malformed", 0, code=1)
    assert "more than the 0 that may be left out (max_malformed=, --max-malformed): line 101" in refused.output


def test_prepare_table(tmp_path):
    (tmp_path / "t.csv").write_text("y;a;b;c;d\n1;2.5;-1;u;x y\n0;;4;v;z\n")
    options = ["--label", "y", "--transform", "log", "--transform", "a=none,b=none"]
    options += ["--separator", ";", "--multi-separator", " "]
    columns = ["--dense", "a,b", "--categorical", "c", "--categorical", "d", "--multi", "d"]
    invoke("prepare", "table", tmp_path / "t.csv", tmp_path / "out", *options, *columns)
    prepared = Prepared(tmp_path / "out")
    assert prepared.all.dense.tolist() == [[2.5, -1], [0, 4]]
    assert prepared.all.ids.tolist() == [[1], [2]]
    assert prepared.all.bags["d"].values.tolist() == [1, 2, 3]
    invoke("prepare", "table", tmp_path / "t.csv", tmp_path / "new", code=2)


def test_columns_that_are_not_named_are_taken_for_what_they_look_like(tmp_path):
    rows = "".join(f"{k % 2 > 0},{100 - k},{k},{k - 50}.5,u{k % 9},{'a|b' if k % 2 else 'c'}\n" for k in range(100))
    (tmp_path / "t.csv").write_text("y,when,row,x,user,tags\n" + rows)
    where = [tmp_path / "t.csv", tmp_path / "out"]
    done = invoke("prepare", "table", *where, "--label", "y", "--drop", "row,when", "--transform", "log")
    prepared = Prepared(tmp_path / "out")
    assert (prepared.dense_names, prepared.names, prepared.meta.columns.bags) == (["x"], ["user", "tags"], ("tags",))
    shown = [" ".join(line.split()) for line in done.output.splitlines()]
    expected = {"x numbers numbers with fractions", "user categories text"}
    expected.add("tags lists 50% of the texts have '|' in them")
    assert expected <= set(shown)
    assert prepared.meta.transforms == {"x": "log"}
    named = invoke("prepare", "table", *where, "--label", "y", "--categorical", "user", code=1)
    assert named.output.splitlines()[-1].startswith(f"quorem: {tmp_path / 'out'} exists")
    named = invoke("prepare", "table", *where, "--label", "y", "--categorical", "user", "--overwrite")
    assert Prepared(tmp_path / "out").names == ["user"]
    assert "left out, since no option names them (--infer takes them too): when, row, x, tags" in named.output
    used = invoke("prepare", "table", *where, "--label", "y", "--categorical", "user", "--drop", "user", code=1)
    assert "drop (user) must not name columns that are used" in used.output
    both = ["--categorical", "row", "--infer", "--time", "when", "--overwrite"]
    done = invoke("prepare", "table", *where, "--label", "y", *both)
    assert "split by when: the file is not in time order (99 rows are earlier than the row before them)" in done.output
    prepared = Prepared(tmp_path / "out")
    assert (prepared.dense_names, prepared.names) == (["x"], ["row", "user", "tags"])
    assert prepared.all.dense[0, 0] > 0 > prepared.all.dense[-1, 0]


def test_one_value_that_is_no_number_does_not_make_a_column_of_numbers_categories(tmp_path):
    rows = "".join(f"{k % 2},{'abc' if k == 999 else k},u{k % 9},{k if k % 50 else 'x'}\n" for k in range(1000))
    (tmp_path / "t.csv").write_text("y,price,user,mixed\n" + rows)
    done = invoke("prepare", "table", tmp_path / "t.csv", tmp_path / "out", "--label", "y")
    assert (Prepared(tmp_path / "out").dense_names, Prepared(tmp_path / "out").num_rows) == (["price"], 999)
    shown = " ".join(done.output.split())
    assert "whole numbers, except 1 of 1,000 values, such as 'abc': such lines are malformed" in shown
    assert "categories numbers, except 20 of 1,000 values, such as 'x'; if that is a missing number" in shown
    assert "malformed lines left out: 1, the first: 1001: price ('abc') must be a number" in shown


def test_data_that_cannot_be_trained_on_are_warned_of(tmp_path):
    (tmp_path / "t.csv").write_text("y,user\n0,a\n")
    done = invoke("prepare", "table", tmp_path / "t.csv", tmp_path / "out", "--label", "y")
    assert "warning: every label is 0" in done.output and "Next:" not in done.output
    assert "warning: no rows for validation and test" in done.output


def test_synthesize(tmp_path):
    done = invoke("synthesize", tmp_path / "out", "--rows", 3000, "--seed", 5, "--scale", 0.0001, "--click-rate", 0.1)
    log = ClickLog(cardinalities=scaled_cardinalities(0.0001), seed=5, click_rate=0.1)
    prepared = Prepared(tmp_path / "out")
    assert prepared.all.ids.tolist() == log.draw(0, 3000).batch.ids.tolist()
    best = json.loads((tmp_path / "out" / "meta.json").read_text())["bayes_log_loss"]["test"]
    assert f"best log loss of any model on the test rows: {best:.5f}" in done.output


@pytest.mark.parametrize("name", ["log.txt", "log.txt.gz", "log.parquet"])
def test_synthesize_makes_no_folder_with_the_name_of_a_file(name, tmp_path):
    done = invoke("synthesize", tmp_path / name, "--rows", 500, code=1)
    assert not (tmp_path / name).exists()
    assert f"{name}) must be a folder or a .csv file: --raw writes text of Criteo's form" in done.output


def test_inspect(raw, tmp_path):
    out = tmp_path / "out"
    invoke("prepare", "criteo", raw, out)
    done = invoke("inspect", out, "--verify")
    assert "every checksum is right" in done.output
    counts = Prepared(out).frequencies("C1")
    row = next(line.split() for line in done.output.splitlines() if line.startswith("C1 "))
    assert row == ["C1", f"{len(counts)}", f"{(counts > 0).sum()}", f"{100 * counts.max() / counts.sum():.1f}"]
    (out / "vocabulary" / "C7.txt").write_text("other")
    invoke("inspect", out)  # which does not read it
    assert "C7.txt differs from its checksum" in invoke("inspect", out, "--verify", code=1).output


def test_names_are_printed_as_they_are(tmp_path):
    rows = "".join(f"{i % 2},a{i % 3},b{i % 4}\n" for i in range(70))
    (tmp_path / "t.csv").write_text(f"click,[/b],[red] :fire:\n{rows}")
    out = tmp_path / "data [v2]"
    done = invoke("prepare", "table", tmp_path / "t.csv", out, "--label", "click")
    assert f"--data '{out}'" in done.output.replace("\n", "")
    shown = invoke("inspect", out)
    assert "[/b]" in shown.output and "[red] :fire:" in shown.output
