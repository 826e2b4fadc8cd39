"""All cases that two ranks run: each is run by both, and must leave both at the same point.

Started by ``test_torchrec_ranks.py`` as ``python torchrec_cases.py FOLDER CASE ...``, once for each rank.
"""

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec_checkpoints import copies, load_from_one, refuse_columns, save_on_two
from torchrec_exchange import pipeline, sent_bytes
from torchrec_sharding import every_type, odd_batches, optimizers, refused, starts, sums, unpooled

ALONE = (
    every_type,
    sums,
    unpooled,
    optimizers,
    odd_batches,
    refused,
    starts,
    pipeline,
    sent_bytes,
    copies,
    refuse_columns,
)
CASES: dict[str, Callable[[int], None]] = {f.__name__: f for f in (*ALONE, save_on_two, load_from_one)}


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    rank = int(os.environ["RANK"])
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", timeout=timedelta(seconds=60), store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2
    )
    for name in names:
        try:
            CASES[name](rank)
        except BaseException:
            (folder / f"error{rank}").write_text(f"{name}, rank {rank}: {traceback.format_exc()}")
            os._exit(1)  # the other rank may wait for this one: no farewell
        dist.barrier()
        (folder / f"done{rank}").open("a").write(f"{name}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
