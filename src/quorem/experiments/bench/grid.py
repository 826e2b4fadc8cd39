"""What a benchmark measures: its axes, its presets, and the ids for all providers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...paper.schemes import QR, ChineseRemainder, Full, GeneralizedQR, Path, Scheme

SCHEMES: dict[str, Scheme] = {
    "QR(4)": QR(4),
    "GeneralizedQR(3)": GeneralizedQR(3),
    "ChineseRemainder(3)": ChineseRemainder(3),
    "Path(4, (64,))": Path(4, (64,)),
    "Full()": Full(),
}
FULL = ("dense", "fbgemm_full", "fbgemm_full_fastest")  # providers that store the full tables, whatever the scheme
FBGEMM = ("fbgemm_full", "fbgemm_full_fastest", "fbgemm", "fbgemm_fastest")
PROVIDERS = ("dense", "loop", *FBGEMM, "fused")
MODES = ("forward", "step")
IDS = ("zipf", "uniform")
ROTATION = 4  # number of batches of ids that a measurement uses in turn

Axes = Mapping[str, tuple[Any, ...]]  # the values of some axes, by name


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The axes of a benchmark, each a tuple of names or sizes; every combination is measured."""

    mode: tuple[str, ...] = MODES
    provider: tuple[str, ...] = PROVIDERS
    scheme: tuple[str, ...] = ("QR(4)",)
    ids: tuple[str, ...] = ("zipf",)
    batch: tuple[int, ...] = (1, 128, 2048, 16384, 65536)
    dim: tuple[int, ...] = (16,)

    def __post_init__(self) -> None:
        """Check the names and sizes."""
        known = {"mode": MODES, "provider": PROVIDERS, "scheme": tuple(SCHEMES), "ids": IDS}
        for axis, names in known.items():
            for value in getattr(self, axis):
                if value not in names:
                    raise ValueError(f"{axis} ({value!r}) must be of {', '.join(names)}")
        for axis in ("batch", "dim"):
            if min(getattr(self, axis), default=1) < 1:
                raise ValueError(f"{axis} ({getattr(self, axis)}) must be at least 1")


@dataclass(frozen=True)
class Group:
    """Cases that are measured together, with all their providers in memory."""

    mode: str
    scheme: str
    dim: int
    providers: tuple[str, ...]
    ids: tuple[str, ...]
    batches: tuple[int, ...]


FULL_GRID = Grid(scheme=tuple(SCHEMES)[:4], ids=IDS, dim=(16, 64, 128))
PRESETS: dict[str, tuple[Grid, ...]] = {
    "cpu": (Grid(provider=("loop", "fbgemm", "fbgemm_fastest", "fused"), batch=(1, 128, 2048, 16384)),),
    "h200": (
        Grid(dim=(16, 64)),
        Grid(provider=("fused",), scheme=tuple(SCHEMES)[1:], batch=(2048, 65536), dim=(16, 64)),
        Grid(provider=("fbgemm", "fbgemm_fastest", "fused"), batch=(2048, 65536), ids=("uniform",)),
    ),
    "full": (FULL_GRID,),
}


def named_axes(values: Mapping[str, Sequence[Any] | None]) -> Axes:
    """The axes that the options of the command name; a scheme may be named by the start of its name.

    Raises:
        ValueError: if no scheme, or more than one, has a name that starts so.

    >>> named_axes({"scheme": ["qr"], "dim": None})
    {'scheme': ('QR(4)',)}
    """
    named = {axis: tuple(chosen) for axis, chosen in values.items() if chosen}
    for start in named.get("scheme", ()):
        matches = [scheme for scheme in SCHEMES if scheme.lower().startswith(start.lower())]
        if len(matches) != 1:
            raise ValueError(f"scheme ({start!r}) must be the start of one of {', '.join(SCHEMES)}")
        named["scheme"] = tuple(matches[0] if name == start else name for name in named["scheme"])
    return named


def chosen_grids(preset: str | None, device: torch.device, named: Axes) -> tuple[Grid, ...]:
    """The grids of ``preset``, with the ``named`` axes replaced.

    Without a preset, it is ``"full"`` if an axis is named, else the preset of the device.

    Raises:
        ValueError: if a preset, or a value on an axis, is unknown.
    """
    if preset is None:
        preset = "full" if named else "h200" if device.type == "cuda" else "cpu"
    if preset not in PRESETS:
        raise ValueError(f"preset ({preset!r}) must be one of {', '.join(PRESETS)}")
    return tuple(dict.fromkeys(replace(grid, **named) for grid in PRESETS[preset]))


def groups(grids: Sequence[Grid]) -> Iterator[Group]:
    """What to measure, in order. Full tables are measured with a grid's first scheme only."""
    for grid in grids:
        for mode, dim, scheme in product(grid.mode, grid.dim, grid.scheme):
            providers = tuple(p for p in grid.provider if scheme == grid.scheme[0] or p not in FULL)
            yield Group(mode, scheme, dim, providers, grid.ids, grid.batch)


def scheme_of(provider: str, scheme: str) -> str:
    """The scheme of the tables that a provider stores in a case with ``scheme``."""
    return "Full()" if provider in FULL else scheme


def draw_ids(how: str, cardinalities: Sequence[int], batch: int, seed: int) -> Tensor:
    """Ids ``[batch, F]``: ``"uniform"``, or ``"zipf"``, where id k has probability proportional to log(1 + 1/(k + 1)).

    >>> draw_ids("zipf", (1000, 3), 2, seed=0).shape
    torch.Size([2, 2])
    """
    n = torch.tensor(cardinalities, dtype=torch.float64)
    u = torch.rand(batch, len(n), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    drawn = (n + 1) ** u - 1 if how == "zipf" else u * n
    return torch.minimum(drawn.long(), n.long() - 1)
