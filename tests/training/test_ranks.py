"""Training on two ranks, with tables sharded by TorchRec: the losses of one process, and what a killed rank leaves."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from runs_of_training import small_log, small_run

from quorem import QR, EmbeddingCollection, Full, HotCold, Pool, Table
from quorem.experiments import train as command
from quorem.training.loop import train
from quorem.training.ranks import run_ranks
from quorem.training.run import read_metrics, read_result

PLAN = {
    "C1": HotCold(20, cold=Pool(60), num_rest=9),
    "C2": QR(4),
    "C3": Full(),
    "C4": Full(),
}


def test_a_killed_rank_ends_the_run_which_goes_on_with_one_process_or_two(tmp_path: Path) -> None:
    pytest.importorskip("torchrec", reason="needs TorchRec: `make install`, or the line in docs/torchrec.md")
    import torchrec_training as ranks

    log = small_log(tmp_path / "log", 1500)
    config = small_run(log, plan=PLAN, batch_size=101, validate_every=3, lr=0.005)  # 13 steps, of uneven shares
    expected = train(config, log, tmp_path / "single")
    with pytest.raises(RuntimeError, match="rank 1 ended by signal 9, and the others with it"):
        run_ranks(ranks.train_and_be_killed, 2, config.to_json(), str(log.path), str(tmp_path / "two"))
    assert list((tmp_path / "two" / "checkpoints").iterdir())
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    command.run(config, log, tmp_path / "two", command.Execution(device="cpu"), ranks=2)
    results = [read_result(tmp_path / "two" / "result.json"), train(config, log, tmp_path / "one")]
    for out, result in zip(("two", "one"), results, strict=True):
        assert read_result(tmp_path / out / "result.json")["steps"] == expected["steps"] == result["steps"]
        for split in ("validation", "test"):
            assert result[split]["log_loss"] == pytest.approx(expected[split]["log_loss"], rel=1e-5), out
        losses = [
            [line["validation"]["log_loss"] for line in read_metrics(tmp_path / run / "metrics.jsonl").lines]
            for run in ("single", out)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 5
    command.run(config, log, tmp_path / "two", command.Execution(device="cpu"), ranks=2)
    assert results[0] == read_result(tmp_path / "two" / "result.json"), "a finished run is not trained again"


def test_sharded_tables_take_what_a_collection_takes() -> None:
    pytest.importorskip("torchrec", reason="needs TorchRec: `make install`, or the line in docs/torchrec.md")
    from quorem.integrations.torchrec import copy_state_
    from quorem.training.sharded import ShardedTables

    tables = [Table("user", 100, 8, QR(4)), Table("item", 90, 8, HotCold(9, cold=Pool(60)))]
    collection, sharded = EmbeddingCollection(tables), ShardedTables(tables, mode="mean")
    copy_state_(sharded, collection)
    ids = torch.randint(0, 90, (5, 2), dtype=torch.int32)
    torch.testing.assert_close(sharded(ids), collection(ids))
    bags = torch.arange(9), torch.tensor([0, 2, 2, 3, 4, 6, 9])  # two features, three rows
    torch.testing.assert_close(sharded(*bags), collection(*bags))


def test_what_ranks_cannot_train_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = small_log(tmp_path / "log", 200)
    on_cpu, on_gpu = command.Execution(device="cpu"), command.Execution(device="cuda")
    monkeypatch.setattr(command, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match=r"optimizer \('amsgrad'\) must be 'adagrad' for several ranks"):
        command.run(small_run(log, optimizer="amsgrad"), log, tmp_path / "run", on_cpu, ranks=2)
    with pytest.raises(ValueError, match=r"device \('cuda'\) must be 'cpu' for several ranks"):
        command.run(small_run(log), log, tmp_path / "run", on_gpu, ranks=2)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "torchrec", None)
    monkeypatch.delitem(sys.modules, "quorem.integrations.torchrec", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"needs TorchRec .*pip install 'quorem\[torchrec-cpu\]'"):
        command.run(small_run(log), log, tmp_path / "run", on_cpu, ranks=2)
    assert not (tmp_path / "run").exists()
