"""The synthetic click log: frequencies, click rate, planted signal, reproducibility; as a raw file it is the same."""

import pytest
from refusals import refused

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import numpy as np
import polars as pl
import torch

from quorem.data.config import PrepareConfig
from quorem.data.criteo import prepare_criteo
from quorem.data.raw import write_raw
from quorem.data.synthetic import DEVIATIONS, ClickLog, _calibration, _hash, _normals, synthesize
from quorem.data.table import prepare_table

ROWS = 60_000
SMALL = ClickLog(cardinalities=(400, 300, 50, 3, 2000, 1000, 7, 120))


@pytest.fixture(scope="module")
def drawn():
    return SMALL.draw(0, ROWS)


def log_loss(target, probability):
    """Expected log loss of ``probability`` where ``target`` is the true one."""
    return torch.nn.functional.binary_cross_entropy(probability, target).item()


def effects(log):
    """Own effect and hidden factor of every category of each feature, as the module states them."""
    for feature, n in enumerate(log.cardinalities):
        yield _normals(_hash(torch.arange(n) + (feature << 32), log.seed + (1 << 32)))


@pytest.mark.parametrize("feature", range(len(SMALL.cardinalities)))
def test_ids_are_zipf_distributed(feature, drawn):
    n, ids = SMALL.cardinalities[feature], drawn.batch.ids[:, feature].numpy()
    k = np.arange(1, n)
    share = round(0.05 * 2048) / 2048
    expected = np.concatenate([[share], (1 - share) * np.log((k + 1) / k) / np.log(n)])
    assert expected.sum() == pytest.approx(1)
    frequency = np.bincount(ids, minlength=n) / ROWS
    deviation = np.sqrt(expected * (1 - expected) / ROWS)
    z = (frequency - expected) / deviation
    assert len(frequency) == n
    assert np.abs(z).max() < 6
    assert (z**2).mean() == pytest.approx(1, abs=6 * np.sqrt(2 / n) + 0.1)


@pytest.mark.parametrize("rate", [0.03, 0.25, 0.7])
def test_click_rate(rate):
    draw = ClickLog(cardinalities=SMALL.cardinalities, click_rate=rate).draw(100_000, 100_000 + ROWS)
    assert draw.batch.labels.double().mean().item() == pytest.approx(rate, abs=0.02)
    assert draw.probability.mean().item() == pytest.approx(rate, abs=0.02)


def test_rows_do_not_depend_on_chunks_or_threads(drawn):
    def rows(draw):
        return [draw.batch.labels, draw.batch.dense, draw.batch.ids, draw.probability]

    pieces = [rows(SMALL.draw(a, b)) for a, b in ((0, 1), (1, 8), (8, 5000), (5000, 5000), (5000, 20_000))]
    for whole, parts in zip(rows(drawn), zip(*pieces, strict=True), strict=True):
        assert torch.equal(whole[:20_000], torch.cat(parts))
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            again = rows(SMALL.draw(0, 20_000))
            assert torch.get_num_threads() == count
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(whole[:20_000], part) for whole, part in zip(rows(drawn), again, strict=True))


def test_log_odds_are_the_stated_sum_of_parts_with_the_stated_deviations(drawn):
    """Recomputed row by row from tables of effects."""
    scales, bias = _calibration(SMALL)
    tables = list(effects(SMALL))
    ids = drawn.batch.ids.long()
    main_effect = torch.stack([tables[f][0][ids[:, f]] for f in range(8)])
    factor = torch.stack([tables[f][1][ids[:, f]] for f in range(8)])
    pairs = sum(factor[f] * factor[f - 1] for f in range(8))
    weight = _hash(torch.arange(13), SMALL.seed + (2 << 32)) >> 58
    dense = (drawn.batch.dense.double() * (1 << 20)) @ weight.double()
    parts = [s * part for s, part in zip(scales, [main_effect.sum(0).double(), pairs.double(), dense], strict=True)]
    torch.testing.assert_close(torch.logit(drawn.probability), bias + sum(parts), rtol=0, atol=1e-4)  # dense is float32
    assert [part.std().item() for part in parts] == pytest.approx(DEVIATIONS, rel=0.05)


def test_synthesize_writes_prepared_data_with_its_best_loss(tmp_path):
    data, draw = synthesize(SMALL, 20_000, tmp_path / "out"), SMALL.draw(0, 20_000)
    for part in ("ids", "dense", "labels"):
        assert torch.equal(getattr(data.all, part), getattr(draw.batch, part)), part
    assert data.cardinalities == list(SMALL.cardinalities)
    for name, (start, stop) in data.meta.split.items():
        p = draw.probability[start:stop]
        assert data.meta.bayes_log_loss[name] == pytest.approx(log_loss(p, p), rel=1e-9)
    train = data.split("train")
    for f, name in enumerate(data.names):
        n = data.cardinalities[f]
        assert data.frequencies(name).tolist() == torch.bincount(train.ids[:, f], minlength=n).tolist()
    with pytest.raises(ValueError, match="has no vocabulary"):
        data.vocabulary("C1")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        synthesize(SMALL, 10, tmp_path / "out")


test_wrong_options_are_refused = refused(
    (lambda: ClickLog(cardinalities=()), ValueError, r"cardinalities \(\(\)\) must be one or more"),
    (lambda: ClickLog(cardinalities=(2**31,)), ValueError, "cardinalities"),
    (lambda: ClickLog(num_dense=-1), ValueError, r"num_dense \(-1\) must be at least 0"),
    (lambda: ClickLog(click_rate=0.0), ValueError, r"click_rate \(0.0\) must be in \(0, 1\)"),
    (lambda: ClickLog(seed=-1), ValueError, r"seed \(-1\) must be in"),
)


def test_wrong_ranges_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"start \(5\) and stop \(3\)"):
        SMALL.draw(5, 3)
    for write in (synthesize, write_raw):
        with pytest.raises(ValueError, match=r"num_rows \(0\) must be at least 1"):
            write(SMALL, 0, tmp_path / "out")


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
    text = pl.read_csv(tmp_path / name, separator="," if is_csv else "\t", has_header=is_csv)
    numbers = text.select(text.columns[1 : 1 + log.num_dense])
    assert 0.03 < np.mean([numbers[c].null_count() for c in numbers.columns]) / 2000 < 0.07
    assert min(numbers[c].min() for c in numbers.columns) < 0
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_raw(log, 10, tmp_path / name)
