"""``quorem export``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

commands = typer.Typer()


@commands.command(epilog="Example: quorem export model.quorem --format onnx --out model.onnx")
def export(
    model: Annotated[Path, typer.Argument(help="Folder of a finished run, or a file of quorem.save.", exists=True)],
    out: Annotated[Path, typer.Option(help="File to write; one that is there is replaced.")],
    format: Annotated[
        Literal["onnx", "torch-export", "aot-inductor", "safetensors"],
        typer.Option(
            help="An ONNX graph, a program for torch.export.load, that program compiled by AOTInductor (needs a C++ "
            "compiler), or a file for quorem.load."
        ),
    ] = "onnx",
    bits: Annotated[Literal["8", "4"] | None, typer.Option(help="Store the rows in 8 or 4 bits a number.")] = None,
    table: Annotated[str | None, typer.Option(help="Export this table of a collection alone.")] = None,
    unknown: Annotated[
        Literal["nan", "zeros"], typer.Option(help="What an id outside its table gives: NaN that shows, or zeros.")
    ] = "nan",
    jagged: Annotated[
        bool | None,
        typer.Option(
            "--jagged/--no-jagged",
            help="Bags of any length, given by offsets; the default for a run on multi-valued columns.",
        ),
    ] = None,
    sample_weights: Annotated[
        bool, typer.Option("--sample-weights", help="Bags take a weight for each id too.")
    ] = False,
) -> None:
    """Write a model for a runtime that needs neither quorem nor Python."""
    from ..store.model_file import load, save
    from ..training.trained import LAYERS, MODEL

    if (model / LAYERS).exists() and table is None:
        raise ValueError(
            f"{model} is a run with a network of your own: export its tables, {model / MODEL}, by themselves"
        )
    if model.is_dir() and not (model / MODEL).exists():
        raise ValueError(f"{model} has no {MODEL}: it is no finished run, or did not keep its model")
    if format == "safetensors" and (unknown != "nan" or jagged or sample_weights):
        raise ValueError("--unknown, --jagged and --sample-weights are for graphs, not for --format safetensors")
    if jagged is None:
        jagged = model.is_dir() and table is None and format != "safetensors" and _has_bags(model)
    module = load(model / MODEL if model.is_dir() else model, table=table)
    if bits is not None:
        from ..quantize import quantize_

        quantize_(module, 8 if bits == "8" else 4)
    written = [out]
    if format == "safetensors":
        save(module, out)
    elif format == "onnx":
        from ..serving.onnx_export import export_onnx
        from ..serving.onnx_graph import data_files

        export_onnx(module, out, unknown=unknown, jagged=jagged, sample_weights=sample_weights)
        written += data_files(out)
    else:
        from ..serving.torch_export import compile_program, export_program, write_program

        program = export_program(module, unknown=unknown, jagged=jagged, sample_weights=sample_weights)
        (write_program if format == "torch-export" else compile_program)(program, out)
    size = sum(path.stat().st_size for path in written)
    inputs = ", bags given by offsets" if jagged else ""
    typer.echo(f"{out}: {type(module).__name__}, {format}, {size:,} bytes{inputs}")


def _has_bags(run: Path) -> bool:
    """Whether the data of a run have columns with several values a row."""
    from ..data.encoding import read_encoding
    from ..training.run import ENCODING

    return bool(read_encoding(run / ENCODING, verify=False)[0].bags)
