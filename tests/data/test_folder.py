"""A folder appears only once complete: killed runs, full disks, other runs, other people's files, thread counts."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from click_logs import assert_prepared, folder_bytes, random_lines

from quorem.data.config import PrepareConfig
from quorem.data.criteo import prepare_criteo
from quorem.data.folder import ArrayFile, Folder
from quorem.data.prepared import Prepared

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
    run = subprocess.run([sys.executable, "-c", KILL, raw, out], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    reports, timed, renamed = json.loads(run.stdout)
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
    raw = raw_file(
        tmp_path / "raw.txt", random_lines(2000, token=lambda rng: f"{int(rng.paretovariate(0.5)):08x}"[-8:])
    )
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


def test_failed_run_removes_what_it_wrote(tmp_path):
    raw = raw_file(tmp_path / "raw.txt")

    def interrupt(stage, done, rows):
        if stage == "number":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_criteo(raw, tmp_path / "out", progress=interrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["raw.txt"]


def test_a_folder_of_someone_else_is_left_alone(tmp_path):
    raw = raw_file(tmp_path / "raw.txt")
    other = tmp_path / "out.partial"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="was not left by an earlier run"):
        prepare_criteo(raw, tmp_path / "out")
    assert (other / "thesis.txt").read_text() == "precious"


def test_existing_folder_is_kept_unless_told(tmp_path):
    raw, out = raw_file(tmp_path / "raw.txt"), tmp_path / "out"
    first = prepare_criteo(raw, out).meta
    with pytest.raises(FileExistsError, match="overwrite=True"):
        prepare_criteo(raw, out)
    again = prepare_criteo(raw, out, PrepareConfig(days=3), overwrite=True)
    assert again.meta["split"] != first["split"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "raw.txt"]


def test_only_prepared_data_is_overwritten(tmp_path):
    raw, out = raw_file(tmp_path / "raw.txt"), tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="is not a folder of prepared data"):
        prepare_criteo(raw, out, overwrite=True)
    with pytest.raises(FileExistsError, match="is not a folder of prepared data"):
        prepare_criteo(raw, raw, overwrite=True)
    assert (out / "thesis.txt").read_text() == "precious"


def test_failed_overwrite_keeps_the_old_data(tmp_path):
    raw, out = raw_file(tmp_path / "raw.txt"), tmp_path / "out"
    prepare_criteo(raw, out)
    before = folder_bytes(out)
    bad = raw_file(tmp_path / "bad.txt", ["x"] * 100)
    with pytest.raises(ValueError, match="malformed"):
        prepare_criteo(bad, out, overwrite=True)
    assert folder_bytes(out) == before


def test_overwrite_stopped_halfway_is_cleared_up(tmp_path):
    raw, out = raw_file(tmp_path / "raw.txt"), tmp_path / "out"
    prepare_criteo(raw, out)
    for left in ("out.partial", "out.replaced"):  # killed after the first renaming, and after the second
        shutil.copytree(out, tmp_path / left)
    assert_prepared(prepare_criteo(raw, out, overwrite=True), LINES)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "raw.txt"]


def test_overwrite_through_a_symbolic_link_replaces_the_folder_that_it_leads_to(tmp_path):
    raw, out = raw_file(tmp_path / "raw.txt"), tmp_path / "disk" / "out"
    prepare_criteo(raw, out)
    (tmp_path / "link").symlink_to(out)
    again = prepare_criteo(raw, tmp_path / "link", PrepareConfig(days=3), overwrite=True)
    assert (tmp_path / "link").is_symlink() and not out.is_symlink()
    assert Prepared(out).meta == again.meta and again.meta["config"]["days"] == 3
    assert_prepared(again, LINES)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "link", "raw.txt"]
    assert [p.name for p in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_no_other_run_gets_in_while_one_gives_the_folder_its_name(at, tmp_path, monkeypatch):
    """Before and after each of the two renames."""
    pytest.importorskip("fcntl", reason="locks need a POSIX system")
    out = prepare_criteo(raw_file(tmp_path / "raw.txt"), tmp_path / "out").path
    rename, seen = os.rename, []

    def intrude():
        seen.append(None)
        if len(seen) == at + 1:
            with pytest.raises(RuntimeError, match="is being written by another run"), Folder(out, overwrite=True):
                pass

    def renamed(*names):
        intrude()
        rename(*names)
        intrude()

    monkeypatch.setattr(os, "rename", renamed)
    assert_prepared(prepare_criteo(tmp_path / "raw.txt", out, overwrite=True), LINES)
    assert len(seen) == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "raw.txt"]


def test_what_a_reader_opens_later_is_of_its_version_or_refused(tmp_path):
    reader = prepare_criteo(raw_file(tmp_path / "old.txt"), tmp_path / "out")
    prepare_criteo(raw_file(tmp_path / "new.txt", random_lines(300, seed=1)), tmp_path / "out", overwrite=True)
    with pytest.raises(
        ValueError, match=r"C1\.npy differs from its checksum: it is damaged, or was replaced while in use"
    ):
        reader.frequencies("C1")
    with pytest.raises(ValueError, match=r"C1\.txt differs from its checksum"):
        reader.vocabulary("C1")
    np.testing.assert_array_equal(reader.split("train").labels, [int(t[0] == "1") for t in LINES][:258])


def test_old_data_that_an_overwrite_left_without_a_name_are_brought_back(tmp_path):
    raw, out = raw_file(tmp_path / "raw.txt"), tmp_path / "out"
    prepare_criteo(raw, out)
    os.rename(out, tmp_path / "out.replaced")  # as if killed between the two renames
    with pytest.raises(FileNotFoundError, match=r"out is not a folder of prepared data: meta\.json is missing"):
        Prepared(out)
    with pytest.raises(FileExistsError, match="out exists"):
        prepare_criteo(raw, out)
    assert_prepared(Prepared(out), LINES)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "raw.txt"]


@pytest.mark.parametrize("while_running", [False, True])
def test_files_of_someone_else_in_the_folder_are_not_overwritten(while_running, tmp_path):
    raw, out = raw_file(tmp_path / "raw.txt"), tmp_path / "out"
    prepare_criteo(raw, out)
    (out / "bags").mkdir()

    def put(*_):
        (out / "bags" / "notes").write_text("precious")

    if not while_running:
        put()
    with pytest.raises(FileExistsError, match="out is not overwritten: it has bags/notes, which quorem did not write"):
        prepare_criteo(raw, out, overwrite=True, progress=put if while_running else None)
    assert_prepared(Prepared(out), LINES)
    os.rename(out / "bags" / "notes", tmp_path / "notes")
    prepare_criteo(raw, out, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "out", "raw.txt"]


@pytest.mark.parametrize("block_bytes", [20_000, 1 << 24])
def test_full_disk(block_bytes, tmp_path):
    raw, disk = raw_file(tmp_path / "raw.txt", LINES * 10), tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if mount is None or subprocess.run([mount, *options], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system: run it as root")
    try:
        (disk / "neighbour").write_text("stays")
        with pytest.raises(OSError, match=r"disk full: [\d,]+ bytes are free; nothing was written: '.*out\.partial"):
            prepare_criteo(raw, disk / "out", block_bytes=block_bytes)
        assert [p.name for p in disk.iterdir()] == ["neighbour"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_array_file_grows_and_is_plain_npy(tmp_path):
    array = ArrayFile(tmp_path / "a.npy", np.int32, (3,))
    rows = np.arange(30, dtype=np.int32).reshape(10, 3)
    for part in (rows[:0], rows[:1], rows[1:7], rows[7:].astype(np.int64)):
        array.append(part)
    with pytest.raises(ValueError, match=r"rows of a\.npy have shape \(2,\) but must have \(3,\)"):
        array.append(rows[:, :2])
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy", allow_pickle=False), rows)
