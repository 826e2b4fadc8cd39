"""Schemes: how one table of ``n`` categories and width ``D`` is stored (sections 2 to 4).

A scheme is an immutable value. ``scheme.spec(n, d)`` gives the partitions, shapes and parameter count for one table
without allocating anything; modules are built from the spec. Schemes are written as JSON here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..partitions import ExplicitPartition, Partition
from .families import QR, Activation, ChineseRemainder, Composed, Custom, GeneralizedQR, Hash, Path
from .frequency import HotCold, Pool, Ranks, RawCounts
from .scheme import AnyPartition, Full, Scheme, TableSpec, check_scheme

__all__ = [
    "Activation",
    "AnyPartition",
    "ChineseRemainder",
    "Composed",
    "Custom",
    "Full",
    "GeneralizedQR",
    "Hash",
    "HotCold",
    "Path",
    "Pool",
    "QR",
    "Ranks",
    "RawCounts",
    "Scheme",
    "TableSpec",
    "check_scheme",
    "from_dict",
    "from_json",
    "to_dict",
    "to_json",
]

SCHEMES = {c.__name__: c for c in (Full, Hash, QR, GeneralizedQR, ChineseRemainder, Custom, Path, HotCold)}


def to_json(scheme: Scheme) -> str:
    """The scheme as JSON text, without options at their defaults.

    >>> to_json(QR(num_collisions=60, operation="add"))
    '{"scheme": "QR", "operation": "add", "num_collisions": 60}'
    """
    return json.dumps(to_dict(scheme))


def to_dict(scheme: Scheme | Pool, *, with_partitions: bool = True) -> dict[str, Any]:
    """The scheme as JSON values, without options at their defaults.

    Args:
        scheme: the scheme, or the pool of a ``HotCold`` scheme.
        with_partitions: whether the partitions of ``Custom`` are included; its index maps may be long.

    >>> to_dict(QR(num_collisions=60))
    {'scheme': 'QR', 'num_collisions': 60}
    """
    options = {f.name: getattr(scheme, f.name) for f in fields(scheme) if getattr(scheme, f.name) != f.default}
    if isinstance(scheme, HotCold):
        options["cold"] = to_dict(scheme.cold, with_partitions=with_partitions)
    if not with_partitions:
        options.pop("partitions", None)
    elif isinstance(scheme, Custom):
        options["partitions"] = [
            {"stride": p.stride, "size": p.size} if isinstance(p, Partition) else {"index": p.index.tolist()}
            for p in scheme.partitions
        ]
    return {"scheme": type(scheme).__name__, **options}


def from_json(text: str) -> Scheme:
    """The scheme that ``to_json`` wrote.

    Raises:
        ValueError: if the text is not a scheme.

    >>> from_json('{"scheme": "Path", "hidden": [64, 32]}')
    Path(num_collisions=4, hidden=(64, 32))
    """
    return from_dict(json.loads(text))


def from_dict(values: Any, partitions: Sequence[AnyPartition] | None = None) -> Scheme:
    """The scheme that ``to_dict`` gave as JSON values.

    Args:
        values: the JSON values.
        partitions: the partitions of ``Custom``, if ``values`` were made without them.

    Raises:
        TypeError: if an option is missing or of the wrong type.
        ValueError: if the values are not a scheme.

    >>> from_dict({"scheme": "QR", "num_collisions": 60})
    QR(num_collisions=60)
    """
    scheme: Scheme = _from_dict(values, partitions, SCHEMES)
    return scheme


def _from_dict(values: Any, partitions: Sequence[AnyPartition] | None, known: Mapping[str, Any]) -> Any:
    if not isinstance(values, dict) or values.get("scheme") not in tuple(known):
        text, names = json.dumps(values)[:80], ", ".join(known)
        raise ValueError(f"scheme JSON ({text!r}) must be an object whose 'scheme' is one of {names}")
    options = dict(values)
    cls = known[options.pop("scheme")]
    if extra := sorted(set(options) - {f.name for f in fields(cls)}):
        raise ValueError(f"{cls.__name__} has no option {', '.join(extra)}")
    if cls is Custom:
        options["partitions"] = partitions or [_partition(entry) for entry in options.get("partitions", ())]
    if "cold" in options:
        options["cold"] = _from_dict(options["cold"], partitions, {**SCHEMES, "Pool": Pool})
    return cls(**options)


def _partition(entry: object) -> AnyPartition:
    if isinstance(entry, dict) and set(entry) == {"index"}:
        return ExplicitPartition(entry["index"])
    if isinstance(entry, dict) and set(entry) == {"stride", "size"}:
        return Partition(**entry)
    raise ValueError(f"partition JSON ({str(entry)[:80]!r}) must hold stride and size, or index")
