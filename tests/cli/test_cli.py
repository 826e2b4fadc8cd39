"""The ``quorem`` command: its exit codes, its message where the extra is missing, and README.md's commands."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer
from commands import invoke

from quorem.cli import app

README = Path(__file__).parents[2] / "README.md"


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


COMMANDS = [["demo"], ["train", "--data", "log", "--out", "run"], ["reproduce", "figure4"], ["bench"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_device_that_is_not_here_is_a_usage_error(command, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for device, match in {"cuda": "must be 'cpu' here: there is no GPU", "tpu": "must be cpu or cuda"}.items():
        assert f"device ('{device}') {match}" in invoke(*command, "--device", device, code=2).output


def pages() -> dict[str, click.Command]:
    """Every command and group of commands, by what is typed to call it."""
    found = {"quorem": typer.main.get_command(app)}
    for words in list(found):
        for name, command in found[words].commands.items():
            found[f"{words} {name}"] = command
            for inner, inner_command in getattr(command, "commands", {}).items():
                found[f"{words} {name} {inner}"] = inner_command
    return found


@pytest.mark.parametrize("page", [page for page in pages() if page != "quorem"])
def test_every_help_page_ends_with_an_example_that_parses(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke(*page.split()[1:], "--help")
    example = pages()[page].epilog.removeprefix("Example: ")
    assert example.startswith(page) and done.output.rstrip().endswith(f"Example: {example}")
    for word in shlex.split(example):  # files and folders that the command looks for
        if "/" in word:
            (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / word).touch()
    words = shlex.split(example)[1:]
    command = typer.main.get_command(app)
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    command.make_context(page, words)  # raises a usage error if it does not parse


def test_help_is_quick_because_it_loads_nothing_heavy():
    done = python(
        "import sys\nsys.argv = ['quorem', '--help']\nfrom quorem.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'numpy', 'numba', 'polars', 'matplotlib'} & set(sys.modules)))"
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_missing_extra_is_one_line(package):
    done = python(f"import sys\nsys.modules[{package!r}] = None\nfrom quorem.cli import main\nmain()")
    assert done.returncode == 1
    assert done.stderr == 'quorem: the command needs typer and rich: pip install "quorem[cli]"\n'


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_for_a_reader_that_has_left_ends_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "quorem", *arguments], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode == -signal.SIGPIPE and not done.stderr


def test_the_four_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of README.md, as they stand there, on the made-up file that it names."""
    pl = pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')
    section = README.read_text(encoding="utf-8").split("## Four commands")[1]
    commands = re.search(r"```sh\n(.*?)```", section, re.DOTALL)[1].splitlines()
    assert [command.split()[1] for command in commands] == ["prepare", "train", "predict", "export"]
    made_up = re.search(r"`(quorem synthesize clicks.csv --rows) 20000`", section)[1]
    monkeypatch.chdir(tmp_path)
    for command in (f"{made_up} {2000}", *commands):
        invoke(*shlex.split(command, comments=True)[1:])
    assert (tmp_path / "model.json").exists()
    scores = pl.read_csv(tmp_path / "scores.csv")["probability"]
    assert len(scores) == 2000 and scores.is_between(0, 1).all() and (tmp_path / "model.onnx").exists()
