"""``quorem reproduce``, ``quorem sweep`` and ``quorem report``: train many runs, and write a page about them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .options import Device, command_line, integers
from .terminal import command, terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..experiments.figures import Figure, FigurePlan

commands = typer.Typer()

Runs = Annotated[Path, typer.Option("--out", help="Folder of the runs; what is finished there is not trained again.")]
Trials = Annotated[int, typer.Option(min=1, help="Seeds of each setting.")]
Optimizers = Annotated[str, typer.Option(help="adagrad, amsgrad or both; the better by validation loss is shown.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes; by default one a core, or one for a GPU.")]
TrainOnly = Annotated[bool, typer.Option("--train-only", help="Leave pictures and page to quorem report.")]


@commands.command(epilog="Example: quorem reproduce figure5 --data data/criteo --collisions 4,60 --trials 1")
def reproduce(
    what: Annotated[
        Literal["figure4", "figure5", "figure6", "figure7", "table1", "all", "budgets", "plans"],
        typer.Argument(help="Figure or table of the paper; budgets and plans go beyond it."),
    ],
    data: Annotated[Path | None, typer.Option(help="Prepared data.")] = None,
    out: Runs = Path("runs/reproduce"),
    trials: Trials = 5,
    networks: Annotated[str, typer.Option(help="Networks, with commas.")] = "dcn,dlrm",
    optimizers: Optimizers = "adagrad,amsgrad",
    rows: Annotated[int | None, typer.Option(min=1, help="Train on the first so many rows only.")] = None,
    collisions: Annotated[str, typer.Option(help="Numbers of collisions in figure 5, with commas.")] = "2,3,4,5,6,7,60",
    device: Device = "auto",
    workers: Workers = None,
    train_only: TrainOnly = False,
    params_only: Annotated[
        bool, typer.Option("--params-only", help="Count table 1's parameters; train nothing.")
    ] = False,
) -> None:
    """Train what a figure of the paper needs; write its numbers, its picture and the page. Goes on if interrupted."""
    from ..experiments import paper_figures, reproduce

    if params_only:
        if what != "table1":
            raise typer.BadParameter(f"--params-only is for table1 (figure7 counts parameters), not {what}")
        for (network, hidden), count in paper_figures.table1_parameters().items():
            typer.echo(f"{network},{hidden},{count}")
        return
    if data is None:
        raise typer.BadParameter("--data must name prepared data (quorem prepare)")
    import torch

    from ..data.prepared import Prepared

    prepared = Prepared(data)
    counts = {name: torch.from_numpy(prepared.frequencies(name)) for name in prepared.names if what == "plans"}
    study = paper_figures.Study(
        cardinalities=prepared.cardinalities,
        num_rows=len(prepared.split("train", check=False)),
        networks=networks.split(","),
        max_rows=rows,
        collisions=integers("collisions", collisions),
        frequencies=counts if what == "plans" else None,
    )
    plans = [
        reproduce.plan(
            figure.axes,
            figure.points(study),
            prepared,
            trials=trials,
            optimizers=optimizers.split(","),
            command=command_line(),
        )
        for figure in (paper_figures.PAPER_FIGURES.values() if what == "all" else [paper_figures.FIGURES[what]])
    ]
    _run(plans, out, device=device, workers=workers, train_only=train_only)


@commands.command(epilog="Example: quorem sweep examples/my_sweep.py --data data/criteo --trials 1")
def sweep(
    file: Annotated[Path, typer.Argument(help="Python file that defines POINTS, and AXES if wanted.", exists=True)],
    data: Annotated[Path, typer.Option(help="Prepared data.")],
    out: Runs = Path("runs/sweep"),
    trials: Trials = 5,
    optimizers: Optimizers = "adagrad,amsgrad",
    device: Device = "auto",
    workers: Workers = None,
    train_only: TrainOnly = False,
) -> None:
    """Train a grid of your own, as reproduce does with the paper's. The file is run as Python."""
    from ..data.prepared import Prepared
    from ..experiments import reproduce

    prepared, line = Prepared(data), command_line()
    plan = reproduce.from_file(file, prepared, trials=trials, optimizers=optimizers.split(","), command=line)
    _run([plan], out, device=device, workers=workers, train_only=train_only)


@commands.command(epilog="Example: quorem report runs/reproduce")
def report(
    runs: Annotated[
        Path,
        typer.Argument(help="Folder of reproduce, of sweep, of any finished runs, or of figures.", exists=True),
    ],
    out: Annotated[Path | None, typer.Option(help="The page; by default report.html in the folder.")] = None,
) -> None:
    """Write one page about the runs that are finished: figures, trade-offs, and every point with its command."""
    from ..experiments import reproduce
    from ..experiments.report import page

    figures = reproduce.figures_in(runs)
    if out is None and (runs / "plans").exists():
        reproduce.publish(figures, runs / "results")
    for figure in figures:
        if figure.axes.name == "runs":
            _print_runs(figure)
    page(figures, out := out or runs / "report.html")
    typer.echo(out)


def _print_runs(figure: "Figure") -> None:
    """Print a line for each setting on one data: its runs, scheme, epochs, metrics on the test rows, bytes and time."""
    from rich.table import Table

    from ..experiments import words

    terminal().print(f"Runs on {figure.made.data.name}, best test log loss first:", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("run", "network", "scheme", "epochs", "log loss", "AUC", "tables", "time"):
        table.add_column(name, justify="left" if name in ("run", "network", "scheme") else "right", overflow="fold")
    for point in sorted(figure.points, key=lambda point: words.or_nan(point.test_mean)):
        table.add_row(
            ", ".join(point.runs),
            words.network(point.network),
            words.scheme(point.config),
            str(point.config["epochs"]),
            words.mean_text(point.test_mean, point.test_sd, point.trials),
            words.loss(point.auc_mean),
            words.size(point.embedding_bytes),
            f"{point.seconds:,.1f} s",
        )
    terminal().print(table)


def _run(plans: "Sequence[FigurePlan]", out: Path, *, device: str, workers: int | None, train_only: bool) -> None:
    """Train what the plans need and the folder does not have; then write numbers, pictures and the page."""
    import os

    from ..experiments import reproduce, sweep
    from .progress import watching_sweep

    if not train_only:
        from ..experiments.report import page  # before training, so that a missing library is reported at once
    console, begun = terminal(), reproduce.begin(plans, out, device)
    workers = workers or (1 if device.startswith("cuda") else os.cpu_count() or 1)
    try:
        if begun.runs:
            with watching_sweep(console, begun) as report:
                sweep.run(begun, workers=workers, report=report)
    except KeyboardInterrupt:
        message = f"interrupted; the same command goes on, and {command('report', out)} shows what is finished"
        raise KeyboardInterrupt(message) from None
    if not train_only:
        figures = reproduce.figures_in(out)
        reproduce.publish(figures, out / "results")
        page(figures, out / "report.html")
        console.print(f"Numbers and pictures: {out / 'results'}", soft_wrap=True)
        console.print(f"Page: {out / 'report.html'}", soft_wrap=True)
    if failed := reproduce.failures(begun):
        reasons = "; ".join(dict.fromkeys(failed))
        raise RuntimeError(
            f"{len(failed)} runs failed: {reasons}; details are in {out / 'errors'}, and the same command tries again"
        )
