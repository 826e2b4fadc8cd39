"""``quorem demo``."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Device
from .terminal import command, print_table, terminal

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
    from ..experiments import demo, words
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
    full = figure.points[0]
    rows_of_table = [
        {
            "tables": point.series,
            "size": words.size(point.embedding_bytes),
            "times smaller": "" if point is full else f"{full.embedding_bytes / point.embedding_bytes:.1f}",
            "log loss": f"{words.or_nan(point.test_mean):.4f}",
            "against full": "" if point is full else f"{demo.change(point, full):+.1%}",
            "AUC": f"{words.or_nan(point.auc_mean):.4f}",
        }
        for point in figure.points
    ]
    print_table(console, rows_of_table)
    note = "Log loss (less is better) and AUC (more is) are those of the test rows, one trial each."
    if (best := prepared.meta.get("true_log_loss", {}).get("test")) is not None:
        note += f" The hidden model that drew the clicks has a log loss of {best:.4f}."
    console.print(note, soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    figure.write(out / "results.json")
    sentence = demo.headline(figure.points)
    page([figure], out / "index.html", headline=sentence)
    lines = ["", sentence, f"Page: {out / 'index.html'}", "", "Try next:"]
    options = ["--networks", "dlrm", "--optimizers", "adagrad", "--trials", 2]
    for following in (
        ["train", "--data", prepared.path, "--out", out / "mult", "--scheme", "mult", "--collisions", 4],
        ["report", out / "mult"],
        ["reproduce", "figure4", "--data", prepared.path, "--out", out / "figure4", *options],
    ):
        lines.append(f"  {command(*following)}")
    console.print("\n".join(lines), soft_wrap=True)
