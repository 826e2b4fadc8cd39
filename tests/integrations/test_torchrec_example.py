"""examples/torchrec_dlrm.py: the losses of one process on two ranks, and what happens when a rank is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torchrec", reason="needs TorchRec: `make install`, or the line in docs/torchrec.md")
EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrec_dlrm.py"
OPTIONS = ("--batch", "64", "--save-every", "3")
SECONDS_TO_END = 60  # after a rank is killed


def start(out: Path, steps: int, ranks: int | None) -> subprocess.Popen[bytes]:
    """The example on so many ranks, or, with None, in one process without TorchRec."""
    launcher = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    arguments = [str(EXAMPLE), "--out", str(out), "--steps", str(steps), *OPTIONS]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    last = ["--single"] if ranks is None else []
    return subprocess.Popen([sys.executable, *launcher, *arguments, *last], env=environment)


def losses(out: Path) -> list[float]:
    *_, last = sorted(out.glob("step-*/.metadata"))
    return json.loads((last.parent / "losses.json").read_text())


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks to kill in Linux's /proc")
def test_a_killed_rank_ends_the_run_which_goes_on_with_one_rank_or_two(tmp_path: Path) -> None:
    two, one, single = tmp_path / "two", tmp_path / "one", tmp_path / "single"
    run = start(two, 1_000_000, 2)
    try:
        while not list(two.glob("step-*/.metadata")):
            assert run.poll() is None, "the example ended by itself"
            time.sleep(0.1)
        os.kill(children(run.pid)[0], signal.SIGKILL)
        killed = time.monotonic()
        assert run.wait(SECONDS_TO_END) != 0
        assert time.monotonic() - killed < SECONDS_TO_END
    finally:
        run.kill()
        run.wait()
    shutil.copytree(two, one)
    steps = len(losses(two)) + 3
    for out, ranks in ((two, 2), (one, 1), (single, None)):
        assert start(out, steps, ranks).wait(300) == 0
    expected = losses(single)
    assert len(expected) == steps
    assert losses(two) == pytest.approx(expected, rel=1e-5)
    assert losses(one) == pytest.approx(expected, rel=1e-5)
