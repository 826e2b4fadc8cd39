"""What the ranks of ``training/test_ranks.py`` do, in processes of their own."""

import os
import signal
from pathlib import Path

import torch.distributed as dist

from quorem.data.batches import Batch
from quorem.data.prepared import Prepared
from quorem.training.config import RunConfig
from quorem.training.loop import Options, train
from quorem.training.sharded import ShardedTrial


class Killed(ShardedTrial):
    """Is killed on the second rank before the eighth step."""

    def step(self, batches: Batch) -> int:
        if self.steps == 7 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(batches)


def train_and_be_killed(config: str, data: str, out: str) -> None:
    folder = Path(out) if dist.get_rank() == 0 else None
    options = Options(checkpoint_seconds=0)
    train(RunConfig.from_json(config), Prepared(data), folder, options=options, make_trial=Killed)
