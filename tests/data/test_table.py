"""``prepare_table`` on CSV and Parquet: quoting, lists, types, malformed lines and missing columns."""

import math

import polars as pl
import pytest

from quorem.data.prepare import PrepareConfig
from quorem.data.table import prepare_table

COLUMNS = {"label": "click", "dense": ["price"], "categorical": ["user", "tags", "shop"]}

CSV = '''click,ignored,price,user,tags,shop
1,x,2.5,u1,a|b,"north, old"
0,,,u2,,"say ""hi"""
1,y,-3,u1,b||c,"two
lines"
0,z,nan,,a,""
'''


def prepared(tmp_path, text, name="table.csv", **options):
    (tmp_path / name).write_text(text, newline="")
    return prepare_table(tmp_path / name, tmp_path / "out", **{**COLUMNS, "multi": ["tags"], **options})


def check_contents(result, log=True):
    assert result.all.labels.tolist() == [1, 0, 1, 0]
    raw = [2.5, 0, -3, 0]
    expected = [math.log(max(x, 0) + 1) if log else x for x in raw]
    assert result.all.dense[:, 0].tolist() == pytest.approx(expected, rel=2**-23)
    assert result.all.ids[:, 0].tolist() == [1, 2, 1, 0]
    assert result.all.bags["tags"].values.tolist() == [1, 2, 2, 0, 3, 1]
    assert result.all.bags["tags"].offsets.tolist() == [0, 2, 2, 5, 6]
    assert result.cardinalities == [3, 4, 4]
    assert result.vocabulary("user") == [None, "u1", "u2"]
    assert result.vocabulary("tags") == [None, "a", "b", "c"]
    assert result.vocabulary("shop") == [None, "north, old", 'say "hi"', "two\nlines"]
    assert result.frequencies("tags").tolist() == [1, 1, 2, 1]  # of the first three rows


@pytest.mark.parametrize("block_bytes", [40, 1 << 26])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv(end, block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr("quorem.data.prepare.GROUP_ROWS", 2)
    result = prepared(tmp_path, CSV.replace("\n", end), config=PrepareConfig(days=4), block_bytes=block_bytes)
    if end == "\r\n":
        assert result.vocabulary("shop")[-1] == "two\r\nlines"
    else:
        check_contents(result)


def test_dense_features_as_they_are(tmp_path):
    check_contents(prepared(tmp_path, CSV, config=PrepareConfig(days=4, log_dense=False)), log=False)


def test_other_separators(tmp_path):
    text = CSV.replace(",", ";").replace("north;", "north,").replace("|", " ")
    check_contents(prepared(tmp_path, text, separator=";", multi_separator=" ", config=PrepareConfig(days=4)))


def parquet(path):
    pl.DataFrame(
        {
            "shop": pl.Series(["north, old", 'say "hi"', "two\nlines", None], dtype=pl.Categorical),
            "tags": [["a", "b"], None, ["b", None, "c"], ["a"]],
            "user": ["u1", "u2", "u1", ""],
            "price": pl.Series([2.5, None, -3, math.nan], dtype=pl.Float32),
            "click": [True, False, True, None],
        }
    ).write_parquet(path)


def test_parquet(tmp_path):
    parquet(tmp_path / "t.parquet")
    check_contents(prepare_table(tmp_path / "t.parquet", tmp_path / "out", config=PrepareConfig(days=4), **COLUMNS))


def test_parquet_in_several_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("quorem.data.table.PARQUET_ROWS", 1)
    monkeypatch.setattr("quorem.data.prepare.GROUP_ROWS", 2)
    parquet(tmp_path / "t.parquet")
    check_contents(prepare_table(tmp_path / "t.parquet", tmp_path / "out", config=PrepareConfig(days=4), **COLUMNS))


def test_integer_categories(tmp_path):
    codes = {f"u{bits}": pl.Series([7, 7, None], dtype=getattr(pl, f"UInt{bits}")) for bits in (8, 32, 64)}
    table = pl.DataFrame({"y": [0, 1, 1], "id": [2**40, -1, 2**40], **codes, "large": [2**63, 5, 5]})
    table = table.with_columns(pl.col("large").cast(pl.UInt64))
    table.write_parquet(tmp_path / "t.parquet")
    names = ["id", *codes, "large"]
    result = prepare_table(tmp_path / "t.parquet", tmp_path / "out", label="y", categorical=names)
    assert result.all.ids.tolist() == [[1, 1, 1, 1, 1], [2, 1, 1, 1, 2], [1, 0, 0, 0, 2]]
    assert result.vocabulary("id") == [None, str(2**40), "-1"]
    assert all(result.vocabulary(name) == [None, "7"] for name in codes)
    assert result.vocabulary("large") == [None, str(2**63), "5"]


def test_column_names_may_be_anything(tmp_path):
    pl.DataFrame({"y": [0, 1], "../a/b": ["x", "y"], "é": ["p", "p"]}).write_parquet(tmp_path / "t.parquet")
    result = prepare_table(tmp_path / "t.parquet", tmp_path / "out", label="y", categorical=["../a/b", "é"])
    assert result.vocabulary("../a/b") == [None, "x", "y"]
    assert result.frequencies("é").tolist() == [0, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "t.parquet"]


def test_malformed_lines_of_a_csv(tmp_path):
    lines = CSV.splitlines(keepends=True)
    bad = ["1,x,2,u\n", "1,x,abc,u,t,s\n", '2,x,1,u,"quoted, comma",s\n', "1,x,inf,u,t,s\n"]
    config = PrepareConfig(days=4)
    result = prepared(tmp_path, "".join([*lines[:3], *bad, *lines[3:]]), config=config)
    assert result.meta["malformed"]["count"] == 4
    assert result.meta["malformed"]["first"] == [
        [4, "4 fields where 6 are expected"],
        [5, "price is not a number"],
        [6, "click is neither 0 nor 1"],
        [7, "price is not finite"],
    ]
    check_contents(result)


def test_malformed_rows_of_a_parquet(tmp_path):
    pl.DataFrame({"y": [0, 5, 1], "c": ["a", "b", "c"]}).write_parquet(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"t\.parquet has 1 malformed rows so far.*row 2: y is neither 0 nor 1"):
        strict = PrepareConfig(max_malformed=0)
        prepare_table(tmp_path / "t.parquet", tmp_path / "out", label="y", categorical=["c"], config=strict)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "clock"}, r"has no column clock; it has click, ignored, price, user, tags, shop"),
        ({"dense": ["price", "price"]}, r"names of columns \('price'\) must be unique"),
        ({"dense": ["user"], "categorical": ["user"], "multi": []}, r"names of columns \('user'\) must be unique"),
        ({"categorical": [], "multi": []}, "categorical must name at least one column"),
        ({"multi": ["price"]}, r"multi \(price\) must be among the categorical columns"),
        ({"separator": "::"}, r"separator \('::'\) must be one ASCII character"),
        ({"multi_separator": ""}, r"multi_separator \(''\) must be one ASCII character"),
    ],
)
def test_wrong_arguments_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, CSV, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["table.csv"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("click,price,user,tags,shop\n", "has no well-formed rows"),
        ("click,price,user,tags,shop,user\n1,1,a,b,c,d\n", "has more than one column user"),
    ],
)
def test_unusable_csv_is_refused(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, text)


def test_text_is_no_dense_feature(tmp_path):
    parquet(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"shop of .* is Categorical.* but must be numeric"):
        prepare_table(tmp_path / "t.parquet", tmp_path / "out", label="click", dense=["shop"], categorical=["user"])
