"""``quorem plan``, and ``quorem train --plan``."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quorem import QR, Full, Plan
from quorem.cli import app
from quorem.data.batches import Prepared
from quorem.training.config import RunConfig
from quorem.training.model import build_model


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "log"
    done = CliRunner().invoke(app, ["synthesize", str(path), "--rows", "3000", "--scale", "0.0001"])
    assert done.exit_code == 0, done.output
    return path


def invoke(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_a_plan_for_data_is_printed_saved_and_trained(log: Path, tmp_path: Path) -> None:
    file, run = tmp_path / "plan.json", tmp_path / "run"
    code, output = invoke("plan", log, "--budget", "60kB", "--out", file, "--dim", 4, "--optimizer", "amsgrad")
    assert code == 1 and "budget ('60kB') must be at least" in output  # AMSGrad remembers its steps
    code, output = invoke("plan", log, "--budget", "30kB", "--out", file, "--dim", 4)
    assert code == 0 and output.splitlines()[0].split()[:3] == ["table", "ids", "D"] and "of 30 kB" in output
    planned = Plan.from_json(file.read_text())
    assert list(planned) == Prepared(log).names and planned.bytes <= 30_000 and planned.optimizer == "adagrad"
    assert {type(scheme) for scheme in planned.values()} > {Full, QR}
    code, output = invoke("plan", log, "--budget", "30kB", "--out", file, "--dim", 4)
    assert code == 1 and f"{file} exists: --overwrite replaces it" in output
    code, output = invoke("train", "--data", log, "--plan", file, "--out", run, "--dim", 4, "--device", "cpu")
    assert code == 0, output
    assert f"plan of {len(planned)} tables" in output
    config = RunConfig.from_json((run / "run.json").read_text())
    assert dict(config.plan) == dict(planned)
    model = build_model(config, Prepared(log), "meta")
    assert 4 * model.embeddings.num_parameters == sum(table.bytes for table in planned.tables)


def test_serving_leaves_out_the_state(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert invoke("plan", log, "--budget", "30kB", "--serving", "--dim", 4, "--out", file)[0] == 0
    planned = Plan.from_json(file.read_text())
    assert planned.state_bytes == 0 and 25_000 < planned.bytes <= 30_000


@pytest.mark.parametrize(
    "form", ["model = nn.Embedding(10**9, 64)", "def model():\n    return nn.Embedding(10**9, 64)"]
)
def test_a_plan_for_a_model(form: str, tmp_path: Path) -> None:
    """Of 256 GB, which are never allocated."""
    file = tmp_path / "mine.py"
    file.write_text(f"from torch import nn\n{form}\n")
    code, output = invoke("plan", file, "--budget", "1GB")
    assert code == 0 and "QR(num_collisions=" in output and "1,000,000,000" in output


def test_refusals(log: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n")
    assert invoke("plan", empty, "--budget", "1MB") == (
        1,
        f"quorem: {empty} must define model, an nn.Module or a function that returns one\n",
    )
    code, output = invoke("plan", tmp_path / "none.py", "--budget", "1MB")
    assert code == 1 and "none.py is not a file" in output
    code, output = invoke("plan", log, "--budget", "much")
    assert code == 1 and "budget ('much') must be a number with B, kB, MB" in output
    train = ("train", "--data", log, "--out", tmp_path / "run", "--device", "cpu")
    first = Prepared(log).names[0]
    code, output = invoke(*train, "--plan", json.dumps({first: {"scheme": "Full"}}))
    assert code == 1 and "plan must name every feature of the data" in output
    names = {name: {"scheme": "Full"} for name in [*Prepared(log).names, "other"]}
    code, output = invoke(*train, "--plan", json.dumps(names))
    assert code == 1 and "plan names other, which the data do not have" in output
    code, output = invoke(*train, "--plan", '{"C1": 3}')
    assert code == 1 and "must be what quorem plan wrote, or JSON of names and schemes" in output
    del names["other"]
    code, output = invoke(*train, "--plan", json.dumps(names), "--scheme", "hash")
    assert code == 1 and "must be left at QR(num_collisions=4) and 0 where plan says" in output
    file = tmp_path / "plan.json"
    assert invoke("plan", log, "--budget", "1MB", "--out", file)[0] == 0
    code, output = invoke(*train, "--plan", file, "--dim", 8)
    assert code == 1 and "of width 16 for" in output and "of width 8" in output
