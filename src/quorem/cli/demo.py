"""``quorem demo``."""

from pathlib import Path
from typing import Annotated

import typer

from ..experiments.terminal import terminal
from .options import Device

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
    from ..experiments import demo

    demo.show(terminal(), out, data=data, seed=seed, rows=rows, device=device)
