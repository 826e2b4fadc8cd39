"""What ``quorem inspect`` shows of a run or a saved model."""

from typing import Any

from rich.console import Console
from rich.table import Table

from ..planner.budget import show_bytes

COLUMN_SIDES = {
    "table": "left",
    "ids": "right",
    "D": "right",
    "stored as": "left",
    "bits": "right",
    "rows": "right",
    "disk": "right",
    "memory": "right",
    "maps": "right",
    "smaller": "right",
    "unique": "right",
    "hot / cold / rest, % of lookups": "right",
}


def model(facts: dict[str, Any], console: Console) -> None:
    """One line a table, and the sums."""
    lines = [
        f"{facts['path']}: {facts['model']}, {len(facts['tables'])} tables,"
        f" {show_bytes(facts['bytes_on_disk'])} on disk, {show_bytes(facts['bytes_in_memory'])} in memory"
        f" (network {show_bytes(facts['network_bytes'])})"
    ]
    if facts["kind"] == "run":
        scores = ", ".join(f"{name.replace('_', ' ')} {value:.5g}" for name, value in facts["test"].items())
        lines.append(f"trained on data {facts['data']}; test: {scores}")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name, side in COLUMN_SIDES.items():
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for each in facts["tables"]:
        table.add_row(*_cells(each))
    console.print(table)
    for pool in facts["pools"]:
        text = f"pool {pool['name']}: {pool['rows']:,} rows, {show_bytes(pool['bytes_in_memory'])}"
        console.print(text, highlight=False, soft_wrap=True)


def _cells(table: dict[str, Any]) -> list[str]:
    traffic = table["traffic"]
    shares = "" if traffic is None else " / ".join(f"{100 * traffic[kind]:.1f}" for kind in ("hot", "cold", "rest"))
    options = [table["scheme"]]
    options += ["raw ids"] * table["raw_ids"] + [f"unknown: {table['unknown']}"] * (table["unknown"] != "error")
    return [
        table["name"],
        f"{table['ids']:,}",
        str(table["width"]),
        ", ".join(options),
        f"{table['bits']}" if table["bits"] < 16 else table["dtype"],
        f"{table['rows']:,}",
        show_bytes(table["bytes_on_disk"]),
        show_bytes(table["bytes_in_memory"]),
        show_bytes(table["map_bytes"]) if table["map_bytes"] else "",
        f"{table['compression']:,.4g}x",
        "" if table["unique"] is None else f"{100 * table['unique']:.4g}%",
        shares,
    ]
