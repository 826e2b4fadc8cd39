"""``quorem demo``."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from .figures import train_and_publish
from .options import Device
from .terminal import command, print_table, terminal

commands = typer.Typer()


@commands.command(epilog="Example: quorem demo --rows 50000")
def demo(
    out: Annotated[Path, Option(help="Folder for the page, the log and the runs.")] = Path("runs/demo"),
    rows: Annotated[int, Option(min=1000, help="Rows of the click log that is made up.")] = 100_000,
    seed: Annotated[int, Option(min=0, help="Seed of the click log.")] = 0,
    device: Device = "auto",
) -> None:
    """Train DLRM with full, hashed, composed and planned tables; print what each costs and write a page about it."""
    from ..experiments import demo, words
    from ..planner.budget import show_bytes

    console = terminal()
    console.print(f"Making up a click log of {rows:,} rows ...")
    prepared = demo.make_log(out / "log", seed, rows)
    planned = demo.planned(prepared)
    about = words.data(planned.made.data)
    console.print(f"DLRM, one epoch, D = 16, batch 128, Adagrad; {about}.", soft_wrap=True)
    figures = train_and_publish([planned], out, device=device, workers=demo.WORKERS if device == "cpu" else None)
    figure = next(figure for figure in figures if figure.axes == planned.axes)
    points = sorted(figure.points, key=lambda point: -point.embedding_bytes)
    full = points[0]
    rows_of_table = [
        {
            "tables": point.series,
            "size": show_bytes(point.embedding_bytes),
            "times smaller": "" if point is full else f"{full.embedding_bytes / point.embedding_bytes:.1f}",
            "log loss": f"{point.loss:.4f}",
            "against full": "" if point is full else f"{point.loss / full.loss - 1:+.1%}",
            "AUC": f"{words.or_nan(point.auc_mean):.4f}",
        }
        for point in points
    ]
    print_table(console, rows_of_table)
    assert prepared.meta.bayes_log_loss is not None
    best = prepared.meta.bayes_log_loss["test"]
    note = "Log loss (less is better) and AUC (more is) are those of the test rows, one trial each."
    console.print(f"{note} The hidden model that drew the clicks has a log loss of {best:.4f}.", soft_wrap=True)
    options = ["--networks", "dlrm", "--optimizers", "adagrad", "--trials", 2]
    following = (
        ["train", "--data", prepared.path, "--out", out / "mult", "--scheme", "mult", "--collisions", 4],
        ["report", out / "mult"],
        ["reproduce", "figure4", "--data", prepared.path, "--out", out / "figure4", *options],
    )
    lines = ["", "Try next:", *(f"  {command(*words)}" for words in following)]
    console.print("\n".join(lines), soft_wrap=True)
