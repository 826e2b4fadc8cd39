"""``quorem inspect``."""

from pathlib import Path
from typing import Annotated

import typer

from ..experiments.terminal import terminal

commands = typer.Typer()


@commands.command(epilog="Example: quorem inspect runs/first --verify")
def inspect(
    path: Annotated[Path, typer.Argument(help="Folder of a run or of prepared data, or a file of quorem.save.")],
    data: Annotated[
        Path | None, typer.Option(help="Prepared data whose training rows say how often ids occur.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file with its checksum.")] = False,
) -> None:
    """Show what a run, a saved model or prepared data hold; check that they are what was written."""
    from json import dumps

    from ..data.prepared import Prepared
    from ..experiments import inspecting, preparing
    from ..serving.inspection import inspect

    facts = inspect(path, data=data, verify=verify)
    if json:
        typer.echo(dumps(facts, indent=1))
        return
    console = terminal()
    if facts["kind"] == "data":
        prepared = Prepared(path)
        preparing.summary(prepared, console)
        preparing.features(prepared, console)
    else:
        inspecting.model(facts, console)
    if verify:
        console.print("every checksum is right")
