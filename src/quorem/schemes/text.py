"""Schemes as JSON."""

import json
from dataclasses import fields
from typing import Any

from .. import partitions as P
from .families import QR, ChineseRemainder, Custom, GeneralizedQR, Hash, Path
from .frequency import HotCold, Pool
from .scheme import AnyPartition, Full, Scheme

SCHEMES = {c.__name__: c for c in (Full, Hash, QR, GeneralizedQR, ChineseRemainder, Custom, Path, HotCold)}


def to_json(scheme: Scheme) -> str:
    """The scheme as JSON text, without options at their defaults.

    >>> to_json(QR(num_collisions=60, operation="add"))
    '{"scheme": "QR", "operation": "add", "num_collisions": 60}'
    """
    return json.dumps(_as_dict(scheme))


def _as_dict(scheme: Any) -> dict[str, Any]:
    options = {f.name: getattr(scheme, f.name) for f in fields(scheme) if getattr(scheme, f.name) != f.default}
    if "cold" in options:
        options["cold"] = _as_dict(scheme.cold)
    if isinstance(scheme, Custom):
        options["partitions"] = [
            {"stride": p.stride, "size": p.size} if isinstance(p, P.Partition) else {"index": p.index.tolist()}
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
    scheme: Scheme = _from_dict(json.loads(text), text)
    return scheme


def _from_dict(options: Any, text: str, inside: bool = False) -> Any:
    known: dict[str, Any] = {**SCHEMES, **({"Pool": Pool} if inside else {})}
    if not isinstance(options, dict) or options.get("scheme") not in tuple(known):
        raise ValueError(f"scheme JSON ({text[:80]!r}) must be an object whose 'scheme' is one of {', '.join(known)}")
    options = dict(options)
    cls = known[options.pop("scheme")]
    if extra := sorted(set(options) - {f.name for f in fields(cls)}):
        raise ValueError(f"{cls.__name__} has no option {', '.join(extra)}")
    if cls is Custom:
        options["partitions"] = [_partition(entry) for entry in options.get("partitions", ())]
    if "cold" in options:
        options["cold"] = _from_dict(options["cold"], text, inside=True)
    return cls(**options)


def _partition(entry: object) -> AnyPartition:
    if isinstance(entry, dict) and set(entry) == {"index"}:
        return P.ExplicitPartition(entry["index"])
    if isinstance(entry, dict) and set(entry) == {"stride", "size"}:
        return P.Partition(**entry)
    raise ValueError(f"partition JSON ({str(entry)[:80]!r}) must hold stride and size, or index")
