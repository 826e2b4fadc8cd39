"""``quorem evaluate`` and ``quorem predict``: metrics and scores of a finished run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .options import Threads
from .terminal import print_table, terminal

if TYPE_CHECKING:
    from ..serving.scorer import Scorer
    from ..training.metrics import Metrics

commands = typer.Typer()

Run = Annotated[Path, typer.Argument(help="Folder of a finished run.")]
Bits = Annotated[Literal["8", "4"] | None, typer.Option(help="Store the rows in 8 or 4 bits a number first.")]


@commands.command(epilog="Example: quorem evaluate runs/first --bits 8")
def evaluate(
    run: Run,
    data: Annotated[
        Path | None, typer.Option(help="The prepared data of the run; by default where they were when it trained.")
    ] = None,
    split: Annotated[Literal["train", "validation", "test"], typer.Option(help="Rows to evaluate.")] = "test",
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
    out: Annotated[
        Path, typer.Option(help="File to write: CSV, or Parquet by its name; one that is there is replaced.")
    ],
    bits: Bits = None,
    label: Annotated[str | None, typer.Option(help="Column of labels in FILE: print the metrics too.")] = None,
    unknown: Annotated[
        Literal["error", "missing"],
        typer.Option(help="A value that training never saw, if there is no id for such: stop, or take it as missing."),
    ] = "error",
    separator: Annotated[
        str | None, typer.Option(help="Between the fields of a CSV file; by default as in the file that was prepared.")
    ] = None,
    multi_separator: Annotated[
        str | None, typer.Option(help="Between the values of a multi-valued field; likewise.")
    ] = None,
    max_malformed: Annotated[int, typer.Option(min=0, help="Malformed lines left out before it stops.")] = 0,
    threads: Threads = None,
) -> None:
    """Write the probability of a click for every row of a file."""
    from ..serving.predict import predict
    from . import preparing

    scorer = _scorer(run, bits, unknown)
    console = terminal(stderr=True)
    try:
        with preparing.bar(console) as progress:
            done = predict(
                scorer,
                file,
                out,
                label=label,
                separator=separator,
                multi_separator=multi_separator,
                max_malformed=max_malformed,
                progress=progress,
            )
    except KeyboardInterrupt:
        kept = "the file from before is kept" if out.exists() else "nothing was written"
        raise KeyboardInterrupt(f"interrupted; {out}: {kept}") from None
    rate = done.rows / max(done.seconds, 1e-9)
    typer.echo(f"{out}: {done.rows:,} rows, {rate:,.0f} rows/s")
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
    return scorer if bits is None else scorer.quantize_(8 if bits == "8" else 4)
