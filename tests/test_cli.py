"""The ``quorem`` command: small runs, its exit codes, and its message where the extra is missing."""

import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import quorem
from quorem.cli import app
from quorem.experiments import demo


@pytest.fixture
def small(monkeypatch):
    for name, value in {"SAMPLE": 2000, "LOOKUP": 100, "REPEATS": 1, "LEARNED_IDS": 1000, "STEPS": 30}.items():
        monkeypatch.setattr(demo, name, value)


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_demo_shows_every_scheme(small):
    threads = torch.get_num_threads()
    done = CliRunner().invoke(app, ["demo", "--rows", "10000", "--dim", "8"], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    for name, scheme in demo.SCHEMES.items():
        row = next(line for line in done.output.splitlines() if name in line)
        assert " + ".join(f"{rows:,}" for rows, _ in scheme.spec(10_000, 8).shapes) in row
    for name in demo.LEARNERS:
        assert f" {name} " in done.output
    assert torch.get_num_threads() == threads


def test_demo_finds_a_vector_for_each_id_but_where_ids_are_hashed(small):
    for measured in demo.measure(2000, 8, seed=0):
        expected = 500 if measured.name == "Hash(4)" else 2000
        assert (measured.name, measured.distinct) == (measured.name, expected)


def test_demo_learners_store_as_much_as_hashing_and_mult_learns_more(monkeypatch):
    monkeypatch.setattr(demo, "BATCH", 1024)
    monkeypatch.setattr(demo, "STEPS", 150)
    learned = {entry.name: entry for entry in demo.learn(2000, 8, seed=0)}
    hashed, product = learned["Hash(16)"], learned["QR(16, operation='mult')"]
    assert product.parameters - hashed.parameters == 16 * 8  # the quotient's rows
    assert learned["Full()"].error < product.error < hashed.error < 1


@pytest.mark.parametrize(("option", "value"), [("--rows", "1"), ("--rows", "many"), ("--dim", "0")])
def test_wrong_options_are_a_usage_error(option, value):
    done = CliRunner().invoke(app, ["demo", option, value])
    assert done.exit_code == 2
    assert option in done.output


def test_help_names_the_commands():
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    assert "demo" in done.output


def test_interrupt_exits_with_130_and_no_traceback():
    done = python(
        "import os, signal, sys\n"
        "from quorem import cli\n"
        "from quorem.experiments import demo\n"
        "demo.measure = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
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


def test_names_the_demo_prints_are_the_schemes_they_build():
    for name, scheme in {**demo.SCHEMES, **demo.LEARNERS}.items():
        assert eval(name, vars(quorem)) == scheme
