"""quorem's tables sharded by TorchRec, on two gloo ranks, each a process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import nn

pytest.importorskip("torchrec", reason="needs TorchRec: `make install`, or the line in docs/torchrec.md")

import torchrec_checkpoints as checkpoints
import torchrec_ranks as ranks
from torchrec_exchange import pipeline, sent_bytes
from torchrec_sharding import every_type, odd_batches, optimizers, starts, unpooled

import quorem
from quorem.integrations.torchrec import EmbeddingBagCollection, constraints


def run_two_ranks(folder: Path, *cases: ranks.Case) -> None:
    torch.multiprocessing.spawn(ranks.run, args=(str(folder), cases), nprocs=2)


def test_two_ranks(tmp_path: Path) -> None:
    """In one start of two processes, which takes longer than a case."""
    sharding = (every_type, unpooled, optimizers, odd_batches, starts)
    run_two_ranks(tmp_path, *sharding, pipeline, sent_bytes, checkpoints.copies)


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """This process as the only rank."""
    store = dist.FileStore(str(folder / "one"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_checkpoints_go_from_two_ranks_to_one_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1", "CHECKPOINTS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    saving, loading = tmp_path / "saving", tmp_path / "loading"
    saving.mkdir()
    loading.mkdir()
    run_two_ranks(saving, checkpoints.save_on_two)
    with one_rank(tmp_path):
        for kind in ("adagrad", "rowwise"):
            model, optimizer = checkpoints.sharded_to_train(kind, "planner")
            checkpoints.load(f"two-{kind}", model, optimizer)
            checkpoints.check_training(model, optimizer, kind, 2, "one rank")
            checkpoints.save(f"one-{kind}", model, optimizer)
        bags = EmbeddingBagCollection([quorem.Table("user", 100, 8, quorem.QR(4))])
        sharded = nn.Sequential(ranks.shard(bags, constraints(bags, batch_size=8)))
        for change in (lambda: quorem.compress_(sharded, quorem.QR(4)), lambda: quorem.decompress_(sharded)):
            with pytest.raises(ValueError, match=r"model must not be sharded.*compress it before DistributedModel"):
                change()
    run_two_ranks(loading, checkpoints.load_from_one)
    served = EmbeddingBagCollection(checkpoints.TRAINED)
    state = {"model": served.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "one-adagrad", no_dist=True)
    served.load_state_dict(state["model"])
    wanted, _ = checkpoints.trained_reference("adagrad", 4)
    ranks.same_tables(served, wanted, "served by one process")
