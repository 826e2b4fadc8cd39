"""DistributedDataParallel and ``fully_shard`` around compressed models, in two gloo processes."""

from pathlib import Path

import foreign_replicas
import replicas
import torch.multiprocessing


def test_two_processes(tmp_path: Path) -> None:
    """In one start of two processes, which takes longer than the cases."""
    torch.multiprocessing.spawn(replicas.run, args=(str(tmp_path), [foreign_replicas.every_kind]), nprocs=2)
