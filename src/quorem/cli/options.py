"""Options that several commands share, and helpers for them."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer


def _device(name: str) -> str:
    """The name of a device, with ``auto`` resolved; a usage error if it is not available."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = "unknown"
    if kind not in ("cpu", "cuda"):
        raise typer.BadParameter(f"device ({name!r}) must be cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(f"device ({name!r}) must be 'cpu' here: there is no GPU")
    return name


def _set_threads(number: int | None) -> int | None:
    if number is not None:
        import torch

        torch.set_num_threads(number)
    return number


Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is a GPU.", callback=_device)]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, help="Threads of torch on the CPU; by default torch's choice.", callback=_set_threads
    ),
]
Data = Annotated[Path, typer.Option(help="Prepared data, the folder that quorem prepare wrote.")]
Days = Annotated[int, typer.Option(min=2, help="Equal parts of the log; all but the last train, the last is halved.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder or file OUT.")]


def command_line() -> str:
    """The command as it was given, for files that record which command made them."""
    return shlex.join(["quorem", *sys.argv[1:]])


def integers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers from text such as ``"2,3,60"``.

    Raises:
        ValueError: if the text holds anything else.

    >>> integers("collisions", "4,60")
    (4, 60)
    """
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise ValueError(f"{name} ({text!r}) must be whole numbers with commas") from None
