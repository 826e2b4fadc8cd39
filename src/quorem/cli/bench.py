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
    mode: Annotated[list[str] | None, typer.Option(help="forward or step; repeatable.")] = None,
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
    value: Annotated[Literal["time", "floor"], typer.Option(help="What the tables show.")] = "time",
    quick: Annotated[
        bool, typer.Option("--quick", help="Small tables, few samples: only to see that it runs.")
    ] = False,
    commit: Annotated[str | None, typer.Option(help="For the CSV file, where there is no git.")] = None,
) -> None:
    """Measure lookups and training steps against other ways to do them, in one run on the same ids."""
    from functools import partial

    import torch

    from ..experiments.bench import grid, report, run

    where = torch.device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    axes = {"mode": mode, "provider": provider, "scheme": scheme, "ids": ids, "batch": batch, "dim": dim}
    try:
        named = grid.named_axes(axes)
        grids = () if table else grid.chosen_grids(preset, where, named)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    file = None
    if table is None and out is not None:
        out.mkdir(parents=True, exist_ok=True)
        file = out / f"{preset or where.type}.csv"
        file.unlink(missing_ok=True)
        plot = plot or file.with_suffix(".png")
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)  # a path that cannot be written is an error before measuring
    if table is not None:
        rows = [row for row in report.read(table) if all(getattr(row, axis) in named[axis] for axis in named)]
    else:
        rows, console = [], terminal(stderr=True)
        say = partial(console.print, soft_wrap=True)
        facts = run.facts_of_run(where, command_line(), commit)
        with console.status("starting") as status:
            for row in run.rows(grids, where, quick=quick, say=say, facts=facts):
                rows.append(row)
                status.update(f"{row.mode} B={row.batch} {row.provider}: {row.median_us} us")
                if file is not None:
                    report.append(file, [row])
    if plot is not None and rows:
        report.plot(rows, plot)
    typer.echo(report.tables(rows, value), nl=False)
