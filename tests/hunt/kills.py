"""SIGKILL at random moments of preparing, training, sweeping and reporting: nothing is lost, and nothing is wrong.

``PYTHONPATH=tests python -m hunt.kills --kills 200`` prints its figures as JSON.
Each job is run in a process of its own, killed after a random time, and run again, until it comes to its end. What it
left is looked at after every kill. This process starts no thread, so that it can be forked: one import serves all jobs.
"""

import os
import random
import select
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from click_logs import random_lines
from hunt.command import main
from matplotlib.image import imread
from runs_of_training import small_log, small_run

from quorem.data.criteo import prepare_criteo
from quorem.data.prepared import Prepared
from quorem.experiments import reproduce, sweep
from quorem.experiments.figures import Axes, Point
from quorem.experiments.report.page import page
from quorem.files import atomic as files
from quorem.paper.schemes import QR
from quorem.training import run
from quorem.training.loop import Options, train
from quorem.training.run import MODEL


@dataclass
class Job:
    """Something to kill.

    Args:
        name: of the job.
        run: does it, from wherever it was killed; ``number`` counts how often it came to its end.
        look: says what is wrong with what is there, given whether the job came to its end.
    """

    name: str
    run: Callable[[int], None]
    look: Callable[[int, bool], list[str]]
    kills: int = 0
    ends: int = 0
    bad: list[str] = field(default_factory=list)

    def start(self, kill_after: float | None = None) -> bool:
        """Run it, and look at what it left; whether it came to its end."""
        ended = in_child(lambda: self.run(self.ends), kill_after)
        self.bad += self.look(self.ends, ended)
        self.ends += ended
        self.kills += not ended
        return ended


def in_child(work: Callable[[], None], kill_after: float | None = None) -> bool:
    """Run in a process of its own, killed after a time; whether it came to its end.

    Raises:
        RuntimeError: if it fails by itself.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if kill_after is not None:
        watched = os.pidfd_open(child)
        if not select.select([watched], [], [], kill_after)[0]:
            os.kill(child, signal.SIGKILL)
        os.close(watched)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return False
    if os.WEXITSTATUS(status):
        raise RuntimeError("a job failed by itself")
    return True


def hunt(count: int, seed: int, jobs: Sequence[str]) -> dict[str, Any]:
    """Kill the jobs of these names in turn at random moments, and say what came of it."""
    rng, seconds = random.Random(seed), {}
    with tempfile.TemporaryDirectory() as scratch:
        hunted = [JOBS[name](Path(scratch) / name) for name in jobs]
        for job in hunted:
            began = time.monotonic()
            job.start()
            seconds[job.name] = round(time.monotonic() - began, 2)
        for number in range(count):
            job = hunted[number % len(hunted)]
            while job.start(rng.uniform(0, 1.5 * seconds[job.name])):
                pass
        for job in hunted:  # once more, to the end
            job.start()
    return {
        "jobs": {job.name: {"kills": job.kills, "ends": job.ends, "seconds": seconds[job.name]} for job in hunted},
        "bad": [f"{job.name}: {text}" for job in hunted for text in job.bad],
    }


def preparing(folder: Path) -> Job:
    """One of two files into one folder in turn, over what is there."""
    folder.mkdir()
    for k in range(2):
        lines = random_lines(400, seed=k)
        (folder / f"raw{k}").write_text("".join(text + "\n" for text in lines))
        in_child(lambda k=k: prepare_criteo(folder / f"raw{k}", folder / f"whole{k}"))  # type: ignore[func-returns-value]
    expected = [Prepared(folder / f"whole{k}").meta for k in range(2)]
    out = folder / "out" / "data"

    def work(number: int) -> None:
        prepare_criteo(folder / f"raw{number % 2}", out, overwrite=True, block_bytes=20_000)

    def look(number: int, ended: bool) -> list[str]:
        replaced = out.with_name(out.name + ".replaced")
        where = out if out.exists() or not replaced.exists() else replaced
        try:
            data = Prepared(where)
            data.verify()
        except (OSError, ValueError) as error:
            return [str(error)]
        bad = [] if data.meta in expected else ["neither the old data nor the new"]
        if ended:
            bad += [] if data.meta == expected[number % 2] else ["the old data"]
            bad += [f"{name} was left" for name in sorted(os.listdir(out.parent)) if name != "data"]
        return bad

    return Job("prepare", work, look)


def training(folder: Path) -> Job:
    """A run that saves after every step."""
    folder.mkdir()
    in_child(lambda: small_log(folder / "log", 1000))  # type: ignore[func-returns-value]
    log = Prepared(folder / "log")
    config = small_run(log, optimizer="amsgrad", epochs=2, validate_every=9)

    def work(number: int) -> None:
        done = folder / f"run{number - 1}"
        shutil.rmtree(done, ignore_errors=True)
        train(config, Prepared(folder / "log"), folder / f"run{number}", options=Options(checkpoint_seconds=0))

    in_child(lambda: train(config, Prepared(folder / "log"), folder / "whole"))  # type: ignore[func-returns-value]
    result = run.read_result(folder / "whole" / "result.json")
    metrics = run.read_metrics(folder / "whole" / "metrics.jsonl")
    model = [(folder / "whole" / name).read_bytes() for name in (MODEL, run.ENCODING)]

    def look(number: int, ended: bool) -> list[str]:
        out = folder / f"run{number}"
        if not ended:
            try:
                run.latest_checkpoint(out / "checkpoints")
                return []
            except ValueError as error:
                return [str(error)]
        bad = []
        counts = run.read_result(out / "result.json")
        if any(counts[split] != result[split] for split in ("validation", "test")):
            bad.append("another result")
        if run.read_metrics(out / "metrics.jsonl") != metrics:
            bad.append("other metrics")
        if [(out / name).read_bytes() for name in (MODEL, run.ENCODING)] != model:
            bad.append("another model")
        names = {path.name for path in out.rglob("*")}
        left = names - {".lock", "run.json", "metrics.jsonl", "checkpoints", MODEL, run.ENCODING, run.RESULT}
        return bad + [f"{name} was left" for name in sorted(left)]

    return Job("train", work, look)


def grid(folder: Path, out: Path) -> sweep.Sweep:
    """A sweep of four short runs."""
    log = Prepared(folder / "log")
    options = {"embedding_dim": 4, "batch_size": 64, "validate_every": 5}
    points = [Point(series="mult", x=float(c), options={**options, "scheme": QR(c)}) for c in (2, 4)]
    axes = Axes(name="grid", title="grid", x_label="collisions")
    plan = reproduce.planned_figure(axes, points, log, trials=2, optimizers=["adagrad"], command="quorem sweep grid.py")
    (out / "plans").mkdir(parents=True, exist_ok=True)
    plan.write(out / "plans" / "grid.json")
    runs = [plan.runs(point) for point in plan.points]
    return sweep.new(out, runs, log.path, "cpu")


def trained(folder: Path, out: Path) -> None:
    sweep.work(grid(folder, out), threading.Event())


def sweeping(folder: Path) -> Job:
    """A sweep of four short runs, in one process."""
    folder.mkdir()
    in_child(lambda: small_log(folder / "log", 1000))  # type: ignore[func-returns-value]
    in_child(lambda: trained(folder, folder / "whole"))

    def results(out: Path) -> dict[str, Any]:
        counts = {path.parent.name: run.read_result(path) for path in out.glob("runs/*/result.json")}
        return {key: (result["validation"], result["test"]) for key, result in counts.items()}

    expected = results(folder / "whole")
    finished: dict[str, int] = {}

    def work(number: int) -> None:
        shutil.rmtree(folder / f"sweep{number - 1}", ignore_errors=True)
        trained(folder, folder / f"sweep{number}")

    def look(number: int, ended: bool) -> list[str]:
        out = folder / f"sweep{number}"
        counts = results(out)
        times = {str(path): path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}
        bad = [f"{key} has another result" for key in counts if counts[key] != expected[key]]
        bad += [f"{path} was trained again" for path in times if finished.get(path, times[path]) != times[path]]
        finished.update(times)
        if ended:
            bad += [] if counts.keys() == expected.keys() else ["runs are missing"]
            bad += [f"{path} was left" for path in out.rglob("*.tmp")]
        return bad

    return Job("sweep", work, look)


def reporting(folder: Path) -> Job:
    """Numbers, pictures and page of a sweep."""
    folder.mkdir()
    in_child(lambda: small_log(folder / "log", 1000))  # type: ignore[func-returns-value]
    in_child(lambda: trained(folder, folder / "sweep"))
    out = folder / "sweep"

    def work(number: int) -> None:
        figures = reproduce.figures_in(out)
        reproduce.publish(figures, out / "results")
        page(figures, out / "report.html")

    def look(number: int, ended: bool) -> list[str]:
        bad = []
        written = [path for path in [*(out / "results").glob("*"), *out.glob("report.html*")] if path.suffix != ".tmp"]
        for path in written:
            try:
                if path.suffix == ".png":
                    is_whole = bool(np.isfinite(imread(path)).all())
                elif path.suffix == ".json":
                    is_whole = "points" in files.read_json(path)
                else:
                    is_whole = path.read_bytes().endswith(
                        {".pdf": b"%%EOF\n", ".html": b"</html>\n"}.get(path.suffix, b"\n")
                    )
            except Exception as error:
                bad.append(f"{path.name}: {error}")
                continue
            bad += [] if is_whole else [f"{path.name} is cut off"]
        if ended:
            bad += [] if len(written) == 5 else [f"{sorted(path.name for path in written)} and not five files"]
            bad += [f"{path.name} was left" for path in out.rglob("*.tmp")]
        return bad

    return Job("report", work, look)


JOBS = {"prepare": preparing, "train": training, "sweep": sweeping, "report": reporting}

if __name__ == "__main__":
    main(hunt, __doc__, "kills", 200, jobs=list(JOBS))
