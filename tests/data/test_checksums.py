"""Damage to prepared data is told before it is trained on, whichever byte it is in."""

import random

import numpy as np
import pytest
from click_logs import folder_bytes
from runs_of_training import small_log, small_run

from quorem.data import checksums
from quorem.data.checksums import CheckedArray, block_checksums
from quorem.data.folder import Folder
from quorem.data.prepared import Prepared
from quorem.data.table import prepare_table
from quorem.training.loop import train
from quorem.training.model import data_identity


@pytest.fixture
def bags(tmp_path):
    rows = "".join(f"{k % 2},{k},u{k % 7},a|b{k % 5}\n" for k in range(60))
    (tmp_path / "t.csv").write_text("y,x,user,tags\n" + rows)
    return prepare_table(tmp_path / "t.csv", tmp_path / "out", label="y", dense=["x"], categorical=["user", "tags"],
                         multi=["tags"])  # fmt: skip


def test_a_block_is_checked_once_when_its_rows_are_first_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 16)
    array = np.arange(30, dtype=np.int32).reshape(10, 3)
    checked = CheckedArray(tmp_path / "a.npy", array, block_checksums(array.data.cast("B")))
    array[5, 0] = 99  # bytes 60 to 63, the last of block 3
    checked.check(0, 4)
    checked.check(6, 10)
    for start, stop in ((0, 10), (5, 6), (4, 5)):
        with pytest.raises(ValueError, match=r"a\.npy differs from its checksum"):
            checked.check(start, stop)
    array[5, 0] = 15
    checked.check(0, 10)
    array[:] = 0
    checked.check(0, 10)  # done before


def test_every_flipped_byte_is_told(bags):
    """In each file; by ``verify``, and by the call that reads it."""
    whole, rng = folder_bytes(bags.path), random.Random(0)
    assert len(whole) == 10
    for name, data in whole.items():
        for at in {0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(12))}:
            flipped = bytes([data[at] ^ (1 << rng.randrange(8))])
            (bags.path / name).write_bytes(data[:at] + flipped + data[at + 1 :])
            with pytest.raises((ValueError, FileNotFoundError), match=str(bags.path)):
                read_all(Prepared(bags.path))
            with pytest.raises((ValueError, FileNotFoundError), match=str(bags.path)):
                Prepared(bags.path).verify()
        (bags.path / name).write_bytes(data)
    Prepared(bags.path).verify()
    read_all(Prepared(bags.path))


def read_all(prepared):
    for split in prepared.meta["split"]:
        prepared.split(split)
    for name in prepared.names:
        prepared.frequencies(name)
        prepared.vocabulary(name)


@pytest.mark.parametrize("shuffle", [False, True])
def test_nothing_damaged_is_trained_on(tmp_path, shuffle):
    log = small_log(tmp_path / "log", 1000)
    config = small_run(log, shuffle=shuffle)
    train(config, log)
    data = (log.path / "dense.npy").read_bytes()
    (log.path / "dense.npy").write_bytes(data[:-5000] + bytes([data[-5000] ^ 1]) + data[-4999:])
    damaged = Prepared(log.path)
    assert data_identity(damaged) == config.data
    with pytest.raises(ValueError, match=r"dense\.npy differs from its checksum"):
        train(config, damaged)


def test_the_identity_covers_every_row(tmp_path):
    """Also those of long logs, and the values of dense features."""

    def identity(name, change=None):
        labels, dense, ids = np.zeros(200_000, np.uint8), np.zeros((200_000, 1), np.float32), np.zeros((200_000, 1))
        if change is not None:
            (labels, dense, ids)[change][123_457] = 1
        with Folder(tmp_path / name) as folder:
            folder.save("labels.npy", labels)
            folder.save("dense.npy", dense)
            folder.save("categorical.npy", ids.astype(np.int32))
            folder.save_counts("c", np.array([1, 1]))
            split = {"train": [0, 10], "validation": [10, 20], "test": [20, 200_000]}
            columns = {"dense": ["d"], "categorical": ["c"], "bags": [], "cardinalities": [2], "first_token_id": None}
            others = {"label": "y", "day_starts": [], "null_id": 0, "unknown_id": None, "config": {}, "versions": {}}
            folder.commit({"num_rows": 200_000, **columns, "split": split, **others})
        return data_identity(Prepared(tmp_path / name))

    assert identity("a") == identity("b")
    assert len({identity("c"), *(identity(f"changed{k}", k) for k in range(3))}) == 4


def test_counts_are_stored_in_as_few_bytes_as_they_need(tmp_path):
    with Folder(tmp_path / "out") as folder:
        for name, most in {"a": 255, "b": 256, "c": 65_536, "d": 2**32}.items():
            folder.save_counts(name, np.array([0, most]))
        folder.commit({})
    arrays = [np.load(tmp_path / "out" / "counts" / f"{name}.npy") for name in "abcd"]
    assert [array.dtype.itemsize for array in arrays] == [1, 2, 4, 8]
    assert [int(array[1]) for array in arrays] == [255, 256, 65_536, 2**32]
