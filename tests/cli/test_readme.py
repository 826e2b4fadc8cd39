"""The four commands of README.md, as they stand there, on the made-up file that it names."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import polars as pl
from typer.testing import CliRunner

from quorem.cli import app

README = Path(__file__).parents[2] / "README.md"
ROWS = 2000


def test_the_four_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = README.read_text(encoding="utf-8").split("## Four commands")[1]
    commands = re.search(r"```sh\n(.*?)```", section, re.DOTALL)[1].splitlines()
    assert [command.split()[1] for command in commands] == ["prepare", "train", "predict", "export"]
    made_up = re.search(r"`(quorem synthesize clicks.csv --rows) 20000`", section)[1]
    monkeypatch.chdir(tmp_path)
    for command in (f"{made_up} {ROWS}", *commands):
        done = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])
        assert done.exit_code == 0, f"{command}\n{done.output}"
    assert (tmp_path / "model.json").exists()
    scores = pl.read_csv(tmp_path / "scores.csv")["probability"]
    assert len(scores) == ROWS and scores.is_between(0, 1).all() and (tmp_path / "model.onnx").exists()
