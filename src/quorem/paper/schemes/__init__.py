"""Schemes: how one table of ``n`` categories and width ``D`` is stored (sections 2 to 4).

A scheme is an immutable value. ``scheme.spec(n, d)`` gives the partitions, shapes and parameter count for one table
without allocating anything; modules are built from the spec.
"""

from .as_json import SCHEMES, from_dict, from_json, to_dict, to_json
from .families import (
    QR,
    Activation,
    ChineseRemainder,
    Composed,
    Custom,
    EqualTables,
    GeneralizedQR,
    Hash,
    LargeTable,
    Path,
)
from .frequency import HotCold, Pool, Ranks, RawCounts
from .scheme import AnyPartition, Full, Scheme, TableSpec, check_scheme

__all__ = [
    "Activation",
    "AnyPartition",
    "ChineseRemainder",
    "Composed",
    "Custom",
    "EqualTables",
    "Full",
    "GeneralizedQR",
    "Hash",
    "HotCold",
    "LargeTable",
    "Path",
    "Pool",
    "QR",
    "Ranks",
    "RawCounts",
    "SCHEMES",
    "Scheme",
    "TableSpec",
    "check_scheme",
    "from_dict",
    "from_json",
    "to_dict",
    "to_json",
]
