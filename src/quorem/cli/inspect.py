"""``quorem inspect``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from .data import print_summary
from .terminal import print_table, terminal

if TYPE_CHECKING:
    from rich.console import Console

commands = typer.Typer()
LEAST_WIDTH = 200  # width of the output to a file or a pipe, where nothing should be cut off
SHORT_DTYPES = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}


@commands.command(epilog="Example: quorem inspect runs/first --verify")
def inspect(
    path: Annotated[Path, typer.Argument(help="Folder of a run or of prepared data, or a file of quorem.save.")],
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    verify: Annotated[bool, Option("--verify", help="Compare every file with its checksum.")] = False,
) -> None:
    """Show what a run, a saved model or prepared data hold; check that they are what was written."""
    from json import dumps

    from ..data.prepared import Prepared
    from ..serving.inspection import inspect

    facts = inspect(path, verify=verify)
    if json:
        typer.echo(dumps(facts, indent=1))
        return
    console = terminal()
    if facts["kind"] == "data":
        print_summary(Prepared(path), console)
        largest_first = sorted(facts["features"], key=lambda feature: -feature["ids"])
        rows = [
            {
                "feature": feature["name"],
                "ids": f"{feature['ids']:,}",
                "seen in training": f"{feature['seen_in_training']:,}",
                "most frequent id, % of values": f"{100 * feature['largest_share']:.1f}",
            }
            for feature in largest_first
        ]
        print_table(console, rows)
    else:
        _print_model(facts, console)
    if verify:
        console.print("every checksum is right")


def _print_model(facts: dict[str, Any], console: "Console") -> None:
    """Print one line for each table, and the totals."""
    from ..experiments.figures import grouped
    from ..planner.budget import show_bytes

    console.print(
        f"{facts['path']}: {facts['model']}, {len(facts['tables'])} tables,"
        f" {show_bytes(facts['bytes_on_disk'])} on disk, {show_bytes(facts['bytes_in_memory'])} in memory"
        f" (network {show_bytes(facts['network_bytes'])})",
        soft_wrap=True,
    )
    if facts["kind"] == "run":
        scores = ", ".join(f"{name.replace('_', ' ')} {value:.5g}" for name, value in facts["test"].items())
        console.print(f"trained on data {facts['data']}; test: {scores}", soft_wrap=True)
    if not console.is_terminal:
        console.width = LEAST_WIDTH
    rows = [
        {
            "table": table["name"],
            "ids": f"{table['ids']:,}",
            "D": str(table["width"]),
            "bits": f"{table['bits']}" if table["bits"] < 16 else SHORT_DTYPES.get(table["dtype"], table["dtype"]),
            "rows": f"{table['rows']:,}",
            "memory": show_bytes(table["bytes_in_memory"]),
            "smaller": f"{table['compression']:,.{0 if table['compression'] >= 1000 else 2}f}x",
            "unknown": "" if table["unknown"] == "error" else table["unknown"],
        }
        for table in facts["tables"]
    ]
    print_table(console, rows)
    for scheme, tables in grouped(facts["tables"], lambda table: table["scheme"]).items():
        console.print(f"{scheme}: {', '.join(each['name'] for each in tables)}", soft_wrap=True)
    for pool in facts["pools"]:
        text = f"pool {pool['name']}: {pool['rows']:,} rows, {show_bytes(pool['bytes_in_memory'])}"
        console.print(text, soft_wrap=True)
