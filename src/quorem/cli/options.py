"""Options that several commands share, and helpers for them."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

if TYPE_CHECKING:
    from torch import nn


def _device(name: str) -> str:
    """The name of a device, with ``auto`` resolved; a usage error if it is not available."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise typer.BadParameter(f"device ({name!r}) must be cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter(f"device ({name!r}) must be 'cpu' here: there is no GPU")
    return name


def _set_threads(number: int | None) -> int | None:
    if number is not None:
        import torch

        torch.set_num_threads(number)
    return number


Device = Annotated[str, Option(help="cpu, cuda, or auto: cuda where there is a GPU.", callback=_device)]
Threads = Annotated[
    int | None, Option(min=1, max=1024, help="Threads of torch; by default torch's choice.", callback=_set_threads)
]
Bits = Annotated[Literal["8", "4"] | None, Option(help="Store the rows in 8 or 4 bits a number first.")]
Days = Annotated[int, Option(min=2, help="Equal parts of the log; all but the last train, the last is halved.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace the data or the file OUT.")]


def store_in(model: "nn.Module", bits: Literal["8", "4"] | None) -> None:
    """Store the rows of a model in so many bits, unless they are already."""
    from ..modules.lookup import tables_in
    from ..modules.quantize import quantize_

    if bits is not None and any(tables.bits != int(bits) for tables in tables_in(model)):
        quantize_(model, 8 if bits == "8" else 4)


def integers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers from text such as ``"2,3,60"``."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise ValueError(f"{name} ({text!r}) must be whole numbers with commas") from None
