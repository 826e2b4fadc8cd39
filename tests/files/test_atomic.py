"""Files whole or not at all: atomic writes, what killed processes left, locks, full disks, checked JSON."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import pytest
from limits import small_disk
from processes import python

from quorem.files import atomic as files
from quorem.files import provenance
from quorem.files.checked_json import build


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
    with small_disk(tmp_path / "disk", "64k") as disk:
        files.write(disk / "a", "old")
        with pytest.raises(OSError, match=r"disk full: 100,000 bytes are needed and [\d,]+ bytes are free.*disk/a"):
            files.write(disk / "a", "x" * 100_000)
        assert [(p.name, p.read_text()) for p in disk.iterdir()] == [("a", "old")]


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


ROOT = Path(__file__).parents[2]


def test_the_commit_is_that_of_the_checkout():
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True).stdout.strip()

    if not git("ls-files", "src/quorem/__init__.py"):  # no checkout, or that of another project around this one
        pytest.skip("needs a checkout of the repository, and git: git clone")
    changed = git("status", "--porcelain", "src/quorem")
    assert provenance.commit() == git("rev-parse", "HEAD")[:12] + "+" * bool(changed)


def test_without_git_or_a_checkout_there_is_no_commit(tmp_path):
    code = "from quorem.files import provenance; print(provenance.commit())"
    assert python("-c", code, env={"PATH": str(tmp_path)}).strip() == "None"


@dataclass(frozen=True)
class Inner:
    size: int
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size ({self.size}) must be at least 1")


@dataclass(frozen=True)
class Outer:
    name: str
    flag: bool
    inner: list[Inner]
    pair: tuple[int, float]
    names: tuple[str, ...] = ()
    mode: Literal["sum", "mean"] = "sum"
    bits: Literal[8, 4] | None = None
    by_name: Mapping[str, Inner] | None = None
    either: int | str = 0
    forms: Mapping[str, Inner] | tuple[str, ...] = ()
    ratio: Fraction = Fraction(1)
    free: Any = None


GOOD: dict[str, Any] = {
    "name": "a",
    "flag": True,
    "inner": [{"size": 2}, {"size": 3, "share": 1}],
    "pair": [1, 2.5],
    "names": ["x", "y"],
    "mode": "mean",
    "bits": 4,
    "by_name": {"k": {"size": 1}},
    "either": "word",
    "free": {"any": [1, None]},
}


def outer(**changes: Any) -> Outer:
    values = json.loads(json.dumps(GOOD | changes))
    return build(Outer, {k: v for k, v in values.items() if v != "ABSENT"}, converters={Fraction: Fraction})


def test_everything_that_fits() -> None:
    built = outer(ratio="2/3")
    assert built.inner == [Inner(2), Inner(3, 1)] and built.by_name == {"k": Inner(1)}
    assert built.pair == (1, 2.5) and built.names == ("x", "y") and built.ratio == Fraction(2, 3)
    assert asdict(outer(by_name="ABSENT", bits=None)) | {"by_name": None} == asdict(outer(by_name=None, bits="ABSENT"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 3}, r"^name \(3\) must be a string$"),
        ({"name": "ABSENT"}, r"^name is missing$"),
        ({"nam": "a"}, r"^nam is not known: Outer has name, flag, "),
        ({"flag": 1}, r"^flag \(1\) must be true or false$"),
        ({"inner": {}}, r"^inner \(\{\}\) must be a list$"),
        ({"inner": [{"size": 2}, {"size": "2"}]}, r"^inner\[1\]\.size \('2'\) must be an integer$"),
        ({"inner": [{"size": True}]}, r"^inner\[0\]\.size \(True\) must be an integer$"),
        ({"inner": [{"size": 2**64}]}, r"^inner\[0\]\.size \(18446744073709551616\) must be an integer$"),
        ({"inner": [{"size": 0}]}, r"^inner\[0\]: size \(0\) must be at least 1$"),
        ({"inner": [7]}, r"^inner\[0\] \(7\) must be an object$"),
        ({"inner": [{"size": 1, "share": None}]}, r"^inner\[0\]\.share \(None\) must be a number$"),
        ({"pair": [1]}, r"^pair \(\[1\]\) must be a list of 2 values$"),
        ({"pair": [1, "x"]}, r"^pair\[1\] \('x'\) must be a number$"),
        ({"mode": "max"}, r"^mode \('max'\) must be one of 'sum', 'mean'$"),
        ({"bits": 8.0}, r"^bits \(8.0\) must be one of 8, 4$"),
        ({"by_name": {"k": {}}}, r"^by_name\.k\.size is missing$"),
        ({"either": []}, r"^either \(\[\]\) must be an integer or a string$"),
        ({"forms": {"k": {"size": "1"}}}, r"^forms\.k\.size \('1'\) must be an integer$"),
        ({"forms": 3}, r"^forms \(3\) must be an object or a list$"),
        ({"ratio": "x"}, r"^ratio: Invalid literal for Fraction: 'x'$"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        outer(**changes)


def test_values_that_are_no_object() -> None:
    with pytest.raises(ValueError, match=r"^it \(\[1\]\) must be an object$"):
        build(Inner, [1])
