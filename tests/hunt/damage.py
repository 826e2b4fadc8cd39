"""Damaged files: each is told in one line that names it, or the result is that of the whole file.

``PYTHONPATH=tests python -m hunt.damage --files 1500`` prints its figures as JSON.
A file is damaged in one way (``DAMAGES``), then what reads it is run. The outcomes are

told        one line, or a warning, which names the file or its folder
same        the result of the whole file: the damage was to nothing that counts, or an earlier checkpoint was taken
changed     another result, of a file that may say so: text of a user's, or JSON changed together with its checksum
wrong       another result, and no word
unnamed     an error that names neither the file nor its folder
traceback   an exception that no one is meant to see
hang        no end within a minute
executed    code that the file holds was run

What reads a file may not take a gigabyte more than it has: one that allocates what a file declares ends in a traceback.
"""

import contextlib
import gzip
import io
import os
import random
import shutil
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import polars as pl
import torch
import typer
from hunt.command import main
from hunt.damages import DAMAGES, EXECUTED
from hunt.kills import trained
from limits import limited_memory
from runs_of_training import StopAt, small_log, small_run

from quorem import EmbeddingCollection, HotCold, Pool, Table, quantize_, schemes
from quorem.cli.errors import plain_errors
from quorem.data.config import PrepareConfig
from quorem.data.criteo import prepare_criteo
from quorem.data.encoding import read_encoding
from quorem.data.prepared import Prepared
from quorem.data.raw import write_raw
from quorem.data.synthetic import ClickLog
from quorem.data.table import prepare_table
from quorem.experiments import reproduce
from quorem.files import tensors as tensor_file
from quorem.files.saved_model import load, save
from quorem.models import DLRM
from quorem.training import run
from quorem.training.loop import train

FINE = ("told", "same", "changed")
SECONDS = 60
SPARE_BYTES = 1 << 30


@dataclass(frozen=True)
class Target:
    """Something that is read: where its files are, which of them are damaged, and what reads them."""

    name: str
    folder: Path
    pattern: str
    read: Callable[[Path], Any]  # is given a copy of the folder
    may_change: bool = False
    may_vanish: bool = False  # a file may be absent, and is then made again or counted as missing


class HangError(BaseException):
    """What was run does not come to an end."""


def damage(path: Path, how: str, rng: random.Random) -> None:
    data = path.read_bytes()
    path.unlink()
    if how in DAMAGES:
        path.write_bytes(DAMAGES[how](data, rng) if data else rng.randbytes(3))
    elif how == "empty":
        path.touch()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()


ACCIDENTS = [how for how in DAMAGES if how != "pickled"]
HOWS = [*DAMAGES, *ACCIDENTS, "empty", "missing", "pipe", "folder"]


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """A limit on time and on memory."""

    def stop(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with limited_memory(SPARE_BYTES):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(target: Target, how: str, folder: Path, expected: Any) -> tuple[str, str]:
    """What comes of reading a damaged copy, and a word on it."""
    errors = io.StringIO()
    try:
        with limited(SECONDS), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with contextlib.redirect_stderr(errors), plain_errors():
                result = target.read(folder)
    except typer.Exit:
        text = errors.getvalue().strip()
        named = str(folder) in text and len(text.splitlines()) == 1
        return ("told" if named else "unnamed"), text
    except HangError:
        return "hang", ""
    except BaseException as error:
        return "traceback", f"{type(error).__name__}: {error}"
    if result == expected:
        return "same", ""
    if any(str(folder) in str(word.message) for word in said):
        return "told", ""
    if target.may_change or how.startswith("change_") or (target.may_vanish and how == "missing"):
        return "changed", ""
    return "wrong", f"{result} and not {expected}"


def hunt(count: int, seed: int = 0) -> dict[str, Any]:
    """Damage so many files, of all targets in turn, and say what came of it."""
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = targets(Path(scratch) / "whole")
        expected = {target.name: target.read(copied(target, Path(scratch) / "expected")) for target in every}
        rng, bad = random.Random(seed), []
        by_target: dict[str, Counter[str]] = {target.name: Counter() for target in every}
        by_damage: dict[str, Counter[str]] = {how: Counter() for how in HOWS}
        for number in range(count):
            target, how = every[number % len(every)], HOWS[number // len(every) % len(HOWS)]
            copy = copied(target, Path(scratch) / "copy")
            path = rng.choice(sorted(path for path in copy.rglob(target.pattern) if path.is_file()))
            damage(path, how, rng)
            kind, word = outcome(target, how, copy, expected[target.name])
            if EXECUTED.exists():
                EXECUTED.rmdir()
                kind = "executed"
            by_target[target.name][kind] += 1
            by_damage[how][kind] += 1
            if kind not in FINE:
                where = {"target": target.name, "file": str(path.relative_to(copy)), "damage": how}
                bad.append({**where, kind: word[:300]})
            shutil.rmtree(copy)
    total = sum(by_target.values(), Counter())
    return {"outcomes": total, "by_target": by_target, "by_damage": by_damage, "bad": bad}


def copied(target: Target, folder: Path) -> Path:
    return Path(shutil.copytree(target.folder, folder / target.name))


def targets(folder: Path) -> list[Target]:
    """Data, runs, sweeps and files of a user's, whole."""
    folder.mkdir()
    table = folder / "table"
    table.mkdir()
    rows = [f'{k % 2},{k / 8 - 20},u{k % 13},{"a|b" if k % 3 else ""},"t{k % 5}"' for k in range(400)]
    (table / "table.csv").write_text("\n".join(["y,x,user,tags,shop", *rows]) + "\n")
    columns = {"label": "y", "dense": ["x"], "categorical": ["user", "tags", "shop"], "multi": ["tags"]}
    prepared = prepare_table(table / "table.csv", folder / "prepared" / "data", **columns)
    config = small_run(prepared, batch_size=32, scheme=schemes.QR(2))

    def trained_on(copy: Path) -> Any:
        data = Prepared(copy / "data")
        for name in data.names:
            data.vocabulary(name)
            data.frequencies(name)
        return train(config, data)["test"]

    def verified(copy: Path) -> None:
        Prepared(copy / "data").verify()

    log = small_log(folder / "log", 600)
    training = small_run(log, validate_every=3, optimizer="amsgrad", epochs=2)
    for steps in (9, 3):
        with contextlib.suppress(KeyboardInterrupt):
            train(training, log, folder / "stopped" / "run", stop=StopAt(steps))
    train(training, log, folder / "finished" / "run")

    def resumed(copy: Path) -> Any:
        result = train(training, log, copy / "run")
        return result["test"], run.read_metrics(copy / "run" / "metrics.jsonl").lines

    def finished(copy: Path) -> Any:
        result = train(training, log, copy / "run")
        metrics = run.read_metrics(copy / "run" / "metrics.jsonl")
        if metrics.damaged or not metrics.is_final:
            raise ValueError(f"{copy} has damaged metrics")
        state = load(copy / "run" / run.MODEL).state_dict()
        encoding, _ = read_encoding(copy / "run" / run.ENCODING)
        checksums = {name: tensor_file.checksum(tensor) for name, tensor in state.items()}
        return result["test"], metrics.lines, checksums, encoding

    trained(folder, folder / "sweep")

    def prepared_by(make: Callable[[Path, Path], Prepared]) -> Callable[[Path], Any]:
        def read(copy: Path) -> Any:
            with tempfile.TemporaryDirectory(dir=copy.parent) as out:
                return make(copy, Path(out) / "data").checksums()

        return read

    def prepared_again(name: str) -> Callable[[Path], Any]:
        config = PrepareConfig(max_malformed=3)
        return prepared_by(lambda copy, out: prepare_table(copy / name, out, **columns, config=config))

    frame = pl.read_csv(table / "table.csv")
    (folder / "packed").mkdir()
    (folder / "parquet").mkdir()
    (folder / "packed" / "table.csv.gz").write_bytes(gzip.compress((table / "table.csv").read_bytes()))
    frame.with_columns(pl.col("tags").str.split("|")).write_parquet(folder / "parquet" / "table.parquet")
    (folder / "raw").mkdir()
    write_raw(ClickLog(cardinalities=(30,) * 26), 200, folder / "raw" / "raw.txt")

    def criteo(copy: Path, out: Path) -> Prepared:
        return prepare_criteo(copy / "raw.txt", out)

    (folder / "models").mkdir()
    for bits in (0, 8, 4):
        save(hot_and_cold_network(bits), folder / "models" / f"bits-{bits}")

    def scored(copy: Path) -> Any:
        dense, ids = torch.full((4, 2), 0.5), torch.arange(12).view(4, 3)
        with torch.no_grad():
            return [load(copy / f"bits-{bits}")(dense, ids).tolist() for bits in (0, 8, 4)]

    return [
        Target("models", folder / "models", "*", scored),
        Target("prepared", folder / "prepared", "*.npy", trained_on),
        Target("meta", folder / "prepared", "meta.json", trained_on),
        Target("verified", folder / "prepared", "*.*", verified),
        Target("checkpoint", folder / "stopped", "*.safetensors", resumed),
        Target("stopped", folder / "stopped", "*.json*", resumed),
        Target("finished", folder / "finished", "*.*", finished),
        Target("sweep", folder / "sweep", "*.json*", reproduce.figures_in, may_vanish=True),
        Target("csv", table, "*.csv", prepared_again("table.csv"), may_change=True),
        Target("gzip", folder / "packed", "*.gz", prepared_again("table.csv.gz"), may_change=True),
        Target("parquet", folder / "parquet", "*.parquet", prepared_again("table.parquet"), may_change=True),
        Target("criteo", folder / "raw", "*.txt", prepared_by(criteo), may_change=True),
    ]


def hot_and_cold_network(bits: int) -> DLRM:
    """A network with hot and cold ids, a pool, and raw ids; rows in few bits unless ``bits`` is 0."""
    counts = torch.arange(60)
    tables = [
        Table("user", 60, 4, HotCold(5, cold=Pool(30), num_rest=10), frequencies=counts, unknown="rest"),
        Table("item", 60, 4, HotCold(3, cold=Pool(30)), frequencies=counts, unknown="hash"),
        Table("word", 2**40, 4, schemes.GeneralizedQR(4), raw_ids=True),
    ]
    torch.manual_seed(0)
    model = DLRM(EmbeddingCollection(tables), num_dense=2, bottom=(3,), top=(3,))
    return quantize_(model, bits) if bits else model


if __name__ == "__main__":
    main(hunt, __doc__, "files", 1500)
