"""The ``quorem`` command: small runs, its exit codes, and its message where the extra is missing."""

import os
import shlex
import signal
import subprocess
import sys

import click
import pytest
import typer
from typer.testing import CliRunner

import quorem
from quorem.cli import app


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_version():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"quorem {quorem.__version__}\n")


COMMANDS = [["demo"], ["train", "--data", "log", "--out", "run"], ["reproduce", "figure4"], ["bench"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_device_that_is_not_here_is_a_usage_error(command, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for device, match in {"cuda": "must be 'cpu' here: there is no GPU", "tpu": "must be cpu or cuda"}.items():
        done = CliRunner().invoke(app, [*command, "--device", device], env={"COLUMNS": "200"})
        assert done.exit_code == 2
        assert f"device ('{device}') {match}" in done.output


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
    done = CliRunner().invoke(app, [*page.split()[1:], "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
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


def test_interrupt_exits_with_130_and_no_traceback():
    pytest.importorskip("matplotlib", reason='the demo needs matplotlib: pip install "quorem[report]"')
    done = python(
        "import os, signal, sys\n"
        "from quorem import cli\n"
        "from quorem.experiments import demo\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background ignores it
        "demo.make_log = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['quorem', 'demo']\n"
        "cli.main()\n"
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stdout + done.stderr


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
