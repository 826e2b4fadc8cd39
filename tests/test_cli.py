"""The ``quorem`` command: small runs, its exit codes, and its message where the extra is missing."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import quorem
from quorem.cli import app


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(("option", "value"), [("--rows", "1"), ("--rows", "many"), ("--seed", "-1")])
def test_wrong_options_are_a_usage_error(option, value):
    done = CliRunner().invoke(app, ["demo", option, value])
    assert done.exit_code == 2
    assert option in done.output


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


def test_help_names_the_commands():
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    assert "demo" in done.output


def test_interrupt_exits_with_130_and_no_traceback():
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
    assert done.stderr == "quorem: the command needs typer and rich: pip install typer rich\n"


@pytest.mark.parametrize("command", ["['demo']", "['train', '--data', 'log', '--out', 'run']"])
def test_missing_safetensors_is_one_line(command):
    done = python(
        "import sys\nsys.modules['safetensors'] = None\n"
        f"from quorem.cli import main\nsys.argv = ['quorem', *{command}]\nmain()"
    )
    assert done.returncode == 1
    assert done.stderr == "quorem: checkpoints need safetensors: pip install safetensors\n"
