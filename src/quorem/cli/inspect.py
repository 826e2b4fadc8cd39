"""``quorem inspect``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .terminal import print_table, terminal

if TYPE_CHECKING:
    from rich.console import Console

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
    from ..serving.inspection import inspect
    from . import preparing

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
        _print_model(facts, console)
    if verify:
        console.print("every checksum is right")


LEAST_WIDTH = 200  # width of the output to a file or a pipe, where nothing should be cut off
SHORT_DTYPES = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}


def _print_model(facts: dict[str, Any], console: "Console") -> None:
    """Print one line for each table, and the totals."""
    from ..experiments.figures import grouped
    from ..planner.budget import show_bytes

    lines = [
        f"{facts['path']}: {facts['model']}, {len(facts['tables'])} tables,"
        f" {show_bytes(facts['bytes_on_disk'])} on disk, {show_bytes(facts['bytes_in_memory'])} in memory"
        f" (network {show_bytes(facts['network_bytes'])})"
    ]
    if facts["kind"] == "run":
        scores = ", ".join(f"{name.replace('_', ' ')} {value:.5g}" for name, value in facts["test"].items())
        lines.append(f"trained on data {facts['data']}; test: {scores}")
    console.print("\n".join(lines), soft_wrap=True)
    if not console.is_terminal:
        console.width = LEAST_WIDTH
    print_table(console, [_cells(each) for each in facts["tables"]])
    for scheme, tables in grouped(facts["tables"], _stored_as).items():
        console.print(f"{scheme}: {', '.join(each['name'] for each in tables)}", soft_wrap=True)
    for pool in facts["pools"]:
        text = f"pool {pool['name']}: {pool['rows']:,} rows, {show_bytes(pool['bytes_in_memory'])}"
        console.print(text, soft_wrap=True)


def _stored_as(table: dict[str, Any]) -> str:
    options = [table["scheme"]]
    options += ["raw ids"] * table["raw_ids"] + [f"unknown: {table['unknown']}"] * (table["unknown"] != "error")
    return ", ".join(options)


def _cells(table: dict[str, Any]) -> dict[str, str]:
    """The cells of a table's line, by column."""
    from ..planner.budget import show_bytes

    traffic = table["traffic"]
    shares = "" if traffic is None else "/".join(f"{100 * traffic[kind]:.1f}" for kind in ("hot", "cold", "rest"))
    return {
        "table": table["name"],
        "ids": f"{table['ids']:,}",
        "D": str(table["width"]),
        "bits": f"{table['bits']}" if table["bits"] < 16 else SHORT_DTYPES.get(table["dtype"], table["dtype"]),
        "rows": f"{table['rows']:,}",
        "disk": show_bytes(table["bytes_on_disk"]),
        "memory": show_bytes(table["bytes_in_memory"]),
        "maps": show_bytes(table["map_bytes"]) if table["map_bytes"] else "",
        "smaller": f"{table['compression']:,.{0 if table['compression'] >= 1000 else 2}f}x",
        "unique": "" if table["unique"] is None else f"{100 * table['unique']:.4g}%",
        "hot/cold/rest %": shares,
    }
