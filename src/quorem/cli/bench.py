"""``quorem bench``."""

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from .options import Device, Threads
from .terminal import command_line, terminal

commands = typer.Typer()
Mode = StrEnum("Mode", ["forward", "step"])
Provider = StrEnum("Provider", ["loop", "fbgemm_full", "fbgemm_full_fastest", "fbgemm", "fbgemm_fastest", "fused"])
Scheme = StrEnum("Scheme", ["qr", "generalized", "chinese", "path", "full"])
Ids = StrEnum("Ids", ["zipf", "uniform"])


@commands.command(epilog="Example: quorem bench --mode forward --provider loop --provider fused --batch 2048 --dim 16")
def bench(
    mode: Annotated[list[Mode] | None, Option(help="Repeatable.")] = None,
    provider: Annotated[list[Provider] | None, Option(help="Repeatable.")] = None,
    scheme: Annotated[list[Scheme] | None, Option(help="Of the tables; repeatable.")] = None,
    ids: Annotated[list[Ids] | None, Option(help="Repeatable.")] = None,
    batch: Annotated[list[int] | None, Option(min=1, help="Batch size; repeatable.")] = None,
    dim: Annotated[list[int] | None, Option(min=1, help="Width of the vectors; repeatable.")] = None,
    device: Device = "auto",
    threads: Threads = None,
    out: Annotated[Path | None, Option(help="CSV file to write; one that is there is replaced.")] = None,
    table: Annotated[
        Path | None, Option(help="Print the tables of a CSV file; measure nothing.", exists=True, dir_okay=False)
    ] = None,
    value: Annotated[Literal["time", "floor"], Option(help="What the tables show.")] = "time",
    quick: Annotated[bool, Option("--quick", help="Small tables, few samples: only to see that it runs.")] = False,
    commit: Annotated[str | None, Option(help="For the CSV file, where there is no git.")] = None,
) -> None:
    """Measure lookups and training steps against other ways to do them, in one run on the same ids.

    Without a choice of mode, provider, scheme, ids, batch and dim it measures what the documents show.
    """
    import torch

    from ..experiments.bench import grid, report, run

    where = torch.device(device)
    schemes = [grid.SCHEME_OPTIONS[name] for name in scheme or ()]
    axes = {"mode": mode, "provider": provider, "scheme": schemes, "ids": ids, "batch": batch, "dim": dim}
    named: dict[str, tuple[Any, ...]] = {axis: tuple(values) for axis, values in axes.items() if values}
    if table is not None:
        rows = [row for row in report.read(table) if all(getattr(row, axis) in named[axis] for axis in named)]
        typer.echo(report.tables(rows, value), nl=False)
        return
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.unlink(missing_ok=True)
    rows, console = [], terminal(stderr=True)
    grids = (grid.Grid(**named),) if named else grid.PRESETS[where.type]
    facts = run.facts_of_run(where, command_line(), commit)
    with console.status("starting") as status:
        for row in run.rows(grids, where, quick=quick, say=partial(console.print, soft_wrap=True), facts=facts):
            rows.append(row)
            status.update(f"{row.mode} B={row.batch} {row.provider}: {row.median_us} us")
            if out is not None:
                report.append(out, [row])
    typer.echo(report.tables(rows, value), nl=False)
