"""What the columns and the separator of a file are taken for."""

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import polars as pl

from quorem.data.config import PrepareConfig
from quorem.data.infer import ROWS, infer
from quorem.data.source import open_source
from quorem.data.table import prepare_table


def infer_columns(path):
    source = open_source(path)
    return infer(source.first_rows(list(source.schema), ROWS))


def test_columns_are_taken_for_what_they_look_like(tmp_path):
    rows = [
        f"{k % 3 > 0},{k},{k / 4},{k * 7},{k},{k:05},{k % 5},word{k % 6},{'a|b' if k % 2 else 'c'},NA,x|{k}"
        f",2024-01-{1 + k % 28:02}"
        for k in range(100)
    ]
    header = "y,row,price,clicks,user_id,postcode,weekday,shop,tags,nothing,rare,when"
    (tmp_path / "t.csv").write_text("\n".join([header, *rows]).replace("x|7", "x/7") + "\n")
    inferred = {c.name: (c.kind, c.reason) for c in infer_columns(tmp_path / "t.csv")}
    assert inferred == {
        "y": ("category", "text"),
        "row": ("number", "whole numbers"),
        "price": ("number", "numbers with fractions"),
        "clicks": ("number", "whole numbers"),
        "user_id": ("category", "whole numbers under a name of ids"),
        "postcode": ("category", "whole numbers with leading zeros"),
        "weekday": ("category", "whole numbers, only 5 of them"),
        "shop": ("category", "text"),
        "tags": ("list", "50% of the texts have '|' in them"),
        "nothing": ("none", "no value in the first 100,000 rows"),
        "when": ("none", "times: --time when splits the rows by them"),
        "rare": ("list", "89% of the texts have '|' in them"),
    }
    result = prepare_table(tmp_path / "t.csv", tmp_path / "out", label="y", time="row")
    assert result.dense_names == ["price", "clicks"]
    assert result.names == ["user_id", "postcode", "weekday", "shop", "tags", "rare"]
    assert result.meta.columns.bags == ("tags", "rare")
    assert result.all.labels.tolist() == [int(k % 3 > 0) for k in range(100)]


def test_columns_of_a_parquet_file_are_taken_for_their_types(tmp_path):
    values = {
        "when": (pl.Series([1, 2]).cast(pl.Datetime), "none"),
        "list": ([[1], [2, 3]], "list"),
        "flag": ([True, None], "category"),
        "x": ([0.5, None], "number"),
        "text": (["a", ""], "category"),
        "struct": ([{"a": 1}, {"a": 2}], "none"),
    }
    pl.DataFrame({name: column for name, (column, _) in values.items()}).write_parquet(tmp_path / "t.parquet")
    inferred = {c.name: c.kind for c in infer_columns(tmp_path / "t.parquet")}
    assert inferred == {name: kind for name, (_, kind) in values.items()}


def test_numbers_that_a_parquet_file_has_as_text_are_prepared_as_such(tmp_path):
    table = pl.DataFrame({"y": [0, 1, 1], "x": ["1.5", "NA", " 2.5"], "user": ["a", "b", "a"]})
    table.write_parquet(tmp_path / "t.parquet")
    result = prepare_table(tmp_path / "t.parquet", tmp_path / "out", label="y", config=PrepareConfig(transform="none"))
    assert (result.dense_names, result.all.dense[:, 0].tolist()) == (["x"], [1.5, 0, 2.5])


def test_what_spoils_a_column_of_numbers_is_named(tmp_path):
    (tmp_path / "t.csv").write_text("x,name\n" + "??,2\n" + "1.5,b\n" * 3)
    number, name = infer_columns(tmp_path / "t.csv")
    assert number.reason == "text: 75% are numbers, but not '??'; if that is a missing number: --missing"
    assert (name.kind, name.reason) == ("category", "text")


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_is_the_one_that_makes_the_label_a_column(tmp_path, separator):
    (tmp_path / "t.csv").write_text(separator.join(["y", "x,z;" if separator == "|" else "x"]) + "\n")
    assert open_source(tmp_path / "t.csv", column="y").separator == separator
    most_columns = "," if separator == "|" else separator
    assert open_source(tmp_path / "t.csv", column="nothing").separator == most_columns


def test_a_file_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "t.csv").write_bytes("y,user\n1,é\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"t.csv has no line that can be read: line 2: not UTF-8"):
        infer_columns(tmp_path / "t.csv")
