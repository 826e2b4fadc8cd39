"""``quorem evaluate`` and ``quorem predict``: metrics and scores of a finished run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from .options import Bits, Threads, store_in
from .progress import stages
from .terminal import print_table, terminal

if TYPE_CHECKING:
    from ..serving.scorer import Scorer
    from ..training.metrics import Metrics

commands = typer.Typer()
Run = Annotated[Path, typer.Argument(help="Folder of a finished run.")]


@commands.command(epilog="Example: quorem evaluate runs/first --bits 8")
def evaluate(
    run: Run,
    data: Annotated[Path | None, Option(help="Prepared data of the run; by default where they were then.")] = None,
    split: Annotated[Literal["train", "validation", "test"], Option(help="Rows to evaluate.")] = "test",
    bits: Bits = None,
    threads: Threads = None,
) -> None:
    """Print the metrics of a finished run on its data."""
    from ..data.prepared import Prepared

    scorer = _scorer(run, bits)
    prepared = Prepared(data if data is not None else scorer.encoding.folder)
    _print_metrics(f"{run}, {split}", scorer.evaluate(prepared, split))
    if split != "train":
        for name, count in prepared.unseen(split).items():
            typer.echo(f"{name}: {count:,} values are not in the training rows")


@commands.command(epilog="Example: quorem predict runs/first clicks.csv --out scores.csv")
def predict(
    run: Run,
    file: Annotated[Path, typer.Argument(help="CSV with a header line (plain or gzip), .parquet, or Criteo's form.")],
    out: Annotated[Path, Option(help="File to write, CSV or .parquet; one that is there is replaced.")],
    bits: Bits = None,
    label: Annotated[str | None, Option(help="Column of labels in FILE: print the metrics too.")] = None,
    unknown: Annotated[
        Literal["error", "missing"],
        Option(help="A value that training never saw, if there is no id for such: stop, or take it as missing."),
    ] = "error",
    max_malformed: Annotated[int, Option(min=0, help="Malformed lines left out before it stops.")] = 0,
    threads: Threads = None,
) -> None:
    """Write the probability of a click for every row of a file."""
    from ..serving.predict import predict

    scorer = _scorer(run, bits, unknown)
    try:
        with stages(terminal(stderr=True)) as progress:
            done = predict(scorer, file, out, label=label, max_malformed=max_malformed, progress=progress)
    except KeyboardInterrupt:
        kept = "the file from before is kept" if out.exists() else "nothing was written"
        raise KeyboardInterrupt(f"interrupted; {out}: {kept}") from None
    typer.echo(f"{out}: {done.rows:,} rows, {done.rows / max(done.seconds, 1e-9):,.0f} rows/s")
    if done.malformed:
        typer.echo(f"malformed lines left out: {done.malformed:,}")
    for name, count in done.unseen.items():
        typer.echo(f"{name}: {count:,} values are not in the training rows")
    if done.metrics is not None:
        _print_metrics(f"{run}, {file}", done.metrics)


def _print_metrics(title: str, metrics: "Metrics") -> None:
    from dataclasses import asdict

    rows = []
    for name, value in asdict(metrics).items():
        text = f"{value:,}" if isinstance(value, int) else f"{value:.5f}"
        rows.append({"metric": name.replace("_", " ").replace("auc", "AUC"), "value": text})
    terminal().print(title, soft_wrap=True)
    print_table(terminal(), rows)


def _scorer(run: Path, bits: Literal["8", "4"] | None, unknown: Literal["error", "missing"] = "error") -> "Scorer":
    """The scorer of a run, its rows stored in so many bits."""
    from ..serving.scorer import Scorer

    scorer = Scorer(run, unknown=unknown)
    store_in(scorer.model, bits)
    return scorer
