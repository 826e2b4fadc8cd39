"""quorem's tables sharded by TorchRec: two gloo ranks, each a process, that run the cases of torchrec_ranks.py."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torchrec", reason="needs TorchRec: `make install`, or the line in docs/torchrec.md")
TESTS = Path(__file__).parent
LIMIT = 300  # seconds; a minute is usual


def run_two_ranks(folder: Path, *cases: str) -> None:
    """Run the cases on two ranks; fail with the first error of either."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "torchrec_ranks.py"), str(folder), *cases],
            env=environment | {"RANK": str(rank)},
            cwd=folder,
        )
        for rank in range(2)
    ]
    end = time.monotonic() + LIMIT
    try:
        while any(process.poll() is None for process in ranks) and time.monotonic() < end:
            if any(process.poll() for process in ranks):
                break
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    errors = [path.read_text() for path in sorted(folder.glob("error*"))]
    assert not errors, "\n".join(errors)
    done = [(folder / f"done{rank}").read_text().split() for rank in range(2)]
    assert done == [list(cases)] * 2


def test_two_ranks(tmp_path: Path) -> None:
    run_two_ranks(tmp_path, "every_type", "unpooled", "optimizers", "odd_batches", "refused", "starts", "pipeline")
