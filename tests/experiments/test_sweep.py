"""Sweeps: every run once, by any number of processes, whatever was killed; a failure stops nothing else."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from runs_of_training import small_log, small_run

from quorem.experiments import sweep
from quorem.files.atomic import LockedError
from quorem.paper.schemes import Full
from quorem.training import loop
from quorem.training.loop import train
from quorem.training.run import RunFolder, read_result

PROGRAM = """
import sys, threading
sys.path.insert(0, {tests!r})
from pathlib import Path
from runs_of_training import small_run
from quorem.data.prepared import Prepared
from quorem.experiments import sweep

if __name__ == "__main__":
    prepared = Prepared({log!r})
    runs = [[small_run(prepared, seed=seed, epochs={epochs})] for seed in range({runs})]
    made = sweep.new(Path({out!r}), runs, Path({log!r}), "cpu")
    print("ready", flush=True)
    sweep.run(made, workers={workers})
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("sweep") / "log", 2000)


def made_of(log, folder: Path, configs) -> sweep.Sweep:
    return sweep.new(folder, [[config] for config in configs], log.path, "cpu")


def work(made: sweep.Sweep) -> None:
    sweep.work(made, threading.Event())


def results(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("runs/*/result.json")}


def trained_once(folder: Path) -> bool:
    """Whether every run wrote its final metrics a single time."""
    texts = [path.read_text() for path in folder.glob("runs/*/metrics.jsonl")]
    return all(text.count('"test"') == 1 for text in texts)


def start(log, folder: Path, runs: int, workers: int = 1, epochs: int = 1, before: str = "") -> subprocess.Popen:
    tests = str(Path(__file__).parents[1])
    program = folder.with_suffix(f".{len(list(folder.parent.iterdir()))}.py")  # a file: workers are spawned from it
    text = PROGRAM.format(tests=tests, log=str(log.path), out=str(folder), runs=runs, workers=workers, epochs=epochs)
    program.write_text(text.replace("if __name__", f"{before}\nif __name__", 1))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(program)], start_new_session=True, **pipes)


def wait_until(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_finished_runs_are_skipped_and_models_are_not_kept(log, tmp_path):
    configs = [small_run(log, seed=seed) for seed in range(2)]
    work(made_of(log, tmp_path, configs))
    before = results(tmp_path)
    assert set(before) == {config.key() for config in configs}
    assert not list(tmp_path.rglob("*.safetensors"))
    more = [*configs, small_run(log, seed=2)]
    work(made_of(log, tmp_path, more))
    after = results(tmp_path)
    assert len(after) == 3 and {key: after[key] for key in before} == before


def test_a_failure_is_recorded_and_the_others_go_on(log, tmp_path):
    bad = small_run(log, lr=1e30, scheme=Full(), epochs=4)  # not finite for long
    good = small_run(log, seed=1)
    made = made_of(log, tmp_path, [bad, good])
    work(made)
    assert (made.is_done(bad), made.has_failed(bad), made.is_done(good)) == (False, True, True)
    error = json.loads(made.error(bad).read_text())
    assert error["error"].startswith("FloatingPointError: the loss is") and "Traceback" in error["traceback"]
    again = made_of(log, tmp_path, [bad, good])
    assert not again.has_failed(bad)  # a new sweep tries it again
    work(again)
    assert again.has_failed(bad)


def test_one_failing_of_several_on_a_gpu_is_found_by_itself(log, tmp_path, monkeypatch):
    configs = [small_run(log, seed=seed) for seed in range(3)]
    train_many, asked = sweep.train_many, []

    def train(configs, *arguments, stop, **options):
        asked.append([config.seed for config in configs])
        if any(config.seed == 1 for config in configs):
            stop.set()
            raise FloatingPointError("the loss is nan")
        return train_many(configs, *arguments, stop=stop, **options)

    monkeypatch.setattr(sweep, "train_many", train)
    made = made_of(log, tmp_path, configs)
    with sweep.claimed(made, configs) as folders:
        sweep._train(made, folders, [], threading.Event())
    assert asked == [[0, 1, 2], [0], [1], [2]]
    assert [made.is_done(config) for config in configs] == [True, False, True] and made.has_failed(configs[1])


def test_stopping_saves_and_going_on_gives_the_same_result(log, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0)  # a report after every step: the first one stops
    config = small_run(log, epochs=3)
    stop = threading.Event()
    made = made_of(log, tmp_path / "a", [config])

    monkeypatch.setattr(sweep, "_is_orphan", lambda: stop.set() or False)
    sweep.work(made, stop)
    assert not made.is_settled(config) and list((tmp_path / "a" / "runs" / config.key() / "checkpoints").iterdir())
    work(made)
    whole = made_of(log, tmp_path / "b", [config])
    work(whole)
    one, other = (read_result(each.run(config) / "result.json") for each in (made, whole))
    assert one["test"] == other["test"] and one["validation"] == other["validation"]


def test_a_claimed_run_is_left_to_its_process_and_taken_over_when_that_ends(log, tmp_path):
    config = small_run(log)
    made = made_of(log, tmp_path, [config])
    with sweep.claimed(made, [config]) as mine, sweep.claimed(made, [config]) as other:
        assert ([folder.config for folder in mine], other) == ([config], [])
    worker = threading.Thread(target=work, args=(made,))
    with sweep.claimed(made, [config]):
        worker.start()
        time.sleep(2 * sweep.WAIT)
        assert worker.is_alive() and not made.is_done(config)
    worker.join(60)
    assert made.is_done(config)


def test_sweeps_of_any_number_of_processes_and_workers_and_after_a_kill_end_with_the_same_bits(log, tmp_path):
    """So the threads of a worker must not follow from their number, or from the cores of the machine."""
    shared, killed = tmp_path / "shared", tmp_path / "killed"
    both = [start(log, shared, 4) for _ in range(2)]
    outs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outs
    process = start(log, killed, 4, workers=2)
    wait_until(lambda: results(killed))
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = results(killed)
    assert before
    again = start(log, killed, 4, workers=2)
    out = again.communicate(timeout=300)
    assert again.returncode == 0, out
    assert {key: results(killed)[key] for key in before} == before, "what was finished is not trained again"
    assert len(results(shared)) == len(results(killed)) == 4 and trained_once(shared) and trained_once(killed)
    for key in results(killed):
        one, other = (read_result(folder / "runs" / key / "result.json") for folder in (shared, killed))
        assert one["test"] == other["test"] and one["threads"] == other["threads"] == 1


DYING = """
import os, signal

if __name__ == "__mp_main__":  # in a worker
    try:
        os.close(os.open({flag!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        pass
    else:
        sweep.train_many = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_worker_is_told_and_its_runs_are_taken_over(log, tmp_path):
    folder = tmp_path / "runs"
    process = start(log, folder, 2, workers=2, before=DYING.format(flag=str(tmp_path / "killed")))
    try:
        _, err = process.communicate(timeout=120)
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    assert "RuntimeError: 1 of 2 workers died (exit code -9); the same command goes on" in err
    assert len(results(folder)) == 2 and trained_once(folder)


def test_workers_end_with_the_process_that_began_them(log, tmp_path):
    folder = tmp_path / "runs"
    process = start(log, folder, 500)
    wait_until(lambda: results(folder))
    process.send_signal(signal.SIGKILL)
    process.wait()
    counts = [-1, 0]
    while counts[-1] != counts[-2] and len(counts) < 60:
        counts.append(len(results(folder)))
        time.sleep(2)
    assert 0 < counts[-1] < 500 and counts[-1] == len(results(folder))


@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_ctrl_c_saves_what_is_being_trained_and_exits(log, tmp_path, send):
    """In a terminal it reaches every process of the group at once."""
    folder = tmp_path / "runs"
    process = start(log, folder, 1, epochs=5000)
    wait_until(lambda: any(path.stat().st_size for path in folder.glob("runs/*/metrics.jsonl")))
    send(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0 and err.count("Traceback") == 1 and "KeyboardInterrupt" in err
    assert list(folder.glob("runs/*/checkpoints/step-*.safetensors")) and not results(folder)


def test_a_full_disk_ends_the_sweep_with_its_reason(log, tmp_path):
    full = """
def full(*_):
    raise OSError(28, "No space left on device")

sweep.write = sys.modules["quorem.files.atomic"].write = full
"""
    process = start(log, tmp_path / "runs", 2, before=full)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0 and "quorem: [Errno 28] No space left on device; what is finished is kept" in err


def test_a_run_has_one_lock(log, tmp_path):
    """A sweep leaves alone what ``quorem train`` is training, and the other way round."""
    config = small_run(log)
    made = made_of(log, tmp_path, [config])
    with RunFolder(made.run(config), config), sweep.claimed(made, [config]) as claimed:
        assert claimed == []
    is_locked = pytest.raises(LockedError, match="another process is training in this folder")
    with sweep.claimed(made, [config]) as (folder,), is_locked:
        train(config, log, folder.path)
    work(made)
    assert made.is_done(config)
