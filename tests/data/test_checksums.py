"""Damage to prepared data is told before it is trained on, whichever byte it is in."""

import random

import numpy as np
import pytest
from click_logs import folder_bytes
from runs_of_training import small_log, small_run

from quorem.data.folder import new_folder
from quorem.data.meta import Columns, Meta
from quorem.data.prepared import Prepared
from quorem.data.table import prepare_table
from quorem.training.loop import train
from quorem.training.model import data_identity


@pytest.fixture
def bags(tmp_path):
    rows = "".join(f"{k % 2},{k},u{k % 7},a|b{k % 5}\n" for k in range(60))
    (tmp_path / "t.csv").write_text("y,x,user,tags\n" + rows)
    columns = {"label": "y", "dense": ["x"], "categorical": ["user", "tags"], "multi": ["tags"]}
    return prepare_table(tmp_path / "t.csv", tmp_path / "out", **columns)


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
    for split in prepared.meta.split:
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
        with new_folder(tmp_path / name) as folder:
            folder.save("labels.npy", labels)
            folder.save("dense.npy", dense)
            folder.save("categorical.npy", ids.astype(np.int32))
            folder.save_counts("c", np.array([1, 1]))
            about = {"num_rows": 200_000, "cardinalities": [2], "transforms": {"d": "none"}, "config": {}}
            split = {"train": (0, 10), "validation": (10, 20), "test": (20, 200_000)}
            folder.commit(Meta(columns=Columns("y", ("d",), ("c",)), split=split, versions={}, **about))
        return data_identity(Prepared(tmp_path / name))

    assert identity("a") == identity("b")
    assert len({identity("c"), *(identity(f"changed{k}", k) for k in range(3))}) == 4
