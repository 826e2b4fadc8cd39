"""Files whole or not at all: atomic writes, what killed processes left, locks, full disks, checked JSON."""

import os
import signal
import stat
import subprocess
import sys
import threading

import pytest

from quorem.files import atomic as files


def test_a_file_is_replaced_at_once(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    files.write(path, "old")

    def fail(*_):
        raise OSError("stopped before the rename")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="stopped"):
            files.write(path, "new")
    assert path.read_text() == "old"
    files.write(path, "new")
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_a_file_has_the_mode_of_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    files.write(tmp_path / "written", "x")
    assert stat.S_IMODE((tmp_path / "written").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_through_a_symbolic_link_its_target_is_written(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "target")
    files.write(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "elsewhere" / "target").read_text() == "x"


KILLED = """
import os, signal, sys
from quorem.files import atomic as files
with files.replacing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    os.kill(os.getpid(), signal.{signal})
    sys.stdin.read()
"""


def writer(path, number):
    code = KILLED.format(signal=number)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], **pipes)
    assert process.stdout.readline() == "writing\n"
    return process


def test_the_draft_of_a_killed_process_is_written_again_and_that_of_a_living_one_is_not(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    killed = writer(path, "SIGKILL")
    assert killed.wait() == -signal.SIGKILL
    assert (tmp_path / "page.html.tmp").read_text() == "half" and not path.exists()
    files.write(path, "whole")
    assert path.read_text() == "whole" and [p.name for p in tmp_path.iterdir()] == ["page.html"]
    living = writer(path, "SIGCONT")
    monkeypatch.setattr(files, "DRAFT_ATTEMPTS", 2)
    with pytest.raises(files.LockedError, match=r"page.html: another process is writing it"):
        files.write(path, "other")
    assert path.read_text() == "whole"
    living.communicate("")
    assert (living.returncode, path.read_text()) == (0, "half")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_a_full_disk_is_told_and_the_old_file_stays(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs, run it as root: {mounted.stderr.strip()}")
    try:
        files.write(disk / "a", "old")
        with pytest.raises(OSError, match=r"disk full: 100,000 bytes are needed and [\d,]+ bytes are free.*disk/a"):
            files.write(disk / "a", "x" * 100_000)
        assert [(p.name, p.read_text()) for p in disk.iterdir()] == [("a", "old")]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_lock_is_held_by_one_and_released(tmp_path):
    lock = files.Lock(tmp_path / "lock", "taken")
    with pytest.raises(files.LockedError, match="taken"):
        files.Lock(tmp_path / "lock", "taken", attempts=1)
    lock.release()
    lock.release()
    files.Lock(tmp_path / "lock", "taken", attempts=1).release()
    assert (tmp_path / "lock").exists()


def test_a_lock_whose_file_goes_with_it_is_still_one_lock(tmp_path):
    """Threads take the lock in turns; a removed lock file must not let two of them in."""
    inside, most = [], []

    def work():
        for _ in range(50):
            lock = files.Lock(tmp_path / "lock", "taken", attempts=10_000, remove=True)
            inside.append(1)
            most.append(len(inside))
            inside.pop()
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "LOCK_SECONDS", 0)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(most) == 200 and max(most) == 1
    assert list(tmp_path.iterdir()) == []


def test_json_comes_back_and_any_changed_character_is_told(tmp_path):
    path, values = tmp_path / "a.json", {"step": 36, "loss": float("inf"), "names": ["a", "é"]}
    files.write_json(path, values)
    assert files.read_json(path) == values
    path.write_text('{"step": 36}')  # by hand, without a checksum
    assert files.read_json(path) == {"step": 36}
    files.write_json(path, values)
    text = path.read_text()
    key = range(text.index('"checksum"'), text.index('"checksum"') + len('"checksum"'))  # without it there is none
    for at in range(len(text)):
        for new in {"0", '"', chr(ord(text[at]) ^ 1)} - {text[at]}:
            path.write_text(text[:at] + new + text[at + 1 :])
            try:
                same = files.read_json(path) == values
            except ValueError as error:
                same = str(error).startswith(f"{path} is damaged")
            assert same or at in key, (at, new)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "Expecting value"), (b"[1]", "must hold a JSON object"), (b"\xff{}", "can't decode"), (b"[" * 10**5, "")],
)
def test_what_is_no_json_object_is_told_with_its_file(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.json is damaged: .*{message}"):
        files.read_json(tmp_path / "a.json")


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is a pipe and must be a file"):
        files.read(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a folder and must be a file"):
        files.read_json(tmp_path)
    with pytest.raises(ValueError, match="is a device and must be a file"):
        files.check_is_file(files.Path("/dev/null"))
    with pytest.raises(ValueError, match="pipe is a pipe and must be a file"):
        files.write(tmp_path / "pipe", "takes its place")
    assert (tmp_path / "pipe").is_fifo() and os.listdir(tmp_path) == ["pipe"]
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "absent")
