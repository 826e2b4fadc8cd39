"""``quorem export``."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from .options import Bits, store_in

commands = typer.Typer()


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
