"""``quorem evaluate``, ``predict``, ``inspect`` and ``export``: what is done after training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from typer import Option

from .data import print_summary
from .options import Bits, Threads, store_in
from .terminal import print_table, stages, terminal

if TYPE_CHECKING:
    from ..training.metrics import Metrics

commands = typer.Typer()
Run = Annotated[Path, typer.Argument(help="Folder of a finished run.")]
LEAST_WIDTH = 200  # width of the output to a file or a pipe, where nothing should be cut off
SHORT_DTYPES = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}


@commands.command(epilog="Example: quorem evaluate runs/first --bits 8")
def evaluate(
    run: Run,
    data: Annotated[Path | None, Option(help="Prepared data of the run; by default where they were then.")] = None,
    split: Annotated[Literal["train", "validation", "test"], Option(help="Rows to evaluate.")] = "test",
    bits: Bits = None,
    threads: Threads = None,
) -> None:
    """Print the metrics of a finished run on its data."""
    from ..data.prepared import Prepared
    from ..serving.scorer import Scorer

    scorer = Scorer(run)
    store_in(scorer.model, bits)
    prepared = Prepared(data if data is not None else scorer.encoding.folder)
    _print_metrics(f"{run}, {split}", scorer.evaluate(prepared, split))
    if split != "train":
        for name, count in prepared.unseen(split).items():
            typer.echo(f"{name}: {count:,} value{'s' * (count != 1)} not in the training rows")


@commands.command(epilog="Example: quorem predict runs/first clicks.csv --out scores.csv")
def predict(
    run: Run,
    file: Annotated[Path, typer.Argument(help="CSV with a header line (plain or gzip), .parquet, or Criteo's form.")],
    out: Annotated[Path, Option(help="File to write, CSV or .parquet; one that is there is replaced.")],
    bits: Bits = None,
    label: Annotated[str | None, Option(help="Column of labels in FILE: print the metrics too.")] = None,
    unknown: Annotated[
        Literal["error", "missing"],
        Option(help="A value that training never saw, if there is no id for such: stop, or take it as missing."),
    ] = "error",
    max_malformed: Annotated[int, Option(min=0, help="Malformed lines left out before it stops.")] = 0,
    threads: Threads = None,
) -> None:
    """Write the probability of a click for every row of a file."""
    from ..serving.predict import predict
    from ..serving.scorer import Scorer

    scorer = Scorer(run, unknown=unknown)
    store_in(scorer.model, bits)
    try:
        with stages(terminal(stderr=True)) as progress:
            done = predict(scorer, file, out, label=label, max_malformed=max_malformed, progress=progress)
    except KeyboardInterrupt:
        kept = "the file from before is kept" if out.exists() else "nothing was written"
        raise KeyboardInterrupt(f"interrupted; {out}: {kept}") from None
    typer.echo(f"{out}: {done.rows:,} rows, {done.rows / max(done.seconds, 1e-9):,.0f} rows/s")
    if done.malformed:
        typer.echo(f"malformed lines left out: {done.malformed:,}")
    for name, count in done.unseen.items():
        typer.echo(f"{name}: {count:,} value{'s' * (count != 1)} not in the training rows")
    if done.metrics is not None:
        _print_metrics(f"{run}, {file}", done.metrics)


def _print_metrics(title: str, metrics: "Metrics") -> None:
    from dataclasses import asdict

    rows = []
    for name, value in asdict(metrics).items():
        text = f"{value:,}" if isinstance(value, int) else f"{value:.5f}"
        rows.append({"metric": name.replace("_", " ").replace("auc", "AUC"), "value": text})
    terminal().print(title, soft_wrap=True)
    print_table(terminal(), rows)


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


def _print_model(facts: dict[str, Any], console: Console) -> None:
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


@commands.command(epilog="Example: quorem export model.quorem --out model.onnx")
def export(
    model: Annotated[Path, typer.Argument(help="Folder of a finished run, or a file of quorem.save.", exists=True)],
    out: Annotated[Path, Option(help="File to write; one that is there is replaced.")],
    format: Annotated[
        Literal["onnx", "torch-export", "aot-inductor", "safetensors"] | None,
        Option(
            help="An ONNX graph (by default for a file .onnx), a program for torch.export.load (.pt2), that program "
            "compiled by AOTInductor (needs a C++ compiler), or a file for quorem.load (.safetensors)."
        ),
    ] = None,
    bits: Bits = None,
    unknown: Annotated[Literal["nan", "zeros"], Option(help="What an id outside its table gives.")] = "nan",
    jagged: Annotated[
        bool | None,
        Option("--jagged/--no-jagged", help="Bags by offsets; the default for a run on multi-valued columns."),
    ] = None,
) -> None:
    """Write a model for a runtime that needs neither quorem nor Python."""
    from ..files.saved_model import load, save
    from ..models.networks import Network
    from ..serving.export import SUFFIXES, export_named
    from ..serving.scorer import Scorer, write_row_rules
    from ..training.run import MODEL

    if model.is_dir() and not (model / MODEL).exists():
        raise ValueError(f"{model} has no {MODEL}: it is no finished run, or did not keep its model")
    rules = out.with_suffix(".json")  # written beside the graph of a run
    if rules == out:
        raise ValueError(f"--out ({out}) must not end in .json, which is for the rules of its rows")
    scorer = Scorer(model) if model.is_dir() else None
    module = load(model) if scorer is None else scorer.model
    store_in(module, bits)
    if format == "safetensors" or (format is None and out.suffix == ".safetensors"):
        if unknown != "nan" or jagged:
            raise ValueError("--unknown and --jagged are for graphs, not for --format safetensors")
        if scorer is not None and not isinstance(module, Network):
            raise ValueError(f"{model} is a run with a network of your own: a file holds quorem's networks only")
        save(module, out)
        typer.echo(f"{out}: {type(module).__name__}, safetensors, {out.stat().st_size:,} bytes")
        return
    if jagged is None:
        jagged = scorer is not None and bool(scorer.encoding.meta.columns.bags)
    num_dense = None if scorer is None else len(scorer.encoding.meta.columns.dense)
    export_named(module, out, num_dense=num_dense, format=format, unknown=unknown, jagged=jagged)
    data = out.with_name(f"{out.name}.data")
    size = out.stat().st_size + (data.stat().st_size if data.exists() else 0)
    inputs = ", bags given by offsets" if jagged else ""
    typer.echo(f"{out}: {type(module).__name__}, {format or SUFFIXES[out.suffix]}, {size:,} bytes{inputs}")
    if scorer is not None:
        write_row_rules(rules, scorer, jagged=jagged)
        typer.echo(f"{rules}: how a row of raw values becomes its inputs (examples/encode_row.py)")
