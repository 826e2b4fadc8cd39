"""``prepare_table`` on CSV and Parquet: quoting, lists, types, malformed lines and missing columns."""

import datetime
import math
import random

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import polars as pl
import torch

from quorem.data import text as parser
from quorem.data.config import PrepareConfig
from quorem.data.infer import ROWS, infer
from quorem.data.source import open_source
from quorem.data.table import prepare_table
from quorem.data.values import LABEL_RULE

FOUR_DAYS = PrepareConfig(ids="appearance", days=4)
COLUMNS = {"label": "click", "dense": ["price"], "categorical": ["user", "tags", "shop"]}
CSV = '''click,ignored,price,user,tags,shop
1,x,2.5,u1,a|b,"north, old"
0,,,u2,,"say ""hi"""
1,y,-3,u1,b||c,"two
lines \\ ""x"
0,z,nan,,a,""
'''


def prepared(tmp_path, text, name="table.csv", **options):
    tmp_path.mkdir(exist_ok=True)
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
    assert result.meta.transforms == {"price": transform}
    assert result.all.dense[:, 0].tolist() == pytest.approx(expected, rel=2**-23)
    assert result.all.ids[:, 0].tolist() == [1, 2, 1, 0]
    assert result.all.bags["tags"].values.tolist() == [1, 2, 2, 0, 3, 1]
    assert result.all.bags["tags"].offsets.tolist() == [0, 2, 2, 5, 6]
    assert result.cardinalities == [3, 4, 4]
    assert result.vocabulary("user") == [None, "u1", "u2"]
    assert result.vocabulary("tags") == [None, "a", "b", "c"]
    assert result.vocabulary("shop") == [None, "north, old", 'say "hi"', 'two\nlines \\ "x']
    assert result.frequencies("tags").tolist() == [1, 1, 2, 1]  # of the first three rows


@pytest.mark.parametrize("block_bytes", [40, 1 << 26])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv(end, block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr("quorem.data.prepare.GROUP_ROWS", 2)
    text = CSV.replace("\n", end).replace(f"two{end}lines", "two\nlines")  # a line break within a field is its own
    check_contents(prepared(tmp_path, text, config=FOUR_DAYS, block_bytes=block_bytes))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_dense_features(transform, tmp_path):
    config = PrepareConfig(ids="appearance", days=4, transform=transform)
    check_contents(prepared(tmp_path, CSV, config=config), transform)
    single = PrepareConfig(ids="appearance", days=4, transform="log", transforms={"price": transform})
    check_contents(prepared(tmp_path, CSV, config=single, overwrite=True), transform)
    with pytest.raises(ValueError, match=r"transform of price \('cube'\) must be one of 'log', 'signed_log', 'none'"):
        PrepareConfig(transforms={"price": "cube"})
    with pytest.raises(ValueError, match=r"transform \('cube'\) must be one of 'log', 'signed_log', 'none'"):
        PrepareConfig(transform="cube")


def test_an_empty_list_is_an_empty_bag_quoted_or_not(tmp_path):
    text = 'click,price,user,tags,shop\n1,1,u,"",s\n0,1,u,,s\n1,1,u,"a|b",s\n'
    result = prepared(tmp_path, text)
    assert result.all.bags["tags"].offsets.tolist() == [0, 0, 0, 2]
    assert result.vocabulary("tags") == [None, "a", "b"]
    assert result.frequencies("tags")[0] == 0


@pytest.mark.parametrize(("yes", "no"), [("true", "false"), ("True", "FALSE"), ("1.0", "0"), (" 1", "0 ")])
def test_labels_in_other_words(tmp_path, yes, no):
    lines = CSV.splitlines(keepends=True)
    text = lines[0] + "".join({"1": yes, "0": no}.get(line[0], line[0]) + line[1:] for line in lines[1:])
    check_contents(prepared(tmp_path, text, config=FOUR_DAYS))


@pytest.mark.parametrize(
    ("positive", "labels", "expected"),
    [
        ("yes", ["yes", "no", " yes", "Yes"], [1, 0, 1, 0]),
        (">=4", ["4", "3.9", "5", "-7"], [1, 0, 1, 0]),
        (">= -1.5", ["-1.5", "-2", "0"], [1, 0, 1]),
    ],
)
def test_any_label_with_the_value_that_is_a_click(tmp_path, positive, labels, expected):
    text = "rating,user\n" + "".join(f"{label},u{k}\n" for k, label in enumerate(labels))
    columns = {"label": "rating", "categorical": ["user"], "positive": positive}
    result = prepared(tmp_path, text, **columns, dense=[], multi=[])
    assert (result.all.labels.tolist(), result.meta.columns.positive) == (expected, positive)
    pl.read_csv(tmp_path / "table.csv").write_parquet(tmp_path / "t.parquet")
    assert prepare_table(tmp_path / "t.parquet", tmp_path / "p", **columns).all.labels.tolist() == expected


def test_labels_that_positive_does_not_fit(tmp_path):
    columns = {"label": "rating", "dense": [], "categorical": ["user"], "multi": []}
    text = "rating,user\n5,a\ngood,b\nNA,c\n"
    expected = [[3, "rating ('good') must be a number"], [4, "rating is missing"]]
    assert prepared(tmp_path, text, **columns, positive=">=3").meta.malformed["first"] == expected
    for wrong in ("Good", ">=x"):
        with pytest.raises(ValueError, match=rf"positive \('{wrong}'\) must be a value"):
            prepared(tmp_path / wrong, text, **columns, positive=wrong)
    with pytest.raises(ValueError, match=r"a value of rating, .* it has '5', 'good', 'NA'$"):
        prepared(tmp_path / "seen", text, **columns, positive="Good")


MISSING_CSV = "click,price,user,tags\n1,NA,NA,a|NA\n0,inf,null,\n1,nan,nan,null\n0,2,u,b\n1,-inf,?,a|?\n"


def test_words_for_missing_values(tmp_path):
    columns = {"categorical": ["user", "tags"], "config": PrepareConfig(ids="appearance", transform="none")}
    result = prepared(tmp_path, MISSING_CSV, **columns)
    assert result.all.dense[:, 0].tolist() == [0, 0, 0, 2, 0]
    assert result.vocabulary("user") == [None, "u", "?"]
    assert result.all.bags["tags"].offsets.tolist() == [0, 2, 2, 2, 3, 5]
    assert result.vocabulary("tags") == [None, "a", "b", "?"]
    result = prepared(tmp_path / "other", MISSING_CSV, **columns, missing=["?"])
    assert result.vocabulary("user") == [None, "null", "nan", "u"]  # the row of "NA" is malformed
    assert result.meta.malformed["first"] == [[2, "price ('NA') must be a number"]]


def parquet(path):
    pl.DataFrame(
        {
            "shop": pl.Series(["north, old", 'say "hi"', 'two\nlines \\ "x', None], dtype=pl.Categorical),
            "tags": [["a", "b"], None, ["b", None, "c"], ["a"]],
            "user": ["u1", "u2", "u1", ""],
            "price": pl.Series([2.5, None, -3, math.nan], dtype=pl.Float32),
            "click": [True, False, True, False],
        }
    ).write_parquet(path)


@pytest.mark.parametrize("piece", [1, 1 << 18])
def test_parquet(piece, tmp_path, monkeypatch):
    monkeypatch.setattr("quorem.data.source.PARQUET_ROWS", piece)
    monkeypatch.setattr("quorem.data.prepare.GROUP_ROWS", 2)
    parquet(tmp_path / "t.parquet")
    check_contents(prepare_table(tmp_path / "t.parquet", tmp_path / "out", config=FOUR_DAYS, **COLUMNS))


def test_columns_of_the_wrong_type_are_refused(tmp_path):
    parquet(tmp_path / "t.parquet")
    spans = pl.Series("span", [datetime.timedelta(seconds=i) for i in range(4)])
    pl.read_parquet(tmp_path / "t.parquet").with_columns(spans).write_parquet(tmp_path / "s.parquet")
    for name, columns, message in (
        ("t", {"dense": ["shop"], "categorical": ["user"]}, r"shop is Categorical.* but must be numeric"),
        ("s", {"categorical": ["span"]}, r"span is Duration.* but must hold text or numbers"),
        ("s", {"categorical": ["user"], "time": "tags"}, r"tags is List.* but must hold numbers, dates or times"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_table(tmp_path / f"{name}.parquet", tmp_path / "out", label="click", **columns)


def test_integer_categories(tmp_path):
    codes = {f"u{bits}": pl.Series([7, 7, None], dtype=getattr(pl, f"UInt{bits}")) for bits in (8, 32, 64)}
    large = pl.Series([2**63, 5, 5], dtype=pl.UInt64)
    table = pl.DataFrame({"y": [0, 1, 1], "id": [2**40, -1, 2**40], **codes, "large": large})
    table.write_parquet(tmp_path / "t.parquet")
    names = ["id", *codes, "large"]
    config = PrepareConfig(ids="appearance")
    result = prepare_table(tmp_path / "t.parquet", tmp_path / "out", label="y", categorical=names, config=config)
    assert result.all.ids.tolist() == [[1, 1, 1, 1, 1], [2, 1, 1, 1, 2], [1, 0, 0, 0, 2]]
    assert result.vocabulary("id") == [None, str(2**40), "-1"]
    assert all(result.vocabulary(name) == [None, "7"] for name in codes)
    assert result.vocabulary("large") == [None, str(2**63), "5"]


@pytest.mark.parametrize("block_bytes", [40, 1 << 26])
def test_malformed_lines_of_a_csv(tmp_path, block_bytes):
    lines = CSV.splitlines(keepends=True)
    bad = ["1,x,2,u\n", "1,x,abc,u,t,s\n", '1,x,2,"u"v,a,s\n', '2,x,1,u,"quoted, comma",s\n', '0,x,1,"u,a,\n']
    result = prepared(tmp_path, "".join([*lines[:3], *bad, *lines[3:]]), config=FOUR_DAYS, block_bytes=block_bytes)
    flaws = ["4 fields where 6 are expected", "price ('abc') must be a number", parser.BAD_QUOTES]
    flaws += [f"click ('2') {LABEL_RULE}", parser.BAD_QUOTES]
    assert result.meta.malformed == {"count": 5, "first": [[line, flaw] for line, flaw in enumerate(flaws, 4)]}
    check_contents(result)


def test_malformed_rows_of_a_parquet(tmp_path):
    pl.DataFrame({"y": [0, 5, 1], "c": ["a", "b", "c"]}).write_parquet(tmp_path / "t.parquet")
    options = {"label": "y", "categorical": ["c"], "config": PrepareConfig(max_malformed=0)}
    with pytest.raises(ValueError, match=r"t\.parquet has 1 malformed row so far.*row 2: y \(5\) must be 0 or 1"):
        prepare_table(tmp_path / "t.parquet", tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "clock"}, r"has no column clock; it has click, ignored, price, user, tags, shop"),
        ({"dense": ["price", "price"]}, r"names of columns \('price'\) must be unique"),
        ({"categorical": [], "multi": []}, r"categorical \(--categorical\) must name at least one column"),
        ({"multi": ["price"]}, r"names of columns \('price'\) must be unique"),
        ({"separator": "::"}, r"separator \('::'\) must be one ASCII character"),
        ({"multi_separator": ""}, r"multi_separator \(''\) must be one ASCII character"),
        ({"time": "price"}, r"names of columns \('price'\) must be unique"),
        ({"time": "when"}, "has no column when"),
        ({"config": PrepareConfig(transforms={"user": "log"})}, r"transforms \(user\) must be of dense columns"),
        ({"separator": '"'}, r"separator \('\"'\) must be one ASCII character, and no quote"),
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
        ('click,price,user,tags,shop,"x\n1,1,a,b,c,d\n', "line 1: a quote that is not closed"),
    ],
)
def test_unusable_csv_is_refused(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, text)


@pytest.mark.parametrize("name", ["t[1].parquet", "t*.parquet"])
def test_the_name_of_a_file_is_no_pattern(tmp_path, name):
    other = pl.DataFrame({"click": [0, 1] * 4, "user": ["other"] * 8})
    other.write_parquet(tmp_path / "t1.parquet")
    other.with_columns(user=pl.lit("this")).write_parquet(tmp_path / name)
    data = prepare_table(tmp_path / name, tmp_path / "out[1]", label="click", categorical=["user"])
    assert data.num_rows == 8 and data.vocabulary("user") == [None, "this"]


@pytest.mark.parametrize(
    "form", ["{:02}.5", "2024-05-{:02}", "2024-05-{:02}T10:00:00Z", "2024-05-{:02} 10:00:00+02:00"]
)
def test_rows_are_split_by_time_and_sorted_if_they_are_not_in_order(form, tmp_path, monkeypatch):
    """Against the same rows sorted beforehand, several groups of them."""
    monkeypatch.setattr("quorem.data.prepare.GROUP_ROWS", 7)
    monkeypatch.setattr("quorem.data.folder.REORDER_ROWS", 9)
    rng = random.Random(0)
    rows = [(k, rng.randrange(1, 25), rng.randrange(9), "|".join(rng.choices("abcdef", k=k % 4))) for k in range(60)]
    options = {"label": "y", "dense": ["x"], "categorical": ["user", "tags"], "multi": ["tags"], "time": "when"}
    options["config"] = PrepareConfig(vocabulary="train", days=4)
    results = []
    for name, given in (("sorted", sorted(rows, key=lambda row: row[1])), ("given", rows)):
        text = "".join(f"{k % 2},{k},{form.format(when)},u{user},{tags}\n" for k, when, user, tags in given)
        (tmp_path / f"{name}.csv").write_text("y,x,when,user,tags\n" + text + "1,1,yesterday,u,a\n")
        results.append(prepare_table(tmp_path / f"{name}.csv", tmp_path / name, **options))
        results[-1].verify()
        error = [62, "when ('yesterday') must be a number, or an ISO date or time"]
        assert results[-1].meta.malformed["first"] == [error]
    before, sorted_here = results
    assert (before.meta.steps_back, sorted_here.meta.steps_back > 10) == (0, True)
    for part in ("labels", "dense", "ids"):
        assert torch.equal(getattr(before.all, part), getattr(sorted_here.all, part)), part
    for part in ("values", "offsets"):
        assert torch.equal(getattr(before.all.bags["tags"], part), getattr(sorted_here.all.bags["tags"], part)), part
    assert (before.meta.split, before.cardinalities) == (sorted_here.meta.split, sorted_here.cardinalities)
    for name in before.names:
        assert before.vocabulary(name) == sorted_here.vocabulary(name)
        assert before.frequencies(name).tolist() == sorted_here.frequencies(name).tolist()
    times = sorted(row[1] for row in rows)
    for _, stop in list(before.meta.split.values())[:2]:
        assert times[stop - 1] < times[stop]  # no time is in two splits


@pytest.mark.parametrize("kind", ["text", "duration", "time of day", "zoned"])
def test_rows_of_a_parquet_file_are_sorted_by_any_type_of_time(kind, tmp_path):
    hours = random.Random(0).sample(range(24), 24)
    moments = [datetime.datetime(2024, 1, 1, hour) for hour in hours]
    times = {
        "text": pl.Series([f"{moment:%Y-%m-%d %H:%M}" for moment in moments]).cast(pl.Categorical),
        "duration": pl.Series([datetime.timedelta(hours=hour) for hour in hours]),
        "time of day": pl.Series([moment.time() for moment in moments]),
        "zoned": pl.Series(moments).dt.replace_time_zone("Asia/Tokyo"),
    }
    frame = pl.DataFrame({"y": [0, 1] * 12, "user": ["a", "b"] * 12, "hour": hours, "when": times[kind]})
    frame.write_parquet(tmp_path / "t.parquet")
    options = {"dense": ["hour"], "categorical": ["user"], "time": "when", "config": PrepareConfig(transform="none")}
    table = prepare_table(tmp_path / "t.parquet", tmp_path / "out", label="y", **options)
    assert table.all.dense[:, 0].tolist() == list(range(24))


def test_rows_of_a_single_time_are_split_by_their_number(tmp_path):
    pl.DataFrame({"y": [0, 1] * 4, "c": ["a"] * 8, "when": [5] * 8}).write_parquet(tmp_path / "t.parquet")
    options = {"label": "y", "categorical": ["c"], "time": "when", "config": PrepareConfig(days=2)}
    split = prepare_table(tmp_path / "t.parquet", tmp_path / "out", **options).meta.split
    assert split == {"train": (0, 4), "validation": (4, 6), "test": (6, 8)}


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


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_is_the_one_that_makes_the_label_a_column(tmp_path, separator):
    (tmp_path / "t.csv").write_text(separator.join(["y", "x,z;" if separator == "|" else "x"]) + "\n")
    assert open_source(tmp_path / "t.csv", column="y").separator == separator
    most_columns = "," if separator == "|" else separator
    assert open_source(tmp_path / "t.csv", column="nothing").separator == most_columns
