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
PROVIDERS = ("dense", "loop", "reference", "compiled", *FBGEMM, "fused", "fused_trust")
MODES = ("forward", "step", "step_amsgrad", "dlrm")
IDS = ("zipf", "uniform")
BATCHES = (1, 128, 2048, 16384, 65536)
DIMS = (16, 64, 128)
ROTATION = 4  # number of batches of ids that a measurement uses in turn


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The axes of a benchmark, each a tuple of names or sizes; every combination is measured.

    ``limits`` has entries ``(provider, mode, batches)``: in that mode the provider is measured at these batch sizes
    only.
    """

    mode: tuple[str, ...] = MODES
    provider: tuple[str, ...] = PROVIDERS
    scheme: tuple[str, ...] = tuple(SCHEMES)[:4]
    ids: tuple[str, ...] = IDS
    batch: tuple[int, ...] = BATCHES
    dim: tuple[int, ...] = DIMS
    limits: tuple[tuple[str, str, tuple[int, ...]], ...] = ()

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


Axes = Mapping[str, tuple[Any, ...]]  # the values of some axes, by name


def named_axes(values: Mapping[str, Sequence[Any] | None]) -> Axes:
    """The axes that the options of the command name; a scheme may be named by the start of its name.

    Raises:
        ValueError: if no scheme, or more than one, has a name that starts so.
    """
    named = {axis: tuple(chosen) for axis, chosen in values.items() if chosen}
    return named | {"scheme": tuple(map(scheme_named, named["scheme"]))} if "scheme" in named else named


def scheme_named(name: str) -> str:
    """The scheme whose name starts with ``name``, in upper or lower case.

    Raises:
        ValueError: if there is none, or more than one.

    >>> scheme_named("qr"), scheme_named("chinese")
    ('QR(4)', 'ChineseRemainder(3)')
    """
    matches = [scheme for scheme in SCHEMES if scheme.lower().startswith(name.lower())]
    if len(matches) != 1:
        raise ValueError(f"scheme ({name!r}) must be the start of one of {', '.join(SCHEMES)}")
    return matches[0]


@dataclass(frozen=True, kw_only=True)
class CaseGroup:
    """Cases that are measured together, with all their providers in memory: one mode, scheme and width."""

    mode: str
    scheme: str
    dim: int
    cells: tuple[tuple[str, int, tuple[str, ...]], ...]  # distribution of ids, batch size, providers

    @property
    def providers(self) -> tuple[str, ...]:
        """Every provider of a cell, once."""
        return tuple(dict.fromkeys(p for *_, providers in self.cells for p in providers))


_ZIPF = Grid(mode=("forward", "step"), scheme=("QR(4)",), ids=("zipf",), dim=(16,))
PRESETS: dict[str, tuple[Grid, ...]] = {
    "full": (Grid(),),
    "cpu": (
        replace(
            _ZIPF, provider=("loop", "reference", "fbgemm", "fbgemm_fastest", "fused"), batch=(1, 128, 2048, 16384)
        ),
    ),
    "h200": (
        replace(
            _ZIPF,
            dim=(16, 64),
            limits=(
                ("compiled", "forward", (2048, 65536)),
                ("compiled", "step", ()),
                *((p, mode, (128, 2048)) for p in ("dense", "loop", "reference") for mode in ("forward", "step")),
            ),
        ),
        replace(_ZIPF, provider=("fused",), scheme=("Full()",), dim=(16, 64), batch=(128, 2048, 16384, 65536)),
        replace(_ZIPF, mode=("step_amsgrad",), provider=("fused", "fused_trust"), batch=(128, 2048, 65536)),
        replace(_ZIPF, mode=("dlrm",), provider=("fbgemm", "fbgemm_fastest", "fused"), batch=(128, 2048, 16384)),
        replace(
            _ZIPF,
            provider=("fused", "fused_trust"),
            scheme=("GeneralizedQR(3)", "ChineseRemainder(3)", "Path(4, (64,))"),
            batch=(2048, 65536),
        ),
        replace(_ZIPF, provider=("fbgemm", "fbgemm_fastest", "fused"), dim=(128,), batch=(2048, 65536)),
        replace(_ZIPF, provider=("fbgemm", "fbgemm_fastest", "fused"), ids=("uniform",), batch=(2048, 65536)),
    ),
}

PRESETS["fbgemm"] = (
    replace(_ZIPF, provider=(*FBGEMM, "fused", "fused_trust"), dim=(16, 64), batch=(128, 2048, 16384, 65536)),
    *(grid for grid in PRESETS["h200"] if grid.scheme == ("Full()",) or grid.mode == ("dlrm",)),
)  # the rows of "h200" in which FBGEMM and quorem can be compared, in half the time


def groups(grids: Sequence[Grid]) -> Iterator[CaseGroup]:
    """What to measure, in order, each case once. Full tables are measured with a grid's first scheme only."""
    seen: set[tuple[object, ...]] = set()
    for grid in grids:
        limits = {(provider, mode): batches for provider, mode, batches in grid.limits}
        for mode, dim, (i, scheme) in product(grid.mode, grid.dim, enumerate(grid.scheme)):
            cells = []
            for how, batch in product(grid.ids, grid.batch):
                wanted = {
                    p: (mode, scheme_of(p, scheme), dim, p, how, batch)
                    for p in grid.provider
                    if (i == 0 or p not in FULL) and batch in limits.get((p, mode), grid.batch)
                }
                providers = tuple(p for p, key in wanted.items() if key not in seen)
                seen |= set(wanted.values())
                if providers:
                    cells.append((how, batch, providers))
            if cells:
                yield CaseGroup(mode=mode, scheme=scheme, dim=dim, cells=tuple(cells))


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
