"""Schemes: how one table of ``n`` categories and width ``D`` is stored (sections 2 to 4).

A scheme is an immutable value. ``scheme.spec(n, d)`` gives the partitions, shapes and parameter count for one table
without allocating anything; modules are built from the spec. Schemes are written as JSON here.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ...files.checked_json import build
from ..partitions import ExplicitPartition, Partition
from .families import QR, Activation, ChineseRemainder, Composed, Custom, GeneralizedQR, Hash, Path
from .frequency import HotCold, Pool, Ranks, RawCounts
from .scheme import AnyPartition, Full, Scheme, TableSpec, check_scheme

__all__ = ["QR", "ChineseRemainder", "Composed", "Custom", "Full", "GeneralizedQR", "Hash", "HotCold", "Path", "Pool"]
__all__ += ["Activation", "AnyPartition", "Ranks", "RawCounts", "Scheme", "TableSpec"]
__all__ += ["check_scheme", "from_dict", "from_json", "to_dict", "to_json"]

SCHEMES = {c.__name__: c for c in (Full, Hash, QR, GeneralizedQR, ChineseRemainder, Custom, Path, HotCold)}


def to_json(scheme: Scheme) -> str:
    """The scheme as JSON text, without options at their defaults.

    >>> to_json(QR(num_collisions=60, operation="add"))
    '{"scheme": "QR", "operation": "add", "num_collisions": 60}'
    """
    return json.dumps(to_dict(scheme))


def to_dict(scheme: Scheme | Pool, *, maps: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """The scheme as JSON values, without options at their defaults.

    With ``maps``, index maps of ``Custom``, which may be long, are put there, and the values have their names.

    >>> to_dict(QR(num_collisions=60))
    {'scheme': 'QR', 'num_collisions': 60}
    """
    options = {f.name: getattr(scheme, f.name) for f in fields(scheme) if getattr(scheme, f.name) != f.default}
    if isinstance(scheme, HotCold):
        options["cold"] = to_dict(scheme.cold, maps=maps)
    if isinstance(scheme, Custom):
        options["partitions"] = [_partition_values(partition, maps) for partition in scheme.partitions]
    return {"scheme": type(scheme).__name__, **options}


def _partition_values(partition: AnyPartition, maps: dict[str, Tensor] | None) -> dict[str, Any]:
    if isinstance(partition, Partition):
        return {"stride": partition.stride, "size": partition.size}
    if maps is None:
        return {"index": partition.index.tolist()}
    name = f"maps.{len(maps)}"
    maps[name] = partition.index.to(torch.int32) if partition.size < 2**31 else partition.index
    return {"index": name}


def from_json(text: str) -> Scheme:
    """The scheme that ``to_json`` wrote.

    Raises:
        ValueError: if the text is not a scheme.

    >>> from_json('{"scheme": "Path", "hidden": [64, 32]}')
    Path(num_collisions=4, hidden=(64, 32))
    """
    return from_dict(json.loads(text))


def from_dict(values: Any, *, maps: Mapping[str, Tensor] | None = None) -> Scheme:
    """The scheme that ``to_dict`` gave as JSON values, and the index maps that they name; else a ValueError.

    >>> from_dict({"scheme": "QR", "num_collisions": 60})
    QR(num_collisions=60)
    """
    return _from_dict(values, maps or {}, SCHEMES)


def _from_dict(values: Any, maps: Mapping[str, Tensor], known: Mapping[str, Any]) -> Any:
    if not isinstance(values, dict) or values.get("scheme") not in tuple(known):
        text, names = json.dumps(values)[:80], ", ".join(known)
        raise ValueError(f"scheme JSON ({text!r}) must be an object whose 'scheme' is one of {names}")
    converters = {
        AnyPartition: lambda entry: _partition(entry, maps),
        Scheme | Pool: lambda cold: _from_dict(cold, maps, {**SCHEMES, "Pool": Pool}),
    }
    options = dict(values)
    return build(known[options.pop("scheme")], options, converters=converters)


def _partition(entry: object, maps: Mapping[str, Tensor]) -> AnyPartition:
    if isinstance(entry, dict) and set(entry) == {"index"}:
        index = entry["index"]
        if isinstance(index, str) and index not in maps:
            raise ValueError(f"index ({index!r}) must be a list of buckets, or the name of one in the file")
        return ExplicitPartition(maps[index] if isinstance(index, str) else index)
    if isinstance(entry, dict) and set(entry) == {"stride", "size"}:
        return Partition(**entry)
    raise ValueError(f"partition JSON ({str(entry)[:80]!r}) must hold stride and size, or index")
