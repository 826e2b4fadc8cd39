"""Beyond the paper: plans by counts against hashing and the quotient-remainder trick, at equal bytes.

Bytes are those of the tables in serving: plans in float32, and plans whose rows have 8 or 4 bits after training.
"""

from dataclasses import replace
from typing import Any, Literal

from ..modules.collection import Table
from ..paper.schemes import QR, Hash
from ..planner import plan
from . import budgets
from .figures import Point
from .paper_figures import Study

DIM = 16
AXES = replace(
    budgets.AXES,
    name="plans",
    title="Beyond the paper: plans by counts at equal bytes",
    paper="Not in the paper, which names frequencies as what it leaves out.",
)
SERIES: dict[str, tuple[Literal[8, 4], ...]] = {"plan": (), "plan, 8 bits": (8,), "plan, 4 bits": (4,)}


def points(study: Study) -> list[Point]:
    """Hashing, quotient-remainder, and plans in 32, 8 and 4 bits at every share, where such a plan exists.

    Raises:
        ValueError: if the study has no frequencies.
    """
    if study.frequencies is None:
        raise ValueError("frequencies must be those of the data's training rows: plans are made by them")
    tables = [
        Table(name, n, DIM, frequencies=counts)
        for (name, counts), n in zip(study.frequencies.items(), study.cardinalities, strict=True)
    ]
    full = 4 * DIM * sum(study.cardinalities)
    result = study.points("full")
    for share in budgets.SHARES:  # bytes of the full tables for each byte in serving
        settings: dict[str, dict[str, Any]] = {"hash": {"scheme": Hash(share)}, "mult": {"scheme": QR(share)}}
        for series, bits in SERIES.items():
            try:
                planned = plan(tables, full // share, optimizer=None, bits=bits)
            except ValueError:  # the budget is below one row for each table
                continue
            if planned.bits == (bits or (None,))[0]:  # else all ids have rows in more bits: another series
                settings[series] = {"plan": dict(planned), "bits": planned.bits}
        for series, options in settings.items():
            result += study.of_each_network(series, share, options)
    return result
