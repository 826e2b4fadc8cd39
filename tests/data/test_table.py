"""``prepare_table`` on CSV and Parquet: quoting, lists, types, malformed lines and missing columns."""

import datetime
import math
import os
import random
import re
import subprocess
import sys

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import polars as pl
import torch

from quorem.data.columns import Columns, choose_columns, infer
from quorem.data.config import PrepareConfig
from quorem.data.source import open_source
from quorem.data.table import prepare_table

FOUR_DAYS = PrepareConfig(ids="appearance", days=4)
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


TRANSFORMS = {
    "log": lambda x: math.log(max(x, 0) + 1),
    "signed_log": lambda x: math.log(x + 1) if x > 0 else -math.log(-x + 1),
    "none": lambda x: x,
}


def check_contents(result, transform="signed_log"):
    assert result.all.labels.tolist() == [1, 0, 1, 0]
    expected = list(map(TRANSFORMS[transform], [2.5, 0, -3, 0]))
    assert result.meta["transforms"] == {"price": transform}
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
    result = prepared(tmp_path, CSV.replace("\n", end), config=FOUR_DAYS, block_bytes=block_bytes)
    if end == "\r\n":
        assert result.vocabulary("shop")[-1] == "two\r\nlines"
    else:
        check_contents(result)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_dense_features(transform, tmp_path):
    check_contents(
        prepared(tmp_path, CSV, config=PrepareConfig(ids="appearance", days=4, transform=transform)), transform
    )
    single = PrepareConfig(ids="appearance", days=4, transform="log", transforms={"price": transform})
    check_contents(prepared(tmp_path, CSV, config=single, overwrite=True), transform)


def test_what_a_float32_does_not_hold_is_malformed(tmp_path):
    config = PrepareConfig(ids="appearance", days=4, transform="none")
    result = prepared(tmp_path, CSV + "1,x,1e39,u1,a,s\n", config=config)
    assert result.meta["malformed"]["first"] == [[7, "price (1e+39) must be at most 3.403e+38, as float32"]]


def test_a_stray_quote_is_a_character(tmp_path):
    stray = '1,19" monitor,2.5,6" tall,a,"say ""hi"""\n'
    lines = CSV.splitlines(keepends=True)
    result = prepared(
        tmp_path, "".join([*lines[:2], stray, *lines[2:]]), config=PrepareConfig(ids="appearance", max_malformed=0)
    )
    assert result.num_rows == 5
    assert result.vocabulary("user") == [None, "u1", '6" tall', "u2"]
    assert result.vocabulary("shop") == [None, "north, old", 'say "hi"', "two\nlines"]


@pytest.mark.parametrize("block_bytes", [40, 1 << 26])
def test_a_line_whose_quotes_do_not_end_is_malformed_alone(tmp_path, block_bytes):
    bad = ['1,x,2.5,"u,a,s\n', '1,x,2.5,"u"v,a,s\n']
    lines = CSV.splitlines(keepends=True)
    text = "".join([*lines[:3], *bad, *lines[3:], '0,z,1,"u9,a,\n'])
    result = prepared(tmp_path, text, config=FOUR_DAYS, block_bytes=block_bytes)
    flaw = "a quote that is not closed, or text after a closing quote"
    assert result.meta["malformed"] == {"count": 3, "first": [[4, flaw], [5, flaw], [9, flaw]]}
    check_contents(result)


def test_an_empty_list_is_an_empty_bag_quoted_or_not(tmp_path):
    text = 'click,price,user,tags,shop\n1,1,u,"",s\n0,1,u,,s\n1,1,u,"a|b",s\n'
    result = prepared(tmp_path, text)
    assert result.all.bags["tags"].offsets.tolist() == [0, 0, 0, 2]
    assert result.vocabulary("tags") == [None, "a", "b"]
    assert result.frequencies("tags")[0] == 0


@pytest.mark.parametrize("words", [("true", "false"), ("True", "FALSE"), ("1.0", "0"), (" 1", "0 ")])
def test_labels_in_other_words(tmp_path, words):
    yes, no = words
    lines = CSV.splitlines(keepends=True)
    text = lines[0] + "".join({"1": yes, "0": no}.get(line[0], line[0]) + line[1:] for line in lines[1:])
    check_contents(prepared(tmp_path, text, config=FOUR_DAYS))


def test_wrong_labels_are_malformed(tmp_path):
    bad = "".join(f"{label},x,1,u,t,s\n" for label in ("2", "yes", "nan", "t"))
    result = prepared(tmp_path, CSV + bad, config=FOUR_DAYS)
    first = result.meta["malformed"]["first"]
    rule = "must be 0 or 1, or true or false, unless positive= (--positive) says which value is a click"
    assert first == [
        [7, f"click ('2') {rule}"],
        [8, f"click ('yes') {rule}"],
        [9, "click is missing"],
        [10, first[3][1]],
    ]


@pytest.mark.parametrize(
    ("positive", "labels", "expected"),
    [
        ("yes", ["yes", "no", " yes", "Yes"], [1, 0, 1, 0]),
        ("4", ["4", "4.0", "5", "x"], [1, 1, 0, 0]),
        (">=4", ["4", "3.9", "5", "-7"], [1, 0, 1, 0]),
        ("> 4", ["4", "3.9", "5", "-7"], [0, 0, 1, 0]),
        ("<=-1.5", ["-1.5", "-1", "-2", "0"], [1, 0, 1, 0]),
        ("<0", ["0", "-0.5", "1", "2"], [0, 1, 0, 0]),
    ],
)
def test_any_label_with_the_value_that_is_a_click(tmp_path, positive, labels, expected):
    text = "rating,user\n" + "".join(f"{label},u{k}\n" for k, label in enumerate(labels))
    columns = {"label": "rating", "dense": [], "categorical": ["user"], "multi": [], "positive": positive}
    result = prepared(tmp_path, text, **columns)
    assert result.all.labels.tolist() == expected
    assert result.meta["positive"] == positive
    pl.read_csv(tmp_path / "table.csv").write_parquet(tmp_path / "t.parquet")
    columns = {"label": "rating", "categorical": ["user"], "positive": positive}
    assert prepare_table(tmp_path / "t.parquet", tmp_path / "p", **columns).all.labels.tolist() == expected


def test_a_label_that_a_bound_cannot_judge_and_a_click_that_never_comes(tmp_path):
    columns = {"label": "rating", "dense": [], "categorical": ["user"], "multi": []}
    text = "rating,user\n5,a\ngood,b\nNA,c\n"
    result = prepared(tmp_path, text, **columns, positive=">3")
    expected = [[3, "rating ('good') must be a number"], [4, "rating is missing"]]
    assert result.meta["malformed"]["first"] == expected
    with pytest.raises(ValueError, match=r"positive \('Good'\) must be a value of rating, .* it has '5', 'good'"):
        prepared(tmp_path, text, **columns, positive="Good", overwrite=True)


MISSING_CSV = "click,price,user,tags\n1,NA,NA,a|NA\n0,inf,null,\n1,nan,nan,null\n0,2,u,b\n1,-inf,?,a|?\n"


def test_words_for_missing_values(tmp_path):
    columns = {"categorical": ["user", "tags"], "config": PrepareConfig(ids="appearance", transform="none")}
    result = prepared(tmp_path, MISSING_CSV, **columns)
    assert result.all.dense[:, 0].tolist() == [0, 0, 0, 2, 0]
    assert result.vocabulary("user") == [None, "u", "?"]
    assert result.all.bags["tags"].offsets.tolist() == [0, 2, 2, 2, 3, 5]
    assert result.vocabulary("tags") == [None, "a", "b", "?"]
    result = prepared(tmp_path, MISSING_CSV, **columns, missing=["?"], overwrite=True)
    assert result.vocabulary("user") == [None, "null", "nan", "u"]  # the row of "NA" is malformed
    assert result.meta["malformed"]["first"] == [[2, "price ('NA') must be a number"]]


def test_numbers_that_are_not_finite_are_missing(tmp_path):
    frame = pl.DataFrame({"y": [1, 1, 0], "c": ["a", "b", "c"], "x": [math.inf, math.nan, -2.0]})
    frame.write_parquet(tmp_path / "t.parquet")
    columns = {"label": "y", "dense": ["x"], "categorical": ["c"], "config": PrepareConfig(transform="none")}
    data = prepare_table(tmp_path / "t.parquet", tmp_path / "out", **columns)
    assert data.all.dense[:, 0].tolist() == [0, 0, -2]


def test_other_separators(tmp_path):
    text = CSV.replace(",", ";").replace("north;", "north,").replace("|", " ")
    check_contents(prepared(tmp_path, text, separator=";", multi_separator=" ", config=FOUR_DAYS))


def parquet(path):
    pl.DataFrame(
        {
            "shop": pl.Series(["north, old", 'say "hi"', "two\nlines", None], dtype=pl.Categorical),
            "tags": [["a", "b"], None, ["b", None, "c"], ["a"]],
            "user": ["u1", "u2", "u1", ""],
            "price": pl.Series([2.5, None, -3, math.nan], dtype=pl.Float32),
            "click": [True, False, True, False],
        }
    ).write_parquet(path)


def test_parquet(tmp_path):
    parquet(tmp_path / "t.parquet")
    check_contents(prepare_table(tmp_path / "t.parquet", tmp_path / "out", config=FOUR_DAYS, **COLUMNS))


def test_parquet_in_several_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("quorem.data.source.PARQUET_ROWS", 1)
    monkeypatch.setattr("quorem.data.prepare.GROUP_ROWS", 2)
    parquet(tmp_path / "t.parquet")
    check_contents(prepare_table(tmp_path / "t.parquet", tmp_path / "out", config=FOUR_DAYS, **COLUMNS))


def test_integer_categories(tmp_path):
    codes = {f"u{bits}": pl.Series([7, 7, None], dtype=getattr(pl, f"UInt{bits}")) for bits in (8, 32, 64)}
    table = pl.DataFrame({"y": [0, 1, 1], "id": [2**40, -1, 2**40], **codes, "large": [2**63, 5, 5]})
    table = table.with_columns(pl.col("large").cast(pl.UInt64))
    table.write_parquet(tmp_path / "t.parquet")
    names = ["id", *codes, "large"]
    config = PrepareConfig(ids="appearance")
    result = prepare_table(tmp_path / "t.parquet", tmp_path / "out", label="y", categorical=names, config=config)
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
    bad = ["1,x,2,u\n", "1,x,abc,u,t,s\n", '2,x,1,u,"quoted, comma",s\n']
    config = FOUR_DAYS
    result = prepared(tmp_path, "".join([*lines[:3], *bad, *lines[3:]]), config=config)
    assert result.meta["malformed"]["count"] == 3
    (*first, (number, reason)) = result.meta["malformed"]["first"]
    assert first == [[4, "4 fields where 6 are expected"], [5, "price ('abc') must be a number"]]
    assert number == 6 and reason.startswith("click ('2') must be 0 or 1, or true or false")
    check_contents(result)


def test_malformed_rows_of_a_parquet(tmp_path):
    pl.DataFrame({"y": [0, 5, 1], "c": ["a", "b", "c"]}).write_parquet(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"t\.parquet has 1 malformed row so far.*row 2: y \(5\) must be 0 or 1"):
        strict = PrepareConfig(max_malformed=0)
        prepare_table(tmp_path / "t.parquet", tmp_path / "out", label="y", categorical=["c"], config=strict)


def test_a_rule_that_many_lines_break_is_written_once(tmp_path):
    rule = "must be 0 or 1, or true or false, unless positive= (--positive) says which value is a click"
    shown = f"line 2: y ('yes') {rule}; line 3: y ('no'); line 4: y ('no'); line 5: y ('no'); line 6: y ('no'), ..."
    (tmp_path / "t.csv").write_text("y,c\n" + "yes,a\n" + 20 * "no,b\n")
    with pytest.raises(ValueError, match=re.escape(shown)):
        prepare_table(tmp_path / "t.csv", tmp_path / "out", label="y", categorical=["c"])


def test_a_wrong_label_of_a_file_with_semicolons_is_told_with_its_columns(tmp_path):
    (tmp_path / "t.csv").write_text("y;a, b;c\n1;2;3\n")
    with pytest.raises(ValueError, match="has no column label; it has y, a, b, c"):
        prepare_table(tmp_path / "t.csv", tmp_path / "out", label="label")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "clock"}, r"has no column clock; it has click, ignored, price, user, tags, shop"),
        ({"dense": ["price", "price"]}, r"names of columns \('price'\) must be unique"),
        ({"dense": ["user"], "categorical": ["user"], "multi": []}, r"names of columns \('user'\) must be unique"),
        ({"categorical": [], "multi": []}, "categorical must name at least one column"),
        ({"multi": ["price"]}, r"names of columns \('price'\) must be unique"),
        ({"separator": "::"}, r"separator \('::'\) must be one ASCII character"),
        ({"multi_separator": ""}, r"multi_separator \(''\) must be one ASCII character"),
        ({"separator": '"'}, r"separator \('\"'\) must be one ASCII character, and no quote"),
        ({"time": "price"}, r"names of columns \('price'\) must be unique"),
        ({"time": "when"}, "has no column when"),
        (
            {"config": PrepareConfig(transforms={"user": "log"})},
            r"transforms \(user\) must be of dense columns \(price\)",
        ),
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
        ("click,price,user,tags,shop,user\n1,1,a,b,c,d\n", "has more than one column 'user'"),
        ('click,price,user,tags,shop,"x\n1,1,a,b,c,d\n', "the header has a quote that is not closed"),
    ],
)
def test_unusable_csv_is_refused(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, text)


def test_text_is_no_dense_feature(tmp_path):
    parquet(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"shop of .* is Categorical.* but must be numeric"):
        prepare_table(tmp_path / "t.parquet", tmp_path / "out", label="click", dense=["shop"], categorical=["user"])


def test_categories_are_the_same_in_any_type(tmp_path):
    """Integers that missing values turned into floats, and lists of one length, against text and lists."""
    count = 40
    values = {"click": [i % 2 for i in range(count)], "user": [None if i % 9 == 0 else i % 7 for i in range(count)]}
    plain = pl.DataFrame({**values, "tags": [[str(i % 3), str(i % 5)] for i in range(count)]})
    floats = plain["user"].cast(pl.Float64).fill_null(float("nan"))
    other = plain.with_columns(user=floats, tags=plain["tags"].cast(pl.Array(pl.String, 2)))
    results = []
    for name, frame in (("plain", plain), ("other", other)):
        frame.write_parquet(tmp_path / f"{name}.parquet")
        columns = {"label": "click", "categorical": ["user", "tags"]}
        results.append(prepare_table(tmp_path / f"{name}.parquet", tmp_path / name, **columns))
        assert results[-1].vocabulary("user") == results[0].vocabulary("user")
    assert torch.equal(results[0].all.ids, results[1].all.ids)
    assert torch.equal(results[0].all.bags["tags"].values, results[1].all.bags["tags"].values)


def test_a_transform_must_be_known():
    with pytest.raises(ValueError, match=r"transform of price \('cube'\) must be one of 'log', 'signed_log', 'none'"):
        PrepareConfig(transforms={"price": "cube"})
    with pytest.raises(ValueError, match=r"transform of transform \('cube'\) must be one of"):
        PrepareConfig(transform="cube")


def test_a_table_without_categories_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("y,x\n1,0.5\n0,0.7\n")
    with pytest.raises(ValueError, match=r"t\.csv has no column that looks like categories"):
        prepare_table(tmp_path / "t.csv", tmp_path / "out", label="y")


def test_names_of_columns_are_shown_in_one_line(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"a\x1b[2J\x0bb," + b"x" * 100 + b",\xff\n1,2,3\n")
    with pytest.raises(ValueError, match=rf"has no column y, z; it has 'a\\x1b\[2J\\x0bb', {'x' * 40}, ") as error:
        prepare_table(tmp_path / "t.csv", tmp_path / "out", label="y", categorical=["z"])
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_a_pipe_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match="is a pipe and must be a file"):
        prepare_table(tmp_path / name, tmp_path / "out", label="y", categorical=["c"])


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    (tmp_path / "t.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    with pytest.raises(ValueError, match=r"t\.parquet is not a Parquet file, or damaged"):
        prepare_table(tmp_path / "t.parquet", tmp_path / "out", label="y", categorical=["c"])


MANY_COLUMNS = """
import os, resource, sys
from quorem.data.table import prepare_table
os.fsync = lambda descriptor: None
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
names = [f"c{k}" for k in range(150)]
with open(sys.argv[1], "w") as file:
    file.write("y," + ",".join(names) + "\\n")
    for k in range(4):
        file.write(f"{k % 2}," + ",".join(f"a{k % 3}" for _ in names) + "\\n")
prepare_table(sys.argv[1], sys.argv[2], label="y", categorical=names, multi=names[:60]).verify()
"""


def test_more_columns_than_files_may_be_open(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", MANY_COLUMNS, tmp_path / "t.csv", tmp_path / "out"], capture_output=True
    )
    assert run.returncode == 0, run.stderr.decode()


def test_a_header_of_many_columns_takes_time_in_their_number(tmp_path):
    """Would take an hour if each name were compared with each."""
    names = [f"c{k}" for k in range(30_000)]
    (tmp_path / "t.csv").write_text("y," + ",".join(names) + "\n1" + ",a" * len(names) + "\n")
    with pytest.raises(ValueError, match="has no column x; it has y, c0, "):
        prepare_table(tmp_path / "t.csv", tmp_path / "out", label="x", categorical=names)
    assert prepare_table(tmp_path / "t.csv", tmp_path / "out", label="y", categorical=names[:1]).num_rows == 1


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_missing_label_is_malformed(tmp_path, kind):
    frame = pl.DataFrame({"y": [1, None, 0], "user": ["a", "b", "c"]})
    frame.write_csv(tmp_path / "t.csv") if kind == "csv" else frame.write_parquet(tmp_path / "t.parquet")
    data = prepare_table(tmp_path / f"t.{kind}", tmp_path / "out", label="y", categorical=["user"])
    assert data.all.labels.tolist() == [1, 0] and data.meta["malformed"]["count"] == 1


def test_columns_to_infer_are_those_that_nothing_names(tmp_path):
    (tmp_path / "t.csv").write_text("y,user,tags\n" + "0,a,p|q\n1,b,p\n" * 40)
    named, table = Columns("y", (), ()), open_source(tmp_path / "t.csv")
    chosen = choose_columns(table, named, drop=["user"])
    assert (chosen.columns.categorical, chosen.columns.bags) == (("tags",), ("tags",))
    with pytest.raises(ValueError, match="no column that looks like categories"):
        choose_columns(table, named, drop=["user", "tags"])
    with pytest.raises(ValueError, match=r"drop \(user\) must not name columns that are used"):
        choose_columns(table, Columns("y", (), ("user",)), drop=["user"])
    assert choose_columns(table, Columns("y", (), (), ("tags",))).columns.categorical == ("tags",)
    chosen = choose_columns(table, Columns("y", (), (), ("user",)), infer_others=True)  # few have a separator
    assert (chosen.columns.categorical, chosen.columns.bags) == (("user", "tags"), ("user", "tags"))


def test_columns_of_a_type_that_has_no_place_are_refused(tmp_path):
    spans = pl.Series([datetime.timedelta(seconds=i % 7) for i in range(40)])
    columns = {"y": [0, 1] * 20, "user": ["a", "b"] * 20, "span": spans, "lists": [[1]] * 40}
    pl.DataFrame(columns).write_parquet(tmp_path / "t.parquet")
    where = (tmp_path / "t.parquet", tmp_path / "out")
    with pytest.raises(ValueError, match=r"span is Duration.* but must hold text or numbers"):
        prepare_table(*where, label="y", categorical=["span"])
    with pytest.raises(ValueError, match=r"lists is List\(Int64\) but must hold numbers, dates or times"):
        prepare_table(*where, label="y", categorical=["user"], time="lists")


def test_a_file_is_read_once(tmp_path, monkeypatch):
    """Also if separator, columns and their kinds are found out from its first rows."""
    opened = []
    monkeypatch.setattr(
        "builtins.open", lambda *args, _open=open, **options: (opened.append(args[0]), _open(*args, **options))[1]
    )
    result = prepared(tmp_path, CSV.replace(",", ";"), label="click", dense=[], categorical=[], multi=[])
    assert result.num_rows == 4
    assert opened.count(tmp_path / "table.csv") == 1


ISO_TIMES = [
    "2024-03-01",
    "2024-03-01 06:30",
    "2024-03-01T07:00:00Z",
    "2024-03-01T10:00:00+02:00",
    "2024-03-01 08:30:00.5",
]


def test_iso_times_in_a_csv_are_times(tmp_path):
    text = "y,user,when\n" + "".join(f"{k % 2},u{k},{when}\n" for k, when in reversed([*enumerate(ISO_TIMES)]))
    columns = {"label": "y", "dense": [], "categorical": ["user"], "multi": []}
    result = prepared(tmp_path, text + "1,u9,yesterday\n", **columns, time="when")
    assert [result.vocabulary("user")[k] for k in result.all.ids[:, 0].tolist()] == [f"u{k}" for k in range(5)]
    rule = "must be a number, or an ISO date or time"
    assert result.meta["malformed"]["first"] == [[7, f"when ('yesterday') {rule}"]]


@pytest.mark.parametrize("kind", ["text", "duration", "time of day", "zoned"])
def test_rows_are_sorted_by_any_type_of_time(tmp_path, kind):
    hours = random.Random(0).sample(range(24), 24)
    moments = [datetime.datetime(2024, 1, 1, hour) for hour in hours]
    times = {
        "text": pl.Series(map(str, moments)).cast(pl.Categorical),
        "duration": pl.Series([datetime.timedelta(hours=hour) for hour in hours]),
        "time of day": pl.Series([moment.time() for moment in moments]),
        "zoned": pl.Series(moments).dt.replace_time_zone("Asia/Tokyo"),
    }
    frame = pl.DataFrame({"y": [0, 1] * 12, "user": ["a", "b"] * 12, "hour": hours, "when": times[kind]})
    frame.write_parquet(tmp_path / "t.parquet")
    options = {"dense": ["hour"], "categorical": ["user"], "time": "when", "config": PrepareConfig(transform="none")}
    table = prepare_table(tmp_path / "t.parquet", tmp_path / "out", label="y", **options)
    assert table.all.dense[:, 0].tolist() == list(range(24))


@pytest.mark.parametrize("name", ["t[1].parquet", "t*.parquet"])
def test_the_name_of_a_file_is_no_pattern(tmp_path, name):
    other = pl.DataFrame({"click": [0, 1] * 4, "user": ["other"] * 8})
    other.write_parquet(tmp_path / "t1.parquet")
    other.with_columns(user=pl.lit("this")).write_parquet(tmp_path / name)
    data = prepare_table(tmp_path / name, tmp_path / "out[1]", label="click", categorical=["user"])
    assert data.num_rows == 8 and data.vocabulary("user") == [None, "this"]


def test_a_column_with_brackets(tmp_path):
    (tmp_path / "t.csv").write_text("click,[a]*\n" + "0,x\n1,y\n" * 4)
    data = prepare_table(tmp_path / "t.csv", tmp_path / "out", label="click", categorical=["[a]*"])
    assert data.vocabulary("[a]*") == [None, "x", "y"]


def test_columns_that_cannot_be_stored(tmp_path):
    long = "a" * 241
    (tmp_path / "t.csv").write_text(f'click,"two\nlines",{long},\n' + "0,x,y,17\n1,y,z,18\n" * 4)
    for name, rule in (("two\nlines", "of one line"), (long, "must have a shorter name: it names files, by 241")):
        with pytest.raises(ValueError, match=rule):
            prepare_table(tmp_path / "t.csv", tmp_path / "out", label="click", categorical=[name])
    with pytest.raises(ValueError, match=r"names of columns \('two.nlines'\) must be .* of one line"):
        prepare_table(tmp_path / "t.csv", tmp_path / "out", label="click")
    unnamed = infer(open_source(tmp_path / "t.csv").first_rows([""], 9))
    assert [(column.kind, column.reason) for column in unnamed] == [("none", "it has no name")]
    assert os.listdir(tmp_path) == ["t.csv"]


def test_files_of_other_kinds(tmp_path):
    rows = pl.DataFrame({"click": [0, 1] * 4, "user": ["x"] * 8})
    rows.write_parquet(tmp_path / "t.pq")
    rows.write_ipc(tmp_path / "t.arrow")
    for name, kind in (("t.pq", "a Parquet"), ("t.arrow", "an Arrow")):
        with pytest.raises(ValueError, match=rf"{name} is {kind} file, but must be CSV, or Parquet with a name"):
            open_source(tmp_path / name)
    rows.clear().write_parquet(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match=r"none.parquet has no rows"):
        prepare_table(tmp_path / "none.parquet", tmp_path / "out", label="click")
