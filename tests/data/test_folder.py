"""A folder appears only once complete: killed runs, full disks, other runs, other people's files, thread counts."""

import json
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
from click_logs import assert_prepared, folder_bytes, random_lines
from limits import small_disk
from processes import python
from runs_of_training import small_log, small_run

from quorem.data.config import PrepareConfig
from quorem.data.criteo import prepare_criteo
from quorem.data.folder import new_folder
from quorem.data.meta import Columns, Meta
from quorem.data.prepared import Prepared
from quorem.data.table import prepare_table
from quorem.training.loop import train
from quorem.training.model import data_identity

LINES = random_lines(300)

# Children are forked before anything has started a thread, so that one import serves all of them.
KILL = """
import json, os, pathlib, random, signal, sys, time
from quorem.data.criteo import prepare_criteo

raw, out = sys.argv[1:]
os.fsync = lambda descriptor: None

def look():
    ends = {"out": "", "meta": "/meta.json", "partial": ".partial", "replaced": ".replaced/meta.json"}
    return {name: os.path.exists(out + end) for name, end in ends.items()}

def run(delay=None, **options):
    child = os.fork()
    if child == 0:
        prepare_criteo(raw, out, block_bytes=20_000, **options)
        os._exit(0)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return look()

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

class DieAt:
    def __init__(self, n):
        self.left = n
    def __call__(self, *_):
        self.left -= 1
        if self.left == 0:
            die()

reports, n = [], 1
while not reports or not reports[-1]["meta"]:  # at every report of progress, until a run comes through
    reports.append(run(progress=DieAt(n)))
    n += 1
timed, delay, rng = [], 0.0, random.Random(0)
while len(timed) < 20:  # after any time, over finished data
    timed.append(run(delay, overwrite=True))
    delay += rng.uniform(0.0, 0.02)
renamed, rename = [], os.rename
for n in range(1, 6):  # in the last step, before and after each change of a name
    step = DieAt(n)
    os.rename = lambda *names: (step(), rename(*names), step())
    renamed.append(run(overwrite=True))
print(json.dumps([reports, timed, renamed]))
"""


def raw_file(path, lines=LINES):
    path.write_text("".join(text + "\n" for text in lines))
    return path


def test_killed_at_any_moment_leaves_nothing_that_looks_finished_and_loses_nothing(tmp_path):
    raw, out = raw_file(tmp_path / "raw.txt"), tmp_path / "out"
    reports, timed, renamed = json.loads(python("-c", KILL, raw, out))
    assert len(reports) > 30
    assert all(look["partial"] and not look["out"] for look in reports[:-1])
    assert any(look["partial"] for look in timed)
    for look in (*timed, *renamed):
        assert look["out"] == look["meta"]
        assert look["meta"] or look["replaced"]  # the new data, or the old
    assert_prepared(Prepared(out), LINES)
    prepare_criteo(raw, out, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "raw.txt"]


def test_result_does_not_depend_on_the_number_of_threads(tmp_path):
    lines = random_lines(2000, token=lambda rng: f"{int(rng.paretovariate(0.5)):08x}"[-8:])
    raw = raw_file(tmp_path / "raw.txt", lines)
    code = (
        "import sys, polars; from quorem.data.criteo import prepare_criteo;"
        "prepare_criteo(*sys.argv[1:], block_bytes=50_000); print(polars.thread_pool_size())"
    )
    runs = {}
    for threads in ("1", "2", "5"):
        env = {**os.environ, "POLARS_MAX_THREADS": threads, "OMP_NUM_THREADS": threads}
        command = [sys.executable, "-c", code, raw, tmp_path / threads]
        runs[threads] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    for threads, run in runs.items():
        output, error = run.communicate()
        assert (run.returncode, output.strip()) == (0, threads), error
    assert folder_bytes(tmp_path / "1") == folder_bytes(tmp_path / "2") == folder_bytes(tmp_path / "5")


def test_what_someone_else_wrote_is_left_alone(tmp_path):
    raw, out = raw_file(tmp_path / "raw.txt"), tmp_path / "out"
    for other, message in (
        (out, "out is not replaced: it is no prepared data"),
        (tmp_path / "out.partial", "was not left by an earlier run"),
        (tmp_path / "out.replaced", "was not left by an earlier run"),
    ):
        other.mkdir()
        (other / "thesis.txt").write_text("precious")
        with pytest.raises(FileExistsError, match=message):
            prepare_criteo(raw, out, overwrite=True)
        assert (other / "thesis.txt").read_text() == "precious"
        shutil.rmtree(other)
    with pytest.raises(FileExistsError, match=r"raw\.txt is not replaced"):
        prepare_criteo(raw, raw, overwrite=True)
    prepare_criteo(raw, out)

    def put(*_):
        (out / "notes").write_text("precious")

    with pytest.raises(FileExistsError, match=r"out is not replaced: .* has other files in it"):
        prepare_criteo(raw, out, overwrite=True, progress=put)
    assert (out / "notes").read_text() == "precious"
    assert_prepared(Prepared(out), LINES)
    with new_folder(tmp_path / "new"), pytest.raises(RuntimeError, match="is being written by another run"):
        prepare_criteo(raw, tmp_path / "new")


@pytest.mark.parametrize("is_link", [False, True])
def test_prepared_data_are_kept_unless_told(tmp_path, is_link):
    raw, out = raw_file(tmp_path / "raw.txt"), tmp_path / "disk" / "out"
    first, name = prepare_criteo(raw, out).meta, tmp_path / "link" if is_link else out
    (tmp_path / "link").symlink_to(out)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        prepare_criteo(raw, name)
    again = prepare_criteo(raw, name, PrepareConfig(days=3), overwrite=True)
    assert Prepared(out).meta == again.meta and again.meta.split != first.split
    assert (tmp_path / "link").is_symlink() and [p.name for p in out.parent.iterdir()] == ["out"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "link", "raw.txt"]


def test_failed_overwrite_keeps_the_old_data(tmp_path):
    raw, out = raw_file(tmp_path / "raw.txt"), tmp_path / "out"
    prepare_criteo(raw, out)
    before = folder_bytes(out)
    bad = raw_file(tmp_path / "bad.txt", ["x"] * 100)
    with pytest.raises(ValueError, match="malformed"):
        prepare_criteo(bad, out, overwrite=True)
    assert folder_bytes(out) == before


def test_what_a_killed_overwrite_left_is_cleared_up_and_old_data_without_a_name_are_brought_back(tmp_path):
    raw, out = raw_file(tmp_path / "raw.txt"), tmp_path / "out"
    prepare_criteo(raw, out)
    for left in ("out.partial", "out.replaced"):  # killed after the first renaming, and after the second
        shutil.copytree(out, tmp_path / left)
    (tmp_path / "out.partial" / "meta.json.tmp").touch()  # killed while it was written
    assert_prepared(prepare_criteo(raw, out, overwrite=True), LINES)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "raw.txt"]
    os.rename(out, tmp_path / "out.replaced")  # as if killed between the two renames
    with pytest.raises(FileNotFoundError, match=r"out is not a folder of prepared data: meta\.json is missing"):
        Prepared(out)
    with pytest.raises(FileExistsError, match="out exists"):
        prepare_criteo(raw, out)
    assert_prepared(Prepared(out), LINES)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "raw.txt"]


def test_data_that_were_replaced_while_in_use_are_told(tmp_path):
    reader = prepare_criteo(raw_file(tmp_path / "old.txt"), tmp_path / "out")
    reader.check()
    prepare_criteo(raw_file(tmp_path / "new.txt", random_lines(300, seed=1)), tmp_path / "out", overwrite=True)
    with pytest.raises(ValueError, match=r"C1\.npy differs from its checksum: .* or was replaced while in use"):
        reader.frequencies("C1")
    with pytest.raises(ValueError, match=r"C1\.txt differs from its checksum"):
        reader.vocabulary("C1")
    np.testing.assert_array_equal(reader.split("train").labels, [int(t[0] == "1") for t in LINES][:258])


@pytest.mark.parametrize("block_bytes", [20_000, 1 << 24])
def test_full_disk(block_bytes, tmp_path):
    raw = raw_file(tmp_path / "raw.txt", LINES * 10)
    with small_disk(tmp_path / "disk", "64k") as disk:
        (disk / "neighbour").write_text("stays")
        with pytest.raises(OSError, match=r"disk full: [\d,]+ bytes are free; nothing was written: '.*out\.partial"):
            prepare_criteo(raw, disk / "out", block_bytes=block_bytes)
        assert [p.name for p in disk.iterdir()] == ["neighbour"]


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
