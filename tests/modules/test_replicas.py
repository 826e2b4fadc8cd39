"""DistributedDataParallel, fully_shard and distributed checkpoints, also of compressed models: two gloo processes."""

from pathlib import Path

import foreign_replicas
import replicas
import torch.multiprocessing


def test_two_processes(tmp_path: Path) -> None:
    """In one start of two processes, which takes longer than the cases."""
    cases = [*replicas.CASES, foreign_replicas.every_kind]
    torch.multiprocessing.spawn(replicas.run, args=(str(tmp_path), cases), nprocs=2)
