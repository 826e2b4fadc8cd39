"""Two processes that torchrun starts: the losses of one process, and what a killed or interrupted one leaves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs_of_training import lines, small_log

from quorem.training.run import read_result

OPTIONS = "--dim 4 --batch-size 101 --validate-every 3 --lr 0.005 --device cpu --checkpoint-seconds 0"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def start(data: Path, out: Path, *options: str, processes: int = 1) -> subprocess.Popen[str]:
    launcher = TORCHRUN if processes == 2 else ()
    command = ("-m", "quorem", "train", "--data", str(data), "--out", str(out))
    return launch(*launcher, *command, *OPTIONS.split(), *options)


def launch(*command: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *command], env=environment, **pipes)


def finish(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    return text


def validations(out: Path) -> list[float]:
    return [line["validation"]["log_loss"] for line in lines(out) if "validation" in line]


@pytest.mark.parametrize("optimizer", ["adagrad", "amsgrad"])
def test_two_processes_train_as_one(tmp_path: Path, optimizer: str) -> None:
    log = small_log(tmp_path / "log", 1500)  # 13 steps, whose shares are uneven
    finish(start(log.path, tmp_path / "one", "--optimizer", optimizer))
    text = finish(start(log.path, tmp_path / "two", "--optimizer", optimizer, processes=2))
    assert text.count("data      ") == 1, "only the first process prints"
    assert "terminate called" not in text and "Traceback" not in text
    expected, result = (read_result(tmp_path / name / "result.json") for name in ("one", "two"))
    assert result["steps"] == expected["steps"] == 13
    assert validations(tmp_path / "two") == pytest.approx(validations(tmp_path / "one"), rel=1e-5)
    assert result["test"]["log_loss"] == pytest.approx(expected["test"]["log_loss"], rel=1e-5)
    text = finish(start(log.path, tmp_path / "two", "--optimizer", optimizer, processes=2))
    assert text.count("is finished: nothing is trained again") == 1


THREADS = """
import sys
from pathlib import Path
from quorem.data.prepared import Prepared
from quorem.training.config import RunConfig
from quorem.training.loop import train
from quorem.training.model import data_identity
from quorem.training.processes import process_group
log = Prepared(sys.argv[1])
with process_group("cpu"):
    train(RunConfig(data=data_identity(log), embedding_dim=4), log)
print("threads", *(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds threads in Linux's /proc")
def test_no_thread_of_the_group_is_left(tmp_path: Path) -> None:
    """One that is left may abort the process when Python ends."""
    log = small_log(tmp_path / "log", 300)
    (tmp_path / "program.py").write_text(THREADS)
    text = finish(launch(*TORCHRUN, str(tmp_path / "program.py"), str(log.path)))
    assert text.count("threads") == 2 and "gloo" not in text  # both processes write into one pipe


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the process to kill in Linux's /proc")
def test_killed_then_interrupted_a_run_goes_on_with_any_number_of_processes(tmp_path: Path) -> None:
    """By SGD, whose steps do not magnify the rounding of a sum of two processes, as Adagrad's first steps do."""
    log, checkpoints = small_log(tmp_path / "log", 1500), tmp_path / "cut" / "checkpoints"
    options = ("--epochs", "20", "--optimizer", "sgd")
    for sent in (signal.SIGKILL, signal.SIGINT):
        before = set(checkpoints.glob("*.safetensors"))
        run = start(log.path, tmp_path / "cut", *options, processes=2)
        try:
            while set(checkpoints.glob("*.safetensors")) <= before:
                assert run.poll() is None, run.communicate()
                time.sleep(0.01)
            if sent == signal.SIGKILL:
                children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
                os.kill(int(children[1]), sent)
            else:
                run.send_signal(sent)  # to torchrun, which passes it on
            text, _ = run.communicate(timeout=60)
        finally:
            run.kill()
            run.wait()
        assert run.returncode != 0 and "terminate called" not in text
        assert not (tmp_path / "cut" / "result.json").exists()
    assert "interrupted; the same command goes on" in text
    for name in ("cut", "whole"):
        finish(start(log.path, tmp_path / name, *options))
    losses = [read_result(tmp_path / name / "result.json")["test"]["log_loss"] for name in ("cut", "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
