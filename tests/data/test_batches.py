"""Prepared data as tensors: splits, batches, shuffles, jagged input, and folders that are not whole."""

import json
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import numpy as np
import polars as pl
import torch
from click_logs import random_lines

import quorem
from quorem.data.batches import Batch, ahead
from quorem.data.criteo import prepare_criteo
from quorem.data.prepared import Prepared
from quorem.data.table import prepare_table
from quorem.files import atomic as files

ROWS = 100


@pytest.fixture
def criteo(tmp_path):
    (tmp_path / "raw.txt").write_text("".join(text + "\n" for text in random_lines(ROWS)))
    return prepare_criteo(tmp_path / "raw.txt", tmp_path / "out")


@pytest.fixture
def with_bags(tmp_path):
    rng = np.random.default_rng(0)
    table = pl.DataFrame(
        {
            "click": rng.integers(0, 2, ROWS),
            "user": rng.integers(0, 50, ROWS),
            "tags": [[f"t{i}" for i in rng.integers(0, 20, rng.integers(0, 4))] for _ in range(ROWS)],
            "shop": [f"s{i}" for i in rng.integers(0, 9, ROWS)],
        }
    )
    table.write_parquet(tmp_path / "table.parquet")
    columns = {"label": "click", "categorical": ["user", "tags", "shop"]}
    return prepare_table(tmp_path / "table.parquet", tmp_path / "out", **columns)


def parts(batch: Batch) -> list[torch.Tensor]:
    bags = [t for bag in batch.bags.values() for t in (bag.values, bag.offsets)]
    return [batch.labels, batch.dense, batch.ids, *bags]


def assert_joined(pieces: list[Batch], whole: Batch) -> None:
    for piece, expected in zip(zip(*map(parts, pieces), strict=True), parts(whole), strict=True):
        assert torch.equal(torch.cat(piece), expected)


def test_splits_follow_one_another(criteo):
    splits = [criteo.split(name) for name in ("train", "validation", "test")]
    assert [len(rows) for rows in splits] == [86, 7, 7]
    assert_joined(splits, criteo.all)
    with pytest.raises(ValueError, match=r"split \('dev'\) must be one of 'train', 'validation', 'test'"):
        criteo.split("dev")


def test_batches_in_order_are_views(criteo):
    train = criteo.split("train")
    batches = list(train.batches(32))
    assert [len(batch) for batch in batches] == [32, 32, 22]
    assert_joined(batches, train)
    assert batches[1].ids.data_ptr() == train.ids[32:].data_ptr()
    with pytest.raises(ValueError, match=r"size \(0\) must be at least 1"):
        next(train.batches(0))


def test_writing_to_a_batch_leaves_the_file_alone(criteo):
    before = (criteo.path / "labels.npy").read_bytes()
    criteo.split("train").labels.fill_(7)
    assert (criteo.path / "labels.npy").read_bytes() == before


@pytest.mark.parametrize("data", ["criteo", "with_bags"])
def test_shuffle_is_a_permutation_that_the_seed_decides(data, request):
    train = request.getfixturevalue(data).split("train")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(3))
    rows = [train.rows(i, i + 1) for i in order.tolist()]
    again = [list(train.batches(len(train), seed=3)) for _ in range(2)]
    for (shuffled,) in again:
        assert torch.equal(shuffled.ids, torch.cat([row.ids for row in rows]))
        assert torch.equal(shuffled.labels, torch.cat([row.labels for row in rows]))
        for name, bag in shuffled.bags.items():
            assert torch.equal(bag.values, torch.cat([row.bags[name].values for row in rows]))
            assert bag.offsets.diff().tolist() == [len(row.bags[name].values) for row in rows]
    assert not torch.equal(next(train.batches(len(train), seed=4)).ids, again[0][0].ids)


def test_jagged_input_of_a_collection(with_bags):
    tables = [quorem.Table(n, c, 4) for n, c in zip(with_bags.names, with_bags.cardinalities, strict=True)]
    collection = quorem.EmbeddingCollection(tables, mode="sum")
    batch = next(with_bags.split("train").batches(16))
    values, offsets = batch.jagged(with_bags.names)
    out = collection(values.long(), offsets)
    dense = collection.to_dense()
    torch.testing.assert_close(out[:, 0], dense["user"][batch.ids[:, 0]])
    torch.testing.assert_close(out[:, 2], dense["shop"][batch.ids[:, 1]])
    tags = batch.bags["tags"]
    pooled = torch.nn.functional.embedding_bag(tags.values.long(), dense["tags"], tags.offsets[:-1], mode="sum")
    torch.testing.assert_close(out[:, 1], pooled)
    with pytest.raises(ValueError, match="must be 2 single-valued features"):
        batch.jagged(["user", "tags"])


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def damage_meta(change):
    def damage(path):
        meta = json.loads((path / "meta.json").read_text())
        change(meta)
        del meta["checksum"]
        files.write_json(path / "meta.json", meta)

    return damage


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda p: cut(p / "categorical.npy"), ValueError, r"categorical\.npy is damaged or cut off"),
        (lambda p: (p / "labels.npy").write_bytes(b""), ValueError, r"labels\.npy is damaged or cut off"),
        (lambda p: (p / "labels.npy").unlink(), FileNotFoundError, r"labels\.npy is missing"),
        (lambda p: np.save(p / "labels.npy", np.zeros(100)), ValueError, r"is float64 \(100,\) but meta\.json says"),
        (lambda p: (p / "meta.json").unlink(), FileNotFoundError, "not a folder of prepared data"),
        (lambda p: (p / "meta.json").write_text('{"for'), ValueError, r"meta\.json is damaged"),
        (lambda p: (p / "meta.json").write_text("[]"), ValueError, "must hold a JSON object"),
        (damage_meta(lambda m: m.update(format_version=99)), ValueError, "prepare the data again"),
        (damage_meta(lambda m: m.update(num_rows=101)), ValueError, r"\(100,\) but meta\.json says uint8 \(101,\)"),
        (damage_meta(lambda m: m.update(num_rows=-1)), ValueError, "meta.json is damaged: num_rows .* must be"),
        (damage_meta(lambda m: m["columns"].update(dense=[3])), ValueError, "damaged: columns.dense.* must be"),
        (damage_meta(lambda m: m["columns"].update(categorical=[])), ValueError, "categorical must name"),
        (damage_meta(lambda m: m["columns"].update(bags=["C99"])), ValueError, "bags some of categorical"),
        (damage_meta(lambda m: m["cardinalities"].pop()), ValueError, "cardinalities must be integers"),
        (damage_meta(lambda m: m["split"].update(test=[90, 200])), ValueError, "split must be the rows of train, val"),
    ],
)
def test_folder_that_is_not_whole_is_refused(damage, error, message, criteo):
    damage(criteo.path)
    with pytest.raises(error, match=message):
        Prepared(criteo.path)


def test_reading_ahead_is_abandoned_without_waiting():
    """Closed by the garbage collector while another thread starts, it would wait for a lock of that thread."""
    proceed = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        assert proceed.wait(60)
        yield 2

    reading = ahead(items())
    assert next(reading) == 1
    closing = threading.Thread(target=reading.close)
    closing.start()
    closing.join(30)
    is_closed = not closing.is_alive()
    proceed.set()
    assert is_closed
