"""``quorem demo``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Device
from .terminal import command, terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from ..experiments.figures import Result

commands = typer.Typer()


@commands.command(epilog="Example: quorem demo --rows 50000")
def demo(
    data: Annotated[Path | None, typer.Option(help="Prepared data; by default a click log is made up.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page, the log and the runs.")] = Path("runs/demo"),
    rows: Annotated[
        int | None, typer.Option(min=1000, help="Rows to make up (by default 100,000), or to train on at most.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")] = 0,
    device: Device = "auto",
) -> None:
    """Train DLRM with full, hashed, composed and planned tables; print what each costs and write a page about it."""
    import tempfile

    from ..data.prepared import Prepared
    from ..experiments import demo
    from ..experiments.report import page  # before training, so that a missing library is reported at once
    from .progress import watching

    console = terminal()
    if data is None:
        console.print(f"Making up a click log of {rows or demo.ROWS:,} rows ...")
        prepared, rows = demo.make_log(out / "log", seed, rows or demo.ROWS), None
    else:
        prepared = Prepared(data)
    configs = demo.configs_of(prepared, seed, rows)
    console.print(demo.about(prepared, rows), soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="quorem-demo-") as folder, watching(console, dict(configs)) as report:
        figure = demo.train_all(configs, prepared, Path(folder), device=device, report=report)
    console.print(table_of(figure.points))
    note = "Log loss (less is better) and AUC (more is) are those of the test rows, one trial each."
    if (best := prepared.meta.get("true_log_loss", {}).get("test")) is not None:
        note += f" The hidden model that drew the clicks has a log loss of {best:.4f}."
    console.print(note, soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    figure.write(out / "results.json")
    sentence = demo.headline(figure.points)
    page([figure], out / "index.html", headline=sentence)
    lines = ["", sentence, f"Page: {out / 'index.html'}", "", "Try next:", *next_commands(prepared.path, out)]
    console.print("\n".join(lines), soft_wrap=True)


def table_of(points: "Sequence[Result]") -> "Table":
    """A row for each model; sizes are those of the embedding tables."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from ..experiments import words
    from ..experiments.demo import change

    full = points[0]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("tables", "size", "times smaller", "log loss", "against full", "AUC"):
        table.add_column(column, justify="left" if column == "tables" else "right")
    for point in points:
        table.add_row(
            point.series,
            words.size(point.embedding_bytes),
            "" if point is full else f"{full.embedding_bytes / point.embedding_bytes:.1f}",
            f"{words.or_nan(point.test_mean):.4f}",
            "" if point is full else f"{change(point, full):+.1%}",
            f"{words.or_nan(point.auc_mean):.4f}",
        )
    return table


def next_commands(data: Path, out: Path) -> list[str]:
    """Three commands to try next, indented."""
    options = ["--networks", "dlrm", "--optimizers", "adagrad", "--trials", 2]
    following = [
        ["train", "--data", data, "--out", out / "mult", "--scheme", "mult", "--collisions", 4],
        ["report", out / "mult"],
        ["reproduce", "figure4", "--data", data, "--out", out / "figure4", *options],
    ]
    return [f"  {command(*arguments)}" for arguments in following]
