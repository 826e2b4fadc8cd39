"""``quorem bench``: what it writes, what it refuses, and how it ends; its rows as files and tables."""

from pathlib import Path

import optimizers
import pytest
import torch
from commands import invoke

from quorem.experiments.bench import measure, report, run
from quorem.experiments.bench.grid import FBGEMM, PROVIDERS, SCHEMES, draw_ids, stored_scheme
from quorem.experiments.bench.providers import Skipped

ROOT = Path(__file__).parents[3]
TINY = ["bench", "--quick", "--device", "cpu", "--scheme", "qr", "--ids", "zipf", "--batch", "3"]
TINY += ["--dim", "4", "--provider", "loop", "--provider", "fused"]


def row(**changes: object) -> report.Row:
    """A row with numbers made up."""
    values: dict[str, object] = dict.fromkeys(report.CSV_COLUMNS, "")
    values |= {"mode": "step", "provider": "fused", "scheme": "QR(4)", "ids": "zipf"}
    values |= {"batch": 128, "dim": 16, "graph": 0, "bytes": 10, "gbps": 1.5, "floor_us": 0.5, "ratio_to_floor": 20.0}
    values |= {"median_us": 10.0, "q20_us": 9.0, "q80_us": 12.0, "samples": 5, "stored_bytes": 1000, "copy_gbps": 20.0}
    return report.Row(**values | changes)


def test_a_small_run_writes_rows_and_prints_tables(tmp_path):
    out = tmp_path / "new" / "cpu.csv"
    done = invoke(*TINY, "--mode", "forward", "--mode", "step", "--out", out)
    rows = report.read(out)
    assert [(r.mode, r.provider) for r in rows] == [(m, p) for m in ("forward", "step") for p in ("loop", "fused")]
    for r in rows:
        assert (r.scheme, r.ids, r.batch, r.dim, r.graph) == ("QR(4)", "zipf", 3, 4, 0)
        assert 0 < r.q20_us <= r.median_us <= r.q80_us
        assert r.gbps == pytest.approx(r.bytes / r.median_us / 1e3, abs=1e-3)
        assert r.ratio_to_floor == pytest.approx(r.median_us / r.floor_us, rel=2e-3, abs=1e-2)
        assert r.torch == torch.__version__ and r.device and r.commit and r.date and r.command
    assert {r.optimizer for r in rows if r.mode == "step"} == {"Adagrad", "torch Adagrad, sparse gradients"}
    assert report.tables(rows) in done.output


def test_an_interrupted_run_keeps_its_rows(tmp_path, monkeypatch):
    def measured(*_, **__):
        yield row()
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "rows", measured)
    invoke(*TINY, "--out", tmp_path / "cpu.csv", code=130)
    assert [r.provider for r in report.read(tmp_path / "cpu.csv")] == ["fused"]


def test_tables_compare_with_fused_on_the_same_tables():
    rows = [row(provider="dense", scheme="Full()", median_us=30.0), row(provider="loop", median_us=50.0), row()]
    rows += [row(provider="loop", scheme="ChineseRemainder(3)", median_us=70.0), row(batch=2048, median_us=1234.5)]
    lines = report.tables(rows).splitlines()[4:]
    assert lines == [
        "| step, D = 16, zipf ids | tables | B = 128 | B = 2048 |",
        "|---|---|---|---|",
        "| `dense` | `Full()` | 30.0 (3.00x) |  |",
        "| `loop` | `QR(4)` | 50.0 (5.00x) |  |",
        "| `fused` | `QR(4)` | 10.0 | 1,234 |",
        "| `loop` | `ChineseRemainder(3)` | 70.0 |  |",
    ]


def test_results_tell_where_they_come_from():
    for path in (ROOT / "benchmarks" / "results").glob("*.csv"):
        for r in report.read(path):
            assert r.device and r.torch and r.quorem and r.date and r.commit not in ("", "unknown")
            assert r.command.startswith("quorem bench") and str(Path.home()) not in r.command


SIZES = (50, 4, 1000, 7)


@pytest.mark.parametrize("mode", ["forward", "step"])
def test_bytes_count_ids_distinct_rows_vectors_and_state(mode):
    ids = draw_ids("zipf", SIZES, 40, seed=0)
    specs = [SCHEMES["QR(4)"].spec(n, 8) for n in SIZES]
    rows = {
        (f, k, int(p(torch.tensor(i))))
        for f, spec in enumerate(specs)
        for i in ids[:, f].tolist()
        for k, p in enumerate(spec.partitions)
    }
    pass_ = 40 * 4 * 8 + len(rows) * 8 * 4 + 40 * 4 * 8 * 4
    expected = pass_ if mode == "forward" else 2 * pass_ + len(rows) * 8 * 4 * 3
    assert measure.bytes_to_move(specs, [ids], mode) == expected


CPU = torch.device("cpu")


def contender(provider: str, scheme: str, mode: str):
    if provider in FBGEMM:
        pytest.importorskip("fbgemm_gpu", reason='needs FBGEMM: pip install "quorem[torchrec-cpu]"')
    return run.build(provider, scheme, mode, SIZES, 8, CPU)


@pytest.mark.parametrize(
    ("provider", "scheme"), [*((provider, "QR(4)") for provider in PROVIDERS), ("fused", "GeneralizedQR(3)")]
)
def test_every_provider_gives_the_vectors_of_the_same_tables(provider, scheme):
    ids = draw_ids("zipf", SIZES, 33, seed=3)
    made = contender(provider, scheme, "forward")
    tables = run.collection(stored_scheme(provider, scheme), SIZES, 8, CPU).to_dense().values()
    expected = torch.stack([table[ids[:, f]] for f, table in enumerate(tables)], 1)
    with torch.no_grad():
        torch.testing.assert_close(made.module(ids), expected[:, made.order or list(range(4))])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_provider_takes_the_same_step(provider):
    """Adagrad's on the dense gradient of the tables, as ``torch.optim`` takes it, or with one sum a row."""
    ids = draw_ids("zipf", SIZES, 33, seed=3)
    made = contender(provider, "QR(4)", "step")
    oracle = run.collection(stored_scheme(provider, "QR(4)"), SIZES, 8, CPU)
    optimizer = optimizers.oracle("RowWiseAdagrad" if "row-wise" in made.optimizer else "Adagrad", oracle, 0.01)
    order = made.order or list(range(4))
    grad = torch.randn(33, 4, 8, generator=torch.Generator().manual_seed(33)) / 33  # as in the benchmark
    for _ in range(2):
        run.operation("step", made, ids)()
        oracle(ids)[:, order].backward(grad)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(made.module(ids), oracle(ids)[:, order])


def test_a_provider_of_other_vectors_is_refused(monkeypatch):
    def wrong(source, mode):
        source.stored.data.mul_(2)
        return run.Contender(source)

    monkeypatch.setitem(run.BUILD, "loop", wrong)
    with pytest.raises(Skipped, match="its vectors differ"):
        run.build("loop", "QR(4)", "forward", SIZES, 8, CPU)
