"""The synthetic click log as a raw file: prepared again, it is the same log."""

import gzip

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import numpy as np
import torch

from quorem.data.config import PrepareConfig
from quorem.data.criteo import prepare_criteo
from quorem.data.raw import write_raw
from quorem.data.synthetic import ClickLog
from quorem.data.table import prepare_table


@pytest.mark.parametrize("name", ["raw.txt", "raw.txt.gz", "log.csv", "log.csv.gz"])
def test_what_is_written_prepares_to_the_same_log(name, tmp_path):
    is_csv = ".csv" in name
    log = ClickLog(cardinalities=(50, 400, 3), num_dense=2) if is_csv else ClickLog(cardinalities=(60,) * 26)
    write_raw(log, 2000, tmp_path / name)
    if is_csv:
        columns = {"label": "click", "dense": ["I1", "I2"], "categorical": ["C1", "C2", "C3"]}
        data = prepare_table(tmp_path / name, tmp_path / "out", **columns, config=PrepareConfig(transform="log"))
    else:
        data = prepare_criteo(tmp_path / name, tmp_path / "out")
    draw = log.draw(0, 2000).batch
    assert data.meta.malformed["count"] == 0
    assert torch.equal(data.all.labels, draw.labels)
    np.testing.assert_array_max_ulp(data.all.dense.numpy(), draw.dense.numpy(), maxulp=1)
    for f, feature in enumerate(data.names):
        tokens = np.array(["", *(f"c{k}" for k in range(1, log.cardinalities[f]))])
        vocabulary = np.array([token or "" for token in data.vocabulary(feature)])
        assert (vocabulary[data.all.ids[:, f]] == tokens[draw.ids[:, f]]).all()


def test_raw_form_has_missing_and_negative_values(tmp_path):
    write_raw(ClickLog(), 2000, tmp_path / "raw.txt.gz")
    with gzip.open(tmp_path / "raw.txt.gz", "rt") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    assert {len(row) for row in rows} == {40}
    integers = [x for row in rows for x in row[1:14]]
    assert 0.03 < integers.count("") / len(integers) < 0.07
    assert any(x.startswith("-") for x in integers)
    tokens = [x for row in rows for x in row[14:]]
    assert 0.03 < tokens.count("") / len(tokens) < 0.07
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_raw(ClickLog(), 10, tmp_path / "raw.txt.gz")
