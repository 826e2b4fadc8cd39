"""``prepare_criteo`` against a line-by-line oracle, on every oddity a file can have."""

import gzip
import re

import pytest
from click_logs import SAMPLE, assert_prepared, line, random_lines
from processes import python
from refusals import refused

from quorem.data.config import PrepareConfig
from quorem.data.criteo import prepare_criteo
from quorem.data.values import LABEL_RULE

LINES = random_lines(200)
CONFIGS = {
    "default": PrepareConfig(),
    "appearance": PrepareConfig(ids="appearance"),
    "frequency": PrepareConfig(ids="frequency", days=3),
    "appearance-train": PrepareConfig(ids="appearance", vocabulary="train"),
    "frequency-train": PrepareConfig(ids="frequency", vocabulary="train", days=4),
}


def prepared(tmp_path, data, config=None, name="raw.txt", **options):
    if isinstance(data, list):
        data = "".join(text + "\n" for text in data).encode()
    (tmp_path / name).write_bytes(data)
    return prepare_criteo(tmp_path / name, tmp_path / "out", config, **options)


@pytest.fixture
def small_groups(monkeypatch):
    """Of three blocks or so, so that a file of two hundred lines has a few."""
    monkeypatch.setattr("quorem.data.prepare.GROUP_ROWS", 50)


@pytest.mark.parametrize("block_bytes", [1000, 1 << 24])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_equals_the_oracle_in_blocks_and_groups(config, block_bytes, tmp_path, small_groups):
    assert_prepared(prepared(tmp_path, LINES, config, block_bytes=block_bytes), LINES)


@pytest.mark.parametrize(
    "token",
    [
        lambda rng: rng.choice(["0000000a", "0000000A", "+000000a", "a", "0000000a0"]),
        lambda rng: rng.choice(["münchen", "a b", '"', "a\\b", "\\n", "日本語日本"]),
        lambda rng: f"{rng.randrange(5):08x}" if rng.random() < 0.99 else "other",
        lambda rng: rng.choice(["a\\b\\cdef", "12345678", "\u00e9\u00e9\u00e9\u00e9", "\\n\\n\\n\\n"]),
    ],
    ids=["spelled otherwise", "any text", "another length late in the file", "eight bytes of any kind"],
)
def test_tokens_may_be_any_text(token, tmp_path, small_groups):
    lines = random_lines(300, token=token)
    assert_prepared(prepared(tmp_path, lines, block_bytes=4000), lines)


TEXT = "".join(text + "\n" for text in LINES).encode()
FORMS = {
    "windows line ends": TEXT.replace(b"\n", b"\r\n"),
    "no last line break": TEXT.removesuffix(b"\n"),
    "windows, no last line break": TEXT.replace(b"\n", b"\r\n").removesuffix(b"\n"),
    "byte order mark": b"\xef\xbb\xbf" + TEXT,
    "gzip": gzip.compress(TEXT),
    "gzip members": gzip.compress(TEXT[:5000]) + gzip.compress(TEXT[5000:]),
    "gzip padding": gzip.compress(TEXT) + b"\0" * 100,
}


@pytest.mark.parametrize("block_bytes", [10_000, 1 << 26])
@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS)
def test_accepted_forms(data, block_bytes, tmp_path):
    assert_prepared(prepared(tmp_path, data, block_bytes=block_bytes), LINES)


FIELDS = "fields where 40 are expected"
MALFORMED = {
    "too few fields": ("\t".join(line().split("\t")[:-1]), f"39 {FIELDS}"),
    "too many fields": (line() + "\t", f"41 {FIELDS}"),
    "empty line": ("", "1 field where 40 are expected"),
    "label is text": (line(label="x"), f"label ('x') {LABEL_RULE}"),
    "label is 2": (line(label="2"), f"label ('2') {LABEL_RULE}"),
    "label is missing": (line(label=""), "label is missing"),
    "number is text": (line(integers=["1"] * 12 + ["abc"]), "I13 ('abc') must be a number"),
    "number is long": (line(integers=["x" * 90] + ["1"] * 12), f"I1 ('{'x' * 36}...) must be a number"),
    "carriage return": (line(tokens=["0000\r00a"] * 26), "a carriage return inside a line"),
    "NUL byte": (line(tokens=["0000\x000a"] * 26), "a NUL byte"),
    "not UTF-8": (line(tokens=["\udcff0000"] * 26), "not UTF-8"),
}


@pytest.mark.parametrize("block_bytes", [10_000, 1 << 26])
@pytest.mark.parametrize(("bad", "reason"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_line_is_counted_shown_and_left_out(bad, reason, block_bytes, tmp_path):
    lines = [*LINES[:20], bad, *LINES[20:40], bad, *LINES[40:]]
    data = "".join(text + "\n" for text in lines).encode(errors="surrogateescape")
    result = prepared(tmp_path, data, block_bytes=block_bytes)
    assert result.meta.malformed == {"count": 2, "first": [[21, reason], [42, reason]]}
    assert_prepared(result, LINES)


def test_lines_that_make_up_for_each_other_and_one_that_is_cut_off_are_found(tmp_path):
    short, long = MALFORMED["too few fields"][0], MALFORMED["too many fields"][0]
    result = prepared(tmp_path, "\n".join([LINES[0], short, long, *LINES[1:], LINES[0][:30]]).encode())
    *first, (number, reason) = result.meta.malformed["first"]
    assert first == [[2, f"39 {FIELDS}"], [3, f"41 {FIELDS}"]]
    assert number == len(LINES) + 3 and re.fullmatch(r"\d+ fields where 40 are expected", reason)
    assert_prepared(result, LINES)


def test_run_stops_past_the_limit_of_malformed_lines(tmp_path):
    lines = [line(), "a\tb", *[line(label="7")] * 3, line()]
    message = (
        r"raw.txt has 4 malformed lines so far, more than the 3 that may be left out"
        r" \(max_malformed=, --max-malformed\): line 2: 2 fields where 40 are expected;"
        r" line 3: label \('7'\) must be 0 or 1, .*;"
        r" line 4: .*; line 5: label \('7'\)"
    )
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, lines, PrepareConfig(max_malformed=3))
    assert [p.name for p in tmp_path.iterdir()] == ["raw.txt"]
    assert prepared(tmp_path, lines, PrepareConfig(max_malformed=4)).num_rows == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has no well-formed rows"),
        (b"\n", r"has no well-formed rows \(0 malformed\)"),
        (gzip.compress(TEXT)[:-500], r"gzip stream is damaged or cut off after [\d,]+ bytes of text"),
        (gzip.compress(TEXT)[:-4] + b"\0\0\0\0", "gzip stream is damaged or cut off"),
        (gzip.compress(TEXT) + b"\x1f\x8b", "gzip stream is damaged or cut off"),
        (b"x" * 5000, "has a line of more than 2,000 bytes: this is not a text file"),
    ],
    ids=["empty", "one empty line", "cut gzip", "damaged gzip", "cut second member", "one long line"],
)
def test_unusable_file_is_refused(data, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, data, block_bytes=1000)
    assert [p.name for p in tmp_path.iterdir()] == ["raw.txt"]


test_wrong_options_are_refused = refused(
    (lambda: PrepareConfig(ids="name"), ValueError, r"ids \('name'\) must be"),
    (lambda: PrepareConfig(vocabulary="test"), ValueError, r"vocabulary \('test'\) must be"),
    (lambda: PrepareConfig(days=1), ValueError, r"days \(1\) must be in \[2, 100000\]"),
    (lambda: PrepareConfig(max_malformed=-1), ValueError, r"max_malformed \(-1\) must be at least 0"),
)


needs_sample = pytest.mark.skipif(
    not SAMPLE.exists(), reason="needs 80,000 rows of the Criteo Kaggle log: QUOREM_CRITEO_SAMPLE names their folder"
)


@needs_sample
def test_sample_of_80000_rows(tmp_path):
    result = prepare_criteo(SAMPLE / "train.txt.gz", tmp_path / "out", PrepareConfig(days=5, max_malformed=0))
    tokens = dict(zip(result.names, (n - 1 for n in result.cardinalities), strict=True))
    assert result.num_rows == 80_000
    assert tokens.items() >= {"C3": 35_103, "C12": 33_152, "C21": 31_057, "C16": 27_921, "C4": 20_745}.items()
    assert sum(len(column.unique()) for column in result.all.ids.T) == 200_024  # the missing value counts as one
    assert [len(result.split(s)) for s in ("train", "validation", "test")] == [64_000, 8_000, 8_000]
    assert round(100 * result.all.labels.double().mean().item(), 1) == 22.4
    for name in result.names:
        assert result.frequencies(name).sum() == 64_000


@needs_sample
def test_sample_with_native_tokens_equals_the_oracle(tmp_path):
    with gzip.open(SAMPLE / "native_head.txt.gz", "rt") as file:
        lines = file.read().splitlines()
    assert len(lines) == 10_000
    result = prepare_criteo(SAMPLE / "native_head.txt.gz", tmp_path / "out", PrepareConfig(max_malformed=0))
    assert_prepared(result, lines)
    assert all(len(token) == 8 for name in result.names for token in result.vocabulary(name)[1:] if token is not None)


MEMORY = """
import resource, sys
from quorem.data.criteo import prepare_criteo
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    prepare_criteo(sys.argv[1], sys.argv[2])
except ValueError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_of_line_ends_takes_little_memory(packed, tmp_path):
    """It took 4 GB plain, and 8 GiB as a gzip file of 1 MB."""
    lines = b"\n" * (1 << 24)
    (tmp_path / "raw").write_bytes(gzip.compress(lines * 16, 1) if packed else lines)
    error, megabytes = python("-c", MEMORY, tmp_path / "raw", tmp_path / "out").splitlines()
    assert re.search(r"raw has 11 malformed lines so far.*line 1: 1 field where 40 are expected", error)
    assert int(megabytes) < 1500
