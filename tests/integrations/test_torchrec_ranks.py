"""quorem's tables sharded by TorchRec: two gloo ranks, each a process, that run the cases of torchrec_cases.py."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import quorem

pytest.importorskip("torchrec", reason="needs TorchRec: `make install`, or the line in docs/torchrec.md")

import torchrec_checkpoints as checkpoints
import torchrec_ranks as ranks
from torchrec_cases import ALONE

from quorem.integrations import torchrec as integration
from quorem.integrations.torchrec import EmbeddingBagCollection
from quorem.integrations.torchrec.state import state_of

HERE = Path(__file__).parent
LIMIT = 300  # seconds; a minute is usual


def run_two_ranks(folder: Path, *cases: str) -> None:
    """Run the cases on two ranks; fail with the first error of either."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "torchrec_cases.py"), str(folder), *cases],
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
    run_two_ranks(tmp_path, *(case.__name__ for case in ALONE))


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
    saving, loading = tmp_path / "saving", tmp_path / "loading"
    saving.mkdir()
    loading.mkdir()
    run_two_ranks(saving, "save_on_two")
    monkeypatch.setattr(sys, "argv", ["", str(saving)])
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with one_rank(tmp_path):
        for kind in ("adagrad", "rowwise"):
            for plan in ("tables", "shards", "planner"):
                model, optimizers = checkpoints.sharded_to_train(kind, plan)
                assert integration.load(tmp_path / f"two-{kind}", model, optimizers) == 2
                checkpoints.check_training(model, optimizers, kind, 2, f"one rank, {plan}")
            integration.save(tmp_path / f"one-{kind}", model, optimizers, step=4)
    run_two_ranks(loading, "load_from_one")
    for kind in ("adagrad", "rowwise"):
        _, ours, options = ranks.OPTIMIZERS[kind]
        collection = ranks.reference(checkpoints.TRAINED, sparse=True)
        optimizer = ours(collection.parameters(), **options)
        assert integration.load(tmp_path / f"two-{kind}", collection, [optimizer]) == 2
        checkpoints.go_on(collection, [optimizer], range(2, 4))
        wanted, _ = checkpoints.trained_reference(kind, 4)
        served = quorem.EmbeddingCollection(checkpoints.TRAINED)
        integration.load(tmp_path / f"one-{kind}", served)
        for name, value in wanted.state_dict().items():
            ranks.near(collection.state_dict()[name], value, f"{kind} {name}")
            ranks.near(served.state_dict()[name], value, f"{kind} {name}")


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tables = [quorem.Table("user", 100, 8, quorem.QR(4)), quorem.Table("day", 7, 8)]
    with pytest.raises(FileNotFoundError, match="has no complete checkpoint"):
        integration.load(tmp_path, EmbeddingBagCollection(tables))
    integration.save(tmp_path, EmbeddingBagCollection(tables[:1]))
    with pytest.raises(ValueError, match=r"the saved state must have tables\.day\.0"):
        integration.load(tmp_path, EmbeddingBagCollection(tables))
    with pytest.raises(ValueError, match=r"tables\.user\.0 is \(25, 8\) in the saved state and \(50, 8\) here"):
        integration.load(tmp_path, EmbeddingBagCollection([quorem.Table("user", 100, 8, quorem.QR(2))]))
    before = EmbeddingBagCollection([quorem.Table("user", 100, 8, quorem.QR(4, permute=3))])
    state = {name: value.clone() for name, value in before.state_dict().items()}
    with pytest.raises(ValueError, match=r"tables\.user must have the partitions, operation, permutation and order"):
        integration.load(tmp_path, before)
    assert all(value.equal(state[name]) for name, value in before.state_dict().items())


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.SGD])
def test_networks_and_their_optimizer_state_are_saved(optimizer_class: Any, tmp_path: Path) -> None:
    """They load into a module of either kind, whose tables have the same order."""
    tables = [quorem.Table(name, 60, 8, quorem.Path(4, (5,), force=True)) for name in ("user", "item")]
    options = {"lr": 0.1} | ({"momentum": 0.9} if optimizer_class is torch.optim.SGD else {})

    def trained(cls: Any, order: int, steps: int) -> tuple[Any, Any]:
        model = cls(tables[::order])
        optimizer = optimizer_class(model.parameters(), **options)
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        return model, optimizer

    saved, optimizer = trained(EmbeddingBagCollection, 1, 2)
    integration.save(tmp_path, saved, [optimizer])
    state = state_of(saved, [optimizer])
    for cls in (EmbeddingBagCollection, quorem.EmbeddingCollection):
        model, other = trained(cls, 1, 1)
        integration.load(tmp_path, model, [other])
        loaded = state_of(model, [other])
        assert loaded.keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(loaded[name], value), name
        with pytest.raises(ValueError, match="paths must have the partitions, operation, permutation and order"):
            integration.load(tmp_path, trained(cls, -1, 1)[0])
