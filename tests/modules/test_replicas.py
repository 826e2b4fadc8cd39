"""DistributedDataParallel, fully_shard and distributed checkpoints, in two gloo processes."""

from pathlib import Path

import replicas
import torch.multiprocessing


def test_two_processes(tmp_path: Path) -> None:
    """In one start of two processes, which takes longer than the cases."""
    torch.multiprocessing.spawn(replicas.run, args=(str(tmp_path),), nprocs=2)
