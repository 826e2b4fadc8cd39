"""Raw rows through an encoder are the rows that ``prepare`` wrote."""

import dataclasses
import datetime
from pathlib import Path

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import numpy as np
import polars as pl
import torch

from quorem.data.config import PrepareConfig
from quorem.data.encoder import Encoder
from quorem.data.encoding import KIND, read_encoding, write_encoding
from quorem.data.prepared import Prepared
from quorem.data.table import prepare_table
from quorem.files.tensors import write_tensors

ROWS = 210


def frame() -> pl.DataFrame:
    """Odd tokens, missing values, negative and fractional numbers, lists, and tokens that only the last day has."""
    rng = np.random.default_rng(0)
    odd = ["plain", "back\\slash", "line\nbreak", "carriage\rreturn", "é", "", None, "\\n", "longer than eight bytes"]
    return pl.DataFrame(
        {
            "click": rng.integers(0, 2, ROWS),
            "price": [None if i % 11 == 0 else float(x) for i, x in enumerate(rng.normal(0, 100, ROWS))],
            "age": rng.integers(-5, 90, ROWS),
            "user": [odd[i % len(odd)] for i in range(ROWS)],
            "item": [None if i % 13 == 0 else int(x) for i, x in enumerate(rng.integers(0, 40, ROWS))],
            "late": [f"token {i // 10}" for i in range(ROWS)],
            "tags": [None if i % 17 == 0 else [f"t{j}" for j in range(i % 4)] for i in range(ROWS)],
        }
    )


def prepared(folder: Path, **options: object) -> Prepared:
    frame().write_parquet(folder / "log.parquet")
    columns = {"label": "click", "dense": ["price", "age"], "categorical": ["user", "item", "late", "tags"]}
    config = PrepareConfig(**options)
    return prepare_table(folder / "log.parquet", folder / "log", **columns, config=config)


def encoder(data: Prepared, folder: Path, **options: object) -> Encoder:
    write_encoding(folder / "encoding", data, "identity")
    return Encoder(*read_encoding(folder / "encoding"), **options)


OPTIONS = [{}, {"ids": "appearance"}, {"vocabulary": "train"}, {"transform": "log"}]


@pytest.mark.parametrize("options", OPTIONS, ids=["frequency", "appearance", "train", "log"])
def test_rows_are_those_that_were_prepared(options: dict[str, object], tmp_path: Path) -> None:
    data = prepared(tmp_path, **options)
    encode = encoder(data, tmp_path)
    for rows in (frame(), frame().to_dict(as_series=False)):
        batch = encode(rows)
        assert torch.equal(batch.dense, data.all.dense) and torch.equal(batch.ids, data.all.ids)
        assert torch.equal(batch.bags["tags"].offsets, data.all.bags["tags"].offsets)
        assert torch.equal(batch.bags["tags"].values, data.all.bags["tags"].values)


def rows(**changed: object) -> dict[str, list[object]]:
    one = {"price": [1.5], "age": [3], "user": ["plain"], "item": [7], "late": ["token 0"], "tags": [["t1"]]}
    return {**one, **changed}


def test_tokens_that_no_training_row_had(tmp_path: Path) -> None:
    data = prepared(tmp_path)
    strict = encoder(data, tmp_path)
    with pytest.raises(ValueError, match=r"late \('token 99'\) is not in the vocabulary of the training data"):
        strict(rows(late=["token 99"]))
    with pytest.raises(ValueError, match=r"tags \('new'\) is not in the vocabulary"):
        strict(rows(tags=[["t1", "new"]]))
    lenient = encoder(data, tmp_path, unknown="missing")
    batch = lenient(rows(late=["token 99"], tags=[["new", "t1", "newer"]]))
    assert batch.ids[0, 2] == 0 and batch.bags["tags"].values.tolist()[::2] == [0, 0]
    assert lenient.unseen_counts == {"user": 0, "item": 0, "late": 1, "tags": 2}
    (tmp_path / "train").mkdir()
    known = encoder(prepared(tmp_path / "train", vocabulary="train"), tmp_path)
    assert known(rows(late=["token 99"])).ids[0, 2] == 1


def test_numbers_and_lists_as_text(tmp_path: Path) -> None:
    encode = encoder(prepared(tmp_path, transform="none"), tmp_path)
    known = encode(rows(price=[1.5], age=[None], tags=[["t1", "t2"]]))
    text = encode(rows(price=[" 1.5"], age=["NA"], tags=["t1|t2"]))
    assert torch.equal(text.dense, known.dense)
    assert torch.equal(text.bags["tags"].values, known.bags["tags"].values)
    assert not encode(rows(price=[float("inf")])).dense[0, 0]  # a missing number
    with pytest.raises(ValueError, match=r"price \(1e\+39\) must be at most 3.403e\+38, as float32"):
        encode(rows(price=[1e39]))


def test_one_row_and_no_row(tmp_path: Path) -> None:
    encode = encoder(prepared(tmp_path), tmp_path)
    assert len(encode(rows())) == 1
    empty = encode({name: [] for name in rows()} | {"tags": pl.Series([], dtype=pl.List(pl.String))})
    assert len(empty) == 0 and empty.bags["tags"].offsets.tolist() == [0]
    missing = encode({name: [None] for name in rows()} | {"tags": pl.Series([None], dtype=pl.List(pl.String))})
    assert missing.ids.tolist() == [[0, 0, 0]] and not missing.dense.any()
    assert missing.bags["tags"].offsets.tolist() == [0, 0]


def test_a_category_is_the_same_in_any_type(tmp_path: Path) -> None:
    encode = encoder(prepared(tmp_path), tmp_path)
    known = encode(rows(item=[7], user=["plain"], tags=[["t1", "t2"]]))
    two = {name: values * 2 for name, values in rows().items()}
    array = np.array([["t1", "t2"], ["t1", "t2"]])
    same = encode(two | {"item": np.array([7.0, np.nan]), "user": [b"plain"] * 2, "tags": array})
    assert torch.equal(same.ids[:1], known.ids) and same.ids[1, 1] == 0  # NaN is a missing value
    assert same.bags["tags"].values.tolist() == 2 * known.bags["tags"].values.tolist()

    class Stream:  # as the tables of Arrow and pandas offer it
        def __arrow_c_stream__(self, schema: object = None) -> object:
            return pl.DataFrame(rows(item=[7], user=["plain"], tags=[["t1", "t2"]])).__arrow_c_stream__(schema)

    assert torch.equal(encode(Stream()).ids, known.ids)
    with pytest.raises(TypeError, match=r"rows \(list\) must be a mapping of columns, or a data frame"):
        encode([rows()])


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"age": ["old"]}, r"age \('old'\) must be a number"),
        ({"age": [datetime.date(2024, 1, 1)]}, "age is Date but must be numeric"),
        ({"user": [["a"]]}, "user holds lists but must hold one value a row"),
        ({"user": [b"\xff"]}, "user holds bytes that are not UTF-8"),
        ({"user": [{"a": 1}]}, "user is Struct.* but must hold text or numbers"),
        ({"age": [1, 2]}, "rows must be columns of one length and of one type each"),
        ({"user": ["a", 3]}, "rows must be columns of one length and of one type each"),
    ],
)
def test_rows_of_the_wrong_kind(changed: dict[str, object], match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        encoder(prepared(tmp_path), tmp_path)(rows(**changed))


def test_a_missing_column(tmp_path: Path) -> None:
    given = {name: values for name, values in rows(other=[1]).items() if name not in ("late", "age")}
    with pytest.raises(ValueError, match="rows have no column age, late"):
        encoder(prepared(tmp_path), tmp_path)(given)


def test_damaged_encodings(tmp_path: Path) -> None:
    data = prepared(tmp_path)
    write_encoding(tmp_path / "encoding", data, "identity")
    encoding, texts = read_encoding(tmp_path / "encoding")
    assert encoding.meta == dataclasses.replace(data.meta, checksums={})
    whole = dataclasses.asdict(encoding)
    wrongs = {"cardinalities": [1], "transforms": {"price": "log"}, "first_token_id": 7, "separator": "ab"}
    wrongs |= {"columns": whole["meta"]["columns"] | {"bags": ["price"]}}
    for wrong in [*({"meta": whole["meta"] | {name: value}} for name, value in wrongs.items()), {"num_seen": []}]:
        write_tensors(tmp_path / "wrong", KIND, texts, whole | wrong)
        with pytest.raises(ValueError, match="wrong is damaged"):
            read_encoding(tmp_path / "wrong")
    write_tensors(tmp_path / "wrong", KIND, {name: texts[name] for name in list(texts)[1:]}, whole)
    with pytest.raises(ValueError, match="wrong is damaged: its vocabularies are not those of its columns"):
        read_encoding(tmp_path / "wrong")
    write_tensors(tmp_path / "wrong", KIND, texts | {"user": texts["user"][:6]}, whole)
    with pytest.raises(ValueError, match=r"the vocabulary of user has \d+ tokens for \d+ ids"):
        Encoder(*read_encoding(tmp_path / "wrong"))


def test_made_up_data_hold_ids(log: Prepared, tmp_path: Path) -> None:
    columns = {name: log.all.dense[:, k].tolist() for k, name in enumerate(log.dense_names)}
    columns |= {name: log.all.ids[:, k].tolist() for k, name in enumerate(log.names)}
    encode = encoder(log, tmp_path)
    batch = encode(columns)
    assert torch.equal(batch.ids, log.all.ids) and torch.equal(batch.dense, log.all.dense)
    assert torch.equal(encode(columns | {"C1": [str(i) for i in columns["C1"]]}).ids, log.all.ids)  # from a CSV file
    row = {name: values[:1] for name, values in columns.items()}
    for wrong in (400, -1, "a", 2**63):
        with pytest.raises(ValueError, match=rf"C1 \('{wrong}'\) is not in the vocabulary"):
            encode(row | {"C1": [wrong]})
    other = encoder(log, tmp_path, policies={"C1": "rest"}, unknown="missing")
    assert other(row | {"C1": [400], "C2": [2**63]}).ids[0, :2].tolist() == [-1, 0]
    assert other.unseen_counts["C1"] == other.unseen_counts["C2"] == 1
