"""Time and memory of preparing a Criteo file beside merely parsing it, in three engines (docs/appendix/data_speed.md).

    python benchmarks/prepare.py --work DIR --rows 1000000 4000000 16000000 --out benchmarks/results/prepare.json
    python benchmarks/prepare.py --out benchmarks/results/prepare.json --table
    python benchmarks/prepare.py --synthetic cuda --out benchmarks/results/synthetic_cuda.json

The raw files are drawn from the synthetic log with the real cardinalities and kept in DIR. Every measurement is a fresh
process; rounds are interleaved, so that what else the machine does falls on all alike. PyArrow and DuckDB take part if
they can be imported. Their whole job is written the plain way, in memory; quorem's is the command itself.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np

from quorem.data.raw import write_raw
from quorem.data.shape import CATEGORICAL_NAMES, COLUMN_NAMES, DENSE_NAMES
from quorem.data.synthetic import ClickLog, synthesize
from quorem.provenance import commit

IN_MEMORY_ROWS = 4_000_000  # engines that hold the whole table run up to this size


def save(out: Path, labels, dense, ids) -> None:
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / "labels.npy", labels)
    np.save(out / "dense.npy", dense)
    np.save(out / "categorical.npy", ids)


def polars_parse(raw: Path, out: Path) -> None:
    """Blocks of text, as quorem reads them, parsed and dropped."""
    import polars as pl

    from quorem.data import criteo, text

    columns = dict(criteo.LAYOUT.columns)
    for block in text.blocks(raw):
        pl.read_csv(block.data, has_header=False, schema=columns, separator="\t", quote_char=None)


def polars_parse_whole(raw: Path, out: Path) -> None:
    import polars as pl

    from quorem.data import criteo

    pl.read_csv(raw, has_header=False, schema=dict(criteo.LAYOUT.columns), separator="\t", quote_char=None)


def polars_job(raw: Path, out: Path) -> None:
    """The command: bounded memory, checked lines, vocabularies, frequencies."""
    from quorem.data.criteo import prepare_criteo

    prepare_criteo(raw, out, overwrite=True)


def arrow_options():
    import pyarrow as pa
    from pyarrow import csv

    types = {name: pa.string() if name in CATEGORICAL_NAMES else pa.int64() for name in COLUMN_NAMES}
    return {
        "read_options": csv.ReadOptions(column_names=list(COLUMN_NAMES), block_size=1 << 24),
        "parse_options": csv.ParseOptions(delimiter="\t", quote_char=False),
        "convert_options": csv.ConvertOptions(column_types=types, strings_can_be_null=True, null_values=[""]),
    }


def arrow_parse(raw: Path, out: Path) -> None:
    from pyarrow import csv

    for _ in csv.open_csv(raw, **arrow_options()):
        pass


def arrow_parse_whole(raw: Path, out: Path) -> None:
    from pyarrow import csv

    csv.read_csv(raw, **arrow_options())


def arrow_job(raw: Path, out: Path) -> None:
    """Dictionary encoding gives ids by first appearance."""
    from concurrent.futures import ThreadPoolExecutor

    from pyarrow import csv

    table = csv.read_csv(raw, **arrow_options())
    dense = np.stack([table[name].fill_null(0).to_numpy() for name in DENSE_NAMES], 1)

    def encode(name):
        coded = table[name].dictionary_encode().combine_chunks()
        ids = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False) + 1
        np.bincount(ids)
        return ids

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ids = np.stack(list(pool.map(encode, CATEGORICAL_NAMES)), 1)
    save(out, table["label"].to_numpy(), np.log1p(np.maximum(dense, 0)).astype(np.float32), ids)


def duckdb_source(raw: Path) -> str:
    types = ", ".join(f"'{n}': '{'VARCHAR' if n in CATEGORICAL_NAMES else 'BIGINT'}'" for n in COLUMN_NAMES)
    return f"read_csv('{raw}', delim='\t', header=false, quote='', escape='', auto_detect=false, columns={{{types}}})"


def duckdb_parse(raw: Path, out: Path) -> None:
    import duckdb

    every = ", ".join(f"max({name})" for name in COLUMN_NAMES)
    duckdb.sql(f"SELECT {every} FROM {duckdb_source(raw)}").fetchall()


def duckdb_job(raw: Path, out: Path) -> None:
    """A table with row numbers; ids by a ranking of first rows and a join, column by column."""
    import duckdb

    db = duckdb.connect()
    db.execute(f"CREATE TABLE log AS SELECT row_number() OVER () AS row, * FROM {duckdb_source(raw)}")
    ids = []
    for name in CATEGORICAL_NAMES:
        db.execute(
            f"CREATE OR REPLACE TEMP TABLE words AS SELECT token, row_number() OVER (ORDER BY first) AS id FROM "
            f"(SELECT {name} AS token, min(row) AS first FROM log WHERE {name} IS NOT NULL GROUP BY {name})"
        )
        query = f"SELECT coalesce(id, 0)::INTEGER AS id FROM log LEFT JOIN words ON {name} = token ORDER BY row"
        ids.append(db.sql(query).fetchnumpy()["id"])
        np.bincount(ids[-1])
    values = ", ".join(f"ln(greatest(coalesce({name}, 0), 0) + 1)::FLOAT AS {name}" for name in DENSE_NAMES)
    dense = db.sql(f"SELECT label, {values} FROM log ORDER BY row").fetchnumpy()
    save(out, dense["label"], np.stack([dense[name] for name in DENSE_NAMES], 1), np.stack(ids, 1))


WORK = {
    "polars parse": polars_parse,
    "polars parse, whole file": polars_parse_whole,
    "polars job (quorem)": polars_job,
    "arrow parse": arrow_parse,
    "arrow parse, whole file": arrow_parse_whole,
    "arrow job": arrow_job,
    "duckdb parse": duckdb_parse,
    "duckdb job": duckdb_job,
}
IN_MEMORY = {"polars parse, whole file", "arrow parse, whole file", "arrow job", "duckdb job"}
PACKAGE = {"polars": "polars", "arrow": "pyarrow", "duckdb": "duckdb"}


def measure(work, *arguments) -> dict[str, float]:
    """Seconds and peak memory of a call; imports are not timed."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    work(*arguments)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall, 3), "cpu_s": round(cpu, 3), "peak_gb": round(after.ru_maxrss / 1e6, 3)}


def child(name: str, raw: str, out: str) -> None:
    __import__(PACKAGE[name.split()[0]])
    print(json.dumps(measure(WORK[name], Path(raw), Path(out))))


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, object]:
    versions = {p: installed(p) for p in ("quorem", "polars", "pyarrow", "duckdb", "numpy", "torch") if installed(p)}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "commit": commit() or os.environ.get("COMMIT", "unknown"),  # a copy of the tree may have no history
        "date": date.today().isoformat(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }


def run(work: Path, rows: list[int], rounds: int, out: Path) -> None:
    """Measure, and add to what the file has of other sizes."""
    results = json.loads(out.read_text())["results"] if out.exists() else []
    results = [result for result in results if result["rows"] not in rows]
    for count in rows:
        raw = work / f"criteo-{count}.txt"
        work.mkdir(parents=True, exist_ok=True)
        if not raw.exists():
            write_raw(ClickLog(), count, raw)
        names = [
            n for n in WORK if installed(PACKAGE[n.split()[0]]) and (count <= IN_MEMORY_ROWS or n not in IN_MEMORY)
        ]
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                command = [sys.executable, __file__, "--child", name, str(raw), str(work / "prepared")]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                samples[name].append(json.loads(done.stdout.splitlines()[-1]))
                shutil.rmtree(work / "prepared", ignore_errors=True)
                print(count, name, samples[name][-1], flush=True)
        for name in names:
            middle = {key: statistics.median(sample[key] for sample in samples[name]) for key in samples[name][0]}
            results.append(
                {"rows": count, "work": name, "bytes": raw.stat().st_size, **middle, "rounds": samples[name]}
            )
        out.write_text(json.dumps({**environment(), "results": results}, indent=1) + "\n")


def table(path: Path) -> str:
    """Markdown of the medians, and of the job's time over that of the engine's faster parse, round by round."""
    data = json.loads(path.read_text())
    heads = "rows", "work", "wall, s", "CPU, s", "peak memory, GB", "wall over parse", "CPU over parse"
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    results = {(r["rows"], r["work"]): r for r in sorted(data["results"], key=lambda r: r["rows"])}
    for (rows, work), result in results.items():
        ratios = ["", ""]
        if "job" in work:
            prefix = work.split()[0] + " parse"
            parses = [r["rounds"] for (size, name), r in results.items() if size == rows and name.startswith(prefix)]
            for j, key in enumerate(("wall_s", "cpu_s")):
                each = [
                    sample[key] / min(parse[i][key] for parse in parses) for i, sample in enumerate(result["rounds"])
                ]
                ratios[j] = f"{statistics.median(each):.2f}"
        values = (f"{result[key]:.1f}" for key in ("wall_s", "cpu_s"))
        lines.append(f"| {rows:,} | {work} | {' | '.join(values)} | {result['peak_gb']:.2f} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def synthetic(device: str, rows: int, work: Path, out: Path) -> None:
    """Rows a second of the synthetic log: drawn, and on a CPU also written in both forms."""
    import torch

    log = ClickLog()
    log.draw(0, 1, device)

    def draw() -> None:
        log.draw(0, rows, device)
        if device != "cpu":
            torch.cuda.synchronize()

    results = {"draw": [measure(draw) for _ in range(3)]}
    if device == "cpu":
        work.mkdir(parents=True, exist_ok=True)
        results["synthesize"] = [measure(lambda: synthesize(log, rows, work / "synthetic", overwrite=True))]
        results["write_raw"] = [measure(lambda: write_raw(log, rows, work / "synthetic.txt", overwrite=True))]
    name = platform.processor() or platform.machine() if device == "cpu" else torch.cuda.get_device_name()
    speeds = {key: round(rows / min(s["wall_s"] for s in samples)) for key, samples in results.items()}
    report = {**environment(), "device": name, "rows": rows, "rows_per_second": speeds, "samples": results}
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(speeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/prepare"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 4_000_000, 16_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prepare.json"))
    parser.add_argument("--table", action="store_true", help="print the table of a finished run")
    parser.add_argument("--synthetic", metavar="DEVICE", help="time the synthetic log instead")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
    elif options.table:
        print(table(options.out))
    elif options.synthetic:
        synthetic(options.synthetic, options.rows[0], options.work, options.out)
    else:
        run(options.work, options.rows, options.rounds, options.out)


if __name__ == "__main__":
    main()
