"""``quorem reproduce``, ``quorem sweep`` and ``quorem report``: train many runs, and write a page about them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .options import Device, integers
from .terminal import command, command_line, terminal, watching_sweep

if TYPE_CHECKING:
    from ..experiments.figures import Figure

commands = typer.Typer()

What = Literal["figure4", "figure5", "figure6", "figure7", "table1", "all"]
Runs = Annotated[Path, typer.Option("--out", help="Folder of the runs; what is finished there is not trained again.")]
Trials = Annotated[int, typer.Option(min=1, help="Seeds of each setting.")]
Optimizers = Annotated[str, typer.Option(help="adagrad, amsgrad or both; the better by validation loss is shown.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes; by default one a core, or one for a GPU.")]


@commands.command(epilog="Example: quorem reproduce figure5 --data data/criteo --collisions 4,60 --trials 1")
def reproduce(
    what: Annotated[What, typer.Argument(help="Figure or table of the paper.")],
    data: Annotated[Path, typer.Option(help="Prepared data.")],
    out: Runs = Path("runs/reproduce"),
    trials: Trials = 5,
    networks: Annotated[str, typer.Option(help="Networks, with commas.")] = "dcn,dlrm",
    optimizers: Optimizers = "adagrad,amsgrad",
    rows: Annotated[int | None, typer.Option(min=1, help="Train on the first so many rows only.")] = None,
    collisions: Annotated[str, typer.Option(help="Numbers of collisions in figure 5, with commas.")] = "2,3,4,5,6,7,60",
    device: Device = "auto",
    workers: Workers = None,
) -> None:
    """Train what a figure of the paper needs; write its numbers, its picture and the page. Goes on if interrupted."""
    from ..data.prepared import Prepared
    from ..experiments import paper_figures
    from ..experiments.reproduce import planned_figure

    prepared = Prepared(data)
    study = paper_figures.Study(
        cardinalities=prepared.cardinalities,
        num_rows=prepared.meta.rows["train"],
        networks=networks.split(","),
        max_rows=rows,
        collisions=integers("collisions", collisions),
    )
    made: dict[str, Any] = {"trials": trials, "optimizers": optimizers.split(","), "command": command_line()}
    figures = paper_figures.FIGURES.values() if what == "all" else [paper_figures.FIGURES[what]]
    planned = [planned_figure(figure.axes, figure.points(study), prepared, **made) for figure in figures]
    train_and_publish(planned, out, device=device, workers=workers)


@commands.command(epilog="Example: quorem sweep examples/my_sweep.py --data data/criteo --trials 1")
def sweep(
    file: Annotated[Path, typer.Argument(help="Python file that defines POINTS, and AXES if wanted.", exists=True)],
    data: Annotated[Path, typer.Option(help="Prepared data.")],
    out: Runs = Path("runs/sweep"),
    trials: Trials = 5,
    optimizers: Optimizers = "adagrad,amsgrad",
    device: Device = "auto",
    workers: Workers = None,
) -> None:
    """Train a grid of your own, as reproduce does with the paper's. The file is run as Python."""
    from ..data.prepared import Prepared
    from ..experiments.reproduce import from_file

    made: dict[str, Any] = {"trials": trials, "optimizers": optimizers.split(","), "command": command_line()}
    train_and_publish([from_file(file, Prepared(data), **made)], out, device=device, workers=workers)


@commands.command(epilog="Example: quorem report runs/reproduce")
def report(
    runs: Annotated[
        Path, typer.Argument(help="Folder of reproduce, of sweep, of any finished runs, or of figures.", exists=True)
    ],
    out: Annotated[Path | None, typer.Option(help="The page; by default report.html in the folder.")] = None,
) -> None:
    """Write one page about the runs that are finished: figures, trade-offs, and every point with its command."""
    from ..experiments import reproduce
    from ..experiments.report.page import page

    figures = reproduce.figures_in(runs)
    if out is None and (runs / "plans").exists():
        reproduce.publish(figures, runs / "results")
    page(figures, out := out or runs / "report.html")
    typer.echo(out)


def train_and_publish(planned: "list[Figure]", out: Path, *, device: str, workers: int | None) -> "list[Figure]":
    """Train what the figures need and the folder does not have; then write numbers, pictures and the page.

    Returns the figures in the folder, with their numbers.
    """
    import os

    from ..experiments import reproduce, sweep
    from ..experiments.report.page import page  # before training, so that a missing library is reported at once

    console, begun = terminal(), reproduce.begin(planned, out, device)
    workers = workers or (1 if device.startswith("cuda") else os.cpu_count() or 1)
    try:
        if begun.runs:
            with watching_sweep(console, begun) as report:
                sweep.run(begun, workers=workers, report=report)
    except KeyboardInterrupt:
        message = f"interrupted; the same command goes on, and {command('report', out)} shows what is finished"
        raise KeyboardInterrupt(message) from None
    figures = reproduce.figures_in(out)
    reproduce.publish(figures, out / "results")
    page(figures, out / "report.html")
    console.print(f"Numbers and pictures: {out / 'results'}", soft_wrap=True)
    console.print(f"Page: {out / 'report.html'}", soft_wrap=True)
    if failed := reproduce.failures(begun):
        reasons, details = "; ".join(dict.fromkeys(failed)), f"details are in {out / 'errors'}"
        raise RuntimeError(f"{len(failed)} runs failed: {reasons}; {details}, and the same command tries again")
    return figures
