"""Hand-made Criteo files, and what preparing them must give, worked out line by line in plain Python."""

import math
import os
import random
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import numpy as np

from quorem.data.config import PrepareConfig

SAMPLE = Path(os.environ.get("QUOREM_CRITEO_SAMPLE", Path(__file__).parents[2] / "shared" / "data" / "criteo-sample"))


def line(label="0", integers=("1",) * 13, tokens=("0000000a",) * 26) -> str:
    return "\t".join([label, *integers, *tokens])


def random_lines(count: int, seed: int = 0, token=lambda rng: f"{rng.randrange(40):08x}") -> list[str]:
    """Lines with missing integers and tokens, negative integers, and tokens that appear late or once."""
    rng = random.Random(seed)

    def integer() -> str:
        return rng.choice(["", "0", "-1", "-3", str(rng.randrange(10)), str(rng.randrange(10**7))])

    lines = []
    for _ in range(count):
        tokens = ["" if rng.random() < 0.1 else token(rng) for _ in range(26)]
        lines.append(line(rng.choice(["0", "1", "0", "false"]), [integer() for _ in range(13)], tokens))
    return lines


def oracle(lines: list[str], config: PrepareConfig) -> dict:
    """Labels, dense features, ids, counts and vocabularies of well-formed lines."""
    rows = [text.split("\t") for text in lines]
    last_day = len(rows) // config.days  # where it does not divide, earlier days have the rows left over
    train = len(rows) - last_day
    labels = [int(row[0] == "1") for row in rows]
    dense = [[math.log(max(int(x or 0), 0) + 1) for x in row[1:14]] for row in rows]
    ids, counts, vocabularies = [], [], []
    for k in range(14, 40):
        column = [row[k] for row in rows]
        known = dict.fromkeys(t for t in (column if config.vocabulary == "all" else column[:train]) if t)
        if config.ids == "frequency":
            frequency = Counter(column[:train])
            known = dict.fromkeys(sorted(known, key=lambda t: -frequency[t]))
        special = [None] if config.vocabulary == "all" else [None, None]
        vocabulary = [*special, *known]
        place = {t: i for i, t in enumerate(vocabulary) if t is not None}
        encoded = [place.get(t, 1) if t else 0 for t in column]
        ids.append(encoded)
        seen = Counter(encoded[:train])
        counts.append([seen[i] for i in range(len(vocabulary))])
        vocabularies.append(vocabulary)
    middle = train + (last_day + 1) // 2
    return {
        "labels": labels,
        "dense": np.array(dense, np.float64).astype(np.float32),
        "ids": np.array(ids).T,
        "counts": counts,
        "vocabularies": vocabularies,
        "split": {"train": (0, train), "validation": (train, middle), "test": (middle, len(rows))},
    }


def assert_prepared(prepared, lines: list[str]) -> None:
    """The folder holds exactly what the oracle says of the lines."""
    config = PrepareConfig(**prepared.meta.config)
    expected = oracle(lines, config)
    assert prepared.num_rows == len(lines)
    assert prepared.meta.split == expected["split"]
    assert prepared.all.labels.tolist() == expected["labels"]
    # One rounding to float32 of a logarithm that two libraries may round differently in float64.
    np.testing.assert_array_max_ulp(prepared.all.dense.numpy(), expected["dense"], maxulp=1)
    np.testing.assert_array_equal(prepared.all.ids.numpy(), expected["ids"])
    assert prepared.cardinalities == [len(c) for c in expected["counts"]]
    for name, counts, vocabulary in zip(prepared.names, expected["counts"], expected["vocabularies"], strict=True):
        assert prepared.frequencies(name).tolist() == counts
        assert prepared.vocabulary(name) == vocabulary


def folder_bytes(path: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
