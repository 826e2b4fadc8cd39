"""The demo: small, on data of its own and on prepared data."""

import base64
import re

import pytest
import torch
from typer.testing import CliRunner

from quorem.cli import app
from quorem.collection import EmbeddingCollection
from quorem.data.batches import Prepared
from quorem.experiments import demo
from quorem.training.tables import tables_of


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(demo, "SCALE", 0.00002)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:.*tables stay full")
def test_demo_prints_a_table_and_writes_a_page(tmp_path):
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["demo", "--out", str(out), "--rows", "3000"], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    cardinalities = demo.scaled_cardinalities(0.00002)
    page = (out / "index.html").read_text()
    for name, scheme in demo.SCHEMES.items():
        parameters = f"{EmbeddingCollection(tables_of(cardinalities, scheme), device='meta').num_parameters:,}"
        assert re.search(rf"{name} +{parameters} ", done.output)
        assert f"<td>{name}</td><td>{parameters}</td>" in page
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert [base64.b64decode(image)[:4] for image in images] == [b"\x89PNG"] * 2
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "The hidden model that drew the clicks has a log loss of" in page


def test_demo_on_prepared_data(tmp_path):
    demo.make_log(tmp_path / "log", seed=3, num_rows=4000)
    done = CliRunner().invoke(
        app, ["demo", "--data", str(tmp_path / "log"), "--out", str(tmp_path / "out"), "--rows", "1280"]
    )
    assert done.exit_code == 0, done.output
    assert "one epoch over 1,280 rows" in done.output


def test_curves_reach_from_the_first_rows_to_the_last(tmp_path):
    prepared = demo.make_log(tmp_path / "log", seed=0, num_rows=3000)
    entries = demo.train_all(demo.configs_of(prepared, seed=0), prepared, tmp_path)
    steps = -(-len(prepared.split("train")) // 128)
    for entry in entries:
        assert 2 <= len(entry.curve) <= demo.POINTS + 1
        assert entry.curve[-1] == (steps * 128, entry.result["validation"]["log_loss"])


def test_data_that_are_not_there_are_one_line(tmp_path):
    done = CliRunner().invoke(app, ["demo", "--data", str(tmp_path / "absent"), "--out", str(tmp_path / "out")])
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "is not a folder of prepared data" in done.stderr


def test_the_made_up_log_is_of_criteos_shape(tmp_path):
    prepared = demo.make_log(tmp_path / "log", seed=0, num_rows=1000)
    assert (len(prepared.names), len(prepared.dense_names)) == (26, 13)
    assert isinstance(prepared, Prepared) and prepared.meta["true_log_loss"]["test"] > 0
