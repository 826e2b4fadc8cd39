"""``quorem bench``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .options import Device, Threads, command_line
from .terminal import terminal

commands = typer.Typer()


@commands.command(epilog="Example: quorem bench --mode forward --provider loop --provider fused --batch 2048 --dim 16")
def bench(
    preset: Annotated[str | None, typer.Option(help="cpu, h200 or full; by default that of the device.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="forward, step, step_amsgrad or dlrm; repeatable.")] = None,
    provider: Annotated[list[str] | None, typer.Option(help="Such as fused or fbgemm; repeatable.")] = None,
    scheme: Annotated[list[str] | None, typer.Option(help="Start of a scheme's name; repeatable.")] = None,
    ids: Annotated[list[str] | None, typer.Option(help="zipf or uniform; repeatable.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch size; repeatable.")] = None,
    dim: Annotated[list[int] | None, typer.Option(min=1, help="Width of the vectors; repeatable.")] = None,
    device: Device = "auto",
    threads: Threads = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the CSV file and the plot.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for the plot.")] = None,
    table: Annotated[
        Path | None, typer.Option(help="Print the tables of a CSV file; measure nothing.", exists=True, dir_okay=False)
    ] = None,
    value: Annotated[Literal["time", "floor", "memory"], typer.Option(help="What the tables show.")] = "time",
    quick: Annotated[
        bool, typer.Option("--quick", help="Small tables, few samples: only to see that it runs.")
    ] = False,
    commit: Annotated[str | None, typer.Option(help="For the CSV file, where there is no git.")] = None,
) -> None:
    """Measure lookups and training steps against other ways to do them, in one run on the same ids."""
    import torch
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ..experiments.bench import command, report
    from ..experiments.bench.grid import named_axes

    where = torch.device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        axes = {"mode": mode, "provider": provider, "scheme": scheme, "ids": ids, "batch": batch, "dim": dim}
        named = named_axes(axes)
        if table is None:
            grids = command.chosen(preset, where, named)
        else:
            rows, absent = command.selected(report.read(table), named)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if table is None:
        absent = []
        for option, folder in (("out", out), ("plot", plot and plot.parent)):
            if folder is not None:
                command.check_folder(option, folder)
        console = terminal(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("starting", total=None)

            def show(row: report.Row) -> None:
                what = f"{row.mode} B={row.batch} {row.provider} {'graph' if row.graph else 'eager'}"
                progress.update(task, description=f"{what}: {row.median_us} us")

            rows = command.run(
                grids,
                where,
                name=preset or where.type,
                out=out,
                plot=plot,
                quick=quick,
                command=command_line(),
                commit=commit,
                say=lambda line: console.print(line, soft_wrap=True),
                show=show,
            )
    elif plot is not None:
        report.plot(rows, plot)
    typer.echo(report.tables(rows, value, absent), nl=False)
