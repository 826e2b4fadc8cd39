"""What ``quorem prepare``, ``synthesize`` and ``inspect`` show: a progress bar, and what is in a folder."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from ..data.folder import Progress as Report
from ..data.prepared import Prepared
from .progress import bars
from .terminal import command, print_table

if TYPE_CHECKING:  # loads polars
    from ..data.columns import Inferred


def show_inferred(columns: Sequence["Inferred"], console: Console) -> None:
    """Print the inferred kind of each column, and the reason."""
    words = {"number": "numbers", "category": "categories", "list": "lists", "none": "nothing, left out"}
    rows = [{"column": name, "taken for": words[kind], "why": reason} for name, kind, reason in columns]
    print_table(console, rows, "taken for", "why")
    text = "To take a column for something else, name it in --dense, --categorical, --multi or --drop, and add --infer."
    console.print(text, soft_wrap=True)


@contextmanager
def bar(console: Console) -> Iterator[Report]:
    """Show the progress of each stage until the block ends; yields the function to report to."""
    with bars(console) as show:

        def report(stage: str, done: float, rows: int) -> None:
            counted = round(done * rows) if stage in ("number", "write") else rows  # other stages do not know the total
            show(stage, done, f"{counted:,} rows")

        yield report


def features(prepared: Prepared, console: Console) -> None:
    """Print the categorical features, the largest first: ids, and how the training rows are distributed over them."""
    rows = []
    for name, size in sorted(zip(prepared.names, prepared.cardinalities, strict=True), key=lambda pair: -pair[1]):
        counts = prepared.raw_counts(name)[1] if prepared.has_raw_ids else prepared.frequencies(name)
        most = counts.max(initial=0) / max(counts.sum(), 1)
        row = {"feature": name, "ids": f"{size:,}", "seen in training": f"{int((counts > 0).sum()):,}"}
        rows.append({**row, "most frequent id, % of values": f"{100 * most:.1f}"})
    print_table(console, rows)


def show(prepared: Prepared, console: Console) -> None:
    """Print what was prepared, and the command to run next."""
    summary(prepared, console)
    quarter = max(32 * sum(prepared.cardinalities) // 1000, 100)  # of full tables of width 16 with their Adagrad state
    following = ["train", "--data", prepared.path, "--budget", f"{quarter}kB", "--out", "runs/first"]
    if prepared.has_raw_ids:
        following = ["plan", prepared.path, "--budget", "100MB", "--out", "plan.json"]
    console.print(f"Next: {command(*following)}", soft_wrap=True)


def summary(prepared: Prepared, console: Console) -> None:
    """Print rows, splits, ids and malformed lines of prepared data."""
    meta = prepared.meta
    split = ", ".join(f"{name} {stop - start:,}" for name, (start, stop) in meta["split"].items())
    size = sum(path.stat().st_size for path in prepared.path.rglob("*") if path.is_file())
    ids = sum(prepared.cardinalities)
    lines = [
        f"{prepared.path}: {prepared.num_rows:,} rows ({split}), {size:,} bytes",
        f"dense features: {len(prepared.dense_names)}; categorical ones: {len(prepared.names)}"
        + (f" in a space of {prepared.cardinalities[0]:,} raw ids" if prepared.has_raw_ids else f" with {ids:,} ids"),
    ]
    malformed = meta.get("malformed", {"count": 0})
    if malformed["count"]:
        shown = "; ".join(f"{number}: {reason}" for number, reason in malformed["first"])
        lines.append(f"malformed lines left out: {malformed['count']}, the first: {shown}")
    if (time := meta.get("time")) is not None:
        order = f"not in time order ({time['steps_back']:,} rows are earlier than the row before them), and was sorted"
        lines.append(f"split by {time['column']}: the file is {order if time['steps_back'] else 'in time order'}")
    if "bayes_log_loss" in meta:
        lines.append(f"best log loss of any model on the test rows: {meta['bayes_log_loss']['test']:.5f}")
    console.print("\n".join(lines), soft_wrap=True)
