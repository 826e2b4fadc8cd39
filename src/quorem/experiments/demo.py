"""The library at work: one click log, DLRM trained with tables of several sizes, and a page about what each cost."""

import base64
import html
import io
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..data.batches import Prepared
from ..data.shape import scaled_cardinalities
from ..data.synthetic import ClickLog, synthesize
from ..files import write
from ..schemes import QR, Full, Hash, Scheme
from ..training.config import RunConfig
from ..training.loop import Options, Status, stop_on_signal, train_many
from ..training.model import data_identity
from ..training.run import read_metrics
from .watch import watching

ROWS, SCALE = 250_000, 0.002  # of the log that is made up, and its cardinalities relative to Criteo's
POINTS = 12  # of a curve

SCHEMES: dict[str, Scheme] = {
    "full tables": Full(),
    "hashing, 4x": Hash(4),
    "quotient-remainder, 4x": QR(4),
    "hashing, 60x": Hash(60),
    "quotient-remainder, 60x": QR(60),
}


@dataclass(frozen=True)
class Entry:
    """One trained model: its name, its result, and (rows seen, validation log loss) as it trained."""

    name: str
    result: dict[str, Any]
    curve: list[tuple[int, float]]


def make_log(out: str | os.PathLike[str], seed: int, num_rows: int = ROWS) -> Prepared:
    """A click log of Criteo's shape, small enough to train on in seconds, whose best log loss is known."""
    log = ClickLog(cardinalities=scaled_cardinalities(SCALE), seed=seed)
    return synthesize(log, num_rows, out)


def configs_of(prepared: Prepared, seed: int, max_rows: int | None = None) -> dict[RunConfig, str]:
    """The runs of the demo and their names."""
    num_rows = len(prepared.split("train"))
    steps = -(-min(max_rows or num_rows, num_rows) // RunConfig.batch_size)
    every = max(1, -(-steps // POINTS))
    data = data_identity(prepared)
    return {
        RunConfig(data=data, scheme=scheme, seed=seed, max_rows=max_rows, validate_every=every): name
        for name, scheme in SCHEMES.items()
    }


def train_all(
    configs: Mapping[RunConfig, str],
    prepared: Prepared,
    folder: Path,
    *,
    device: str = "cpu",
    report: Callable[[Status], None] | None = None,
) -> list[Entry]:
    """Train every model, two at a time."""
    outs = [folder / f"run{k}" for k in range(len(configs))]
    options = Options(checkpoint_seconds=float("inf"), report=report)
    workers = 1 if device != "cpu" else min(2, os.cpu_count() or 1)
    with stop_on_signal() as stop:
        results = train_many(list(configs), prepared, outs, device=device, options=options, stop=stop, workers=workers)
    return [Entry(name, result, _curve(out)) for name, result, out in zip(configs.values(), results, outs, strict=True)]


def _curve(out: Path) -> list[tuple[int, float]]:
    lines = read_metrics(out / "metrics.jsonl").lines
    size = RunConfig.batch_size
    return [(line["step"] * size, line["validation"]["log_loss"]) for line in lines if "validation" in line]


def show(
    console: Console, out: Path, *, data: Path | None, seed: int, rows: int | None = None, device: str = "cpu"
) -> list[Entry]:
    """Run the demo: data, training with progress, a table on the terminal and a page in ``out``."""
    with tempfile.TemporaryDirectory(prefix="quorem-demo-") as folder:
        if data is None:
            console.print(f"Making up a click log of {rows or ROWS:,} rows ...", highlight=False)
            prepared, rows = make_log(Path(folder) / "log", seed, rows or ROWS), None
        else:
            prepared = Prepared(data)
        best = prepared.meta.get("true_log_loss", {}).get("test")
        configs = configs_of(prepared, seed, rows)
        about = describe(prepared, rows)
        console.print(about, highlight=False)
        with watching(console, dict(configs)) as report:
            entries = train_all(configs, prepared, Path(folder), device=device, report=report)
    _print(console, entries, best)
    out.mkdir(parents=True, exist_ok=True)
    write(out / "results.json", json.dumps([entry.result for entry in entries], indent=1) + "\n")
    write(out / "index.html", page(entries, about, best))
    console.print(f"Plots and numbers: {out / 'index.html'}", highlight=False)
    return entries


def describe(prepared: Prepared, max_rows: int | None = None) -> str:
    """One sentence about the data and the network."""
    rows = min(max_rows or prepared.num_rows, len(prepared.split("train")))
    ids, features = sum(prepared.cardinalities), len(prepared.cardinalities)
    return (
        f"DLRM, one epoch over {rows:,} rows with {ids:,} categories in {features} features, D = 16, batch 128, "
        f"Adagrad; tested on {len(prepared.split('test')):,} later rows."
    )


COLUMNS = ("tables", "parameters", "MB", "log loss", "AUC", "rows/s")


def cells(entries: Sequence[Entry]) -> list[tuple[str, ...]]:
    """The table, a row a model; parameters and megabytes are those of the embedding tables."""
    return [
        (
            entry.name,
            f"{entry.result['embedding_parameters']:,}",
            f"{entry.result['embedding_bytes'] / 1e6:.2f}",
            f"{entry.result['test']['log_loss']:.4f}",
            f"{entry.result['test']['auc']:.4f}",
            f"{entry.result['rows_per_second']:,.0f}",
        )
        for entry in entries
    ]


NOTE = (
    "Parameters and MB are those of the embedding tables; log loss (less is better) and AUC (more is) of the test rows."
)


def _print(console: Console, entries: Sequence[Entry], best: float | None) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "tables" else "right")
    for row in cells(entries):
        table.add_row(*row)
    console.print(table)
    console.print(NOTE + _best(best), highlight=False)


def _best(best: float | None) -> str:
    return "" if best is None else f" The hidden model that drew the clicks has a log loss of {best:.4f}."


def page(entries: Sequence[Entry], about: str, best: float | None) -> str:
    """A page that stands alone: the table, the plots, and what they were made by."""
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in cells(entries)
    )
    first = entries[0].result
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    made = f"seed {first['seed']}; {first['device']}; {versions}; commit {first['commit'] or 'unknown'}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>quorem demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse }}
th, td {{ padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left }}
img {{ max-width: 100% }}
footer {{ color: #777; font-size: 85% }}
</style></head><body>
<h1>Smaller embedding tables, and what they cost</h1>
<p>{html.escape(about)}</p>
<table><thead><tr>{head}</tr></thead><tbody>
{body}</tbody></table>
<p>{html.escape(NOTE + _best(best))}</p>
<p>Hashing lets categories share a row and so be taken for each other. The quotient-remainder trick composes each
category's vector from two small tables such that no two categories have the same pair of rows.</p>
<img alt="Test log loss against embedding parameters" src="data:image/png;base64,{_png(plot_sizes, entries, best)}">
<img alt="Validation log loss while training" src="data:image/png;base64,{_png(plot_curves, entries, best)}">
<footer><p>{html.escape(made)}</p></footer>
</body></html>
"""


def _png(draw: Callable[..., None], *arguments: Any) -> str:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    draw(figure.add_subplot(), *arguments)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return base64.b64encode(file.getvalue()).decode()


def plot_sizes(axes: Any, entries: Sequence[Entry], best: float | None) -> None:
    """Test log loss against the tables' parameters, a line a method."""
    points: dict[str, list[tuple[int, float]]] = {}
    for entry in entries:
        point = (entry.result["embedding_parameters"], entry.result["test"]["log_loss"])
        points.setdefault(entry.name.split(",")[0], []).append(point)
    for name, line in points.items():
        axes.plot(*zip(*line, strict=True), "o-", label=name)
    if best is not None:
        axes.axhline(best, color="gray", ls=":", label="hidden model")
    axes.set(xscale="log", xlabel="parameters of the embedding tables", ylabel="test log loss")
    axes.legend()
    axes.grid(alpha=0.3)


def plot_curves(axes: Any, entries: Sequence[Entry], best: float | None) -> None:
    """Validation log loss against the rows seen."""
    for entry in entries:
        axes.plot(*zip(*entry.curve, strict=True), "o-", ms=3, label=entry.name)
    axes.set(xlabel="rows seen", ylabel="validation log loss")
    axes.legend()
    axes.grid(alpha=0.3)
