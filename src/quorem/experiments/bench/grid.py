"""What a benchmark measures: its axes, its presets, and the ids for all providers."""

from collections.abc import Sequence
from dataclasses import dataclass

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
FULL = ("fbgemm_full", "fbgemm_full_fastest")  # providers that store the full tables, whatever the scheme
FBGEMM = ("fbgemm_full", "fbgemm_full_fastest", "fbgemm", "fbgemm_fastest")
PROVIDERS = ("loop", *FBGEMM, "fused")
MODES = ("forward", "step")
SCHEME_OPTIONS = dict(zip(("qr", "generalized", "chinese", "path", "full"), SCHEMES, strict=True))  # of the command
ROTATION = 4  # number of batches of ids that a measurement uses in turn


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The axes of a benchmark, each a tuple of names or sizes; every combination is measured."""

    mode: tuple[str, ...] = MODES
    provider: tuple[str, ...] = PROVIDERS
    scheme: tuple[str, ...] = ("QR(4)",)
    ids: tuple[str, ...] = ("zipf",)
    batch: tuple[int, ...] = (1, 128, 2048, 16384, 65536)
    dim: tuple[int, ...] = (16,)

    def providers(self, scheme: str) -> list[str]:
        """The providers to measure with a scheme: those with full tables with the first scheme only."""
        return [p for p in self.provider if scheme == self.scheme[0] or p not in FULL]


PRESETS: dict[str, tuple[Grid, ...]] = {  # what is measured on a device if nothing is named
    "cpu": (Grid(provider=("loop", "fbgemm", "fbgemm_fastest", "fused"), batch=(1, 128, 2048, 16384)),),
    "cuda": (
        Grid(dim=(16, 64)),
        Grid(provider=("fused",), scheme=tuple(SCHEMES)[1:], batch=(2048, 65536), dim=(16, 64)),
        Grid(provider=("fbgemm", "fbgemm_fastest", "fused"), batch=(2048, 65536), ids=("uniform",)),
    ),
}


def stored_scheme(provider: str, scheme: str) -> str:
    """The scheme of the tables that a provider stores in a case with ``scheme``."""
    return "Full()" if provider in FULL else scheme


def draw_ids(how: str, cardinalities: Sequence[int], batch: int, seed: int) -> Tensor:
    """Ids ``[batch, F]``: ``"uniform"``, or ``"zipf"``: id k has a probability proportional to log(1 + 1/(k + 1))."""
    n = torch.tensor(cardinalities, dtype=torch.float64)
    u = torch.rand(batch, len(n), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    drawn = (n + 1) ** u - 1 if how == "zipf" else u * n
    return torch.minimum(drawn.long(), n.long() - 1)
