"""``quorem export``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

commands = typer.Typer()


@commands.command(epilog="Example: quorem export model.quorem --out model.onnx")
def export(
    model: Annotated[Path, typer.Argument(help="Folder of a finished run, or a file of quorem.save.", exists=True)],
    out: Annotated[Path, typer.Option(help="File to write; one that is there is replaced.")],
    format: Annotated[
        Literal["onnx", "torch-export", "aot-inductor", "safetensors"] | None,
        typer.Option(
            help="An ONNX graph (by default for a file .onnx), a program for torch.export.load (.pt2), that program "
            "compiled by AOTInductor (needs a C++ compiler), or a file for quorem.load (.safetensors)."
        ),
    ] = None,
    bits: Annotated[Literal["8", "4"] | None, typer.Option(help="Store the rows in 8 or 4 bits a number.")] = None,
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
    from ..files.saved_model import load, save
    from ..models.network import Network
    from ..serving.scorer import Scorer
    from ..training.run import MODEL

    if model.is_dir() and not (model / MODEL).exists():
        raise ValueError(f"{model} has no {MODEL}: it is no finished run, or did not keep its model")
    rules = out.with_suffix(".json")  # written beside the graph of a run
    if rules == out:
        raise ValueError(f"--out ({out}) must not end in .json, which is for the rules of its rows")
    to_file = format == "safetensors" or (format is None and out.suffix == ".safetensors")
    if to_file and (unknown != "nan" or jagged or sample_weights):
        raise ValueError("--unknown, --jagged and --sample-weights are for graphs, not for --format safetensors")
    scorer = num_dense = None
    if model.is_dir():
        scorer = Scorer(model)
        module, num_dense = scorer.model, len(scorer.encoding.dense)
        if to_file and not isinstance(module, Network):
            raise ValueError(f"{model} is a run with a network of your own: a file holds quorem's networks only")
        jagged = bool(scorer.encoding.bags) if jagged is None else jagged
    else:
        module = load(model)
    if bits is not None:
        from ..modules.quantize import quantize_

        quantize_(module, 8 if bits == "8" else 4)
    if to_file:
        save(module, out)
        size, written, inputs = out.stat().st_size, "safetensors", ""
    else:
        from ..serving.export import SUFFIXES
        from ..serving.named import export_named

        assert format != "safetensors"
        export_named(
            module,
            out,
            num_dense=num_dense,
            format=format,
            unknown=unknown,
            jagged=bool(jagged),
            sample_weights=sample_weights,
        )
        data = out.with_name(f"{out.name}.data")
        size = out.stat().st_size + (data.stat().st_size if data.exists() else 0)
        if scorer is not None:
            from ..serving.row_rules import write_row_rules

            write_row_rules(rules, scorer, jagged=bool(jagged))
        written, inputs = format or SUFFIXES[out.suffix], ", bags given by offsets" if jagged else ""
    typer.echo(f"{out}: {type(module).__name__}, {written}, {size:,} bytes{inputs}")
    if scorer is not None and not to_file:
        typer.echo(f"{rules}: how a row of raw values becomes its inputs (examples/encode_row.py)")
