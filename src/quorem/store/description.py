"""Tables as JSON values and back: what a file says beside the numbers.

A table's partitions are written out, not only its scheme: a file means the same rows in every version, whatever the
search for good sizes becomes, and opening one takes no search. Index maps are tensors of the file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .. import schemes
from ..operations import OPERATIONS, widths
from ..partitions import ExplicitPartition, Partition, Permutation
from ..schemes import QR, Composed, Custom, EqualTables, Path, Scheme, TableSpec
from ..tables import Tables

_KINDS = {int: "an integer", str: "a string", bool: "true or false", list: "a list", dict: "an object"}


@dataclass(frozen=True, repr=False)
class Known(Scheme):
    """A scheme that gives one table's spec as it was saved, so that a module's constructor builds it from there."""

    table: TableSpec | None = None

    def spec(self, n: int, d: int) -> TableSpec:
        """The spec that was saved."""
        assert self.table is not None
        return self.table


def of_table(tables: Tables, feature: int) -> dict[str, Any]:
    """What one table of a module is, as JSON values."""
    spec = tables.specs[feature]
    return {
        "name": tables.names[feature],
        "num_embeddings": spec.num_embeddings,
        "embedding_dim": spec.embedding_dim,
        "padding_idx": tables.padding[feature],
        "scheme": _of_scheme(spec.scheme),
        "operation": spec.operation,
        "permutation": None if spec.permutation is None else [spec.permutation.multiplier, spec.permutation.shift],
        "partitions": [
            {"stride": p.stride, "size": p.size} if isinstance(p, Partition) else {"map": map_name(tables, feature, j)}
            for j, p in enumerate(spec.partitions)
        ],
    }


def map_name(tables: Tables, feature: int, partition: int) -> str:
    """The name of an index map in the file."""
    name = tables.names[feature]
    return f"maps.{name}.{partition}" if name else f"maps.{partition}"


def maps_of(tables: Tables) -> dict[str, Tensor]:
    """The index maps of a module's tables, by name; as int32 where their buckets fit."""
    maps = {}
    for feature, spec in enumerate(tables.specs):
        for j, partition in enumerate(spec.partitions):
            if isinstance(partition, ExplicitPartition):
                fits = partition.size <= torch.iinfo(torch.int32).max
                maps[map_name(tables, feature, j)] = partition.index.to(torch.int32) if fits else partition.index
    return maps


def table_spec(
    values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], maps: Mapping[str, Tensor]
) -> TableSpec:
    """The spec that ``of_table`` wrote, checked against what the file holds before anything of its size is made.

    Args:
        values: of one table.
        shapes: of the file's tensors, by the names that a module gives them.
        maps: the file's index maps.

    Raises:
        ValueError: if the values do not describe a table, or not one that the file holds.
    """
    check_known(values, TABLE_NAMES, "a table")
    name = taken(values, "name", str)
    n, d = positive(values, "num_embeddings"), positive(values, "embedding_dim")
    operation = taken(values, "operation", str)
    if operation not in OPERATIONS:
        raise ValueError(f"operation ({operation!r}) of table {name!r} must be one of {', '.join(OPERATIONS)}")
    partitions = tuple(_partition(entry, n, maps) for entry in taken(values, "partitions", list))
    scheme = _scheme(taken(values, "scheme", dict), partitions)
    hidden = scheme.hidden if isinstance(scheme, Path) else None
    if not _fits(scheme, partitions, operation):
        raise ValueError(f"table {name!r} has {operation} of {str(partitions)[:80]}, which does not fit its scheme")
    stored = partitions if hidden is None else partitions[:1]
    tables = [shapes.get(table_name(name, j), ()) for j in range(len(stored))]
    if any(len(shape) != 2 or shape[0] != p.size for shape, p in zip(tables, stored, strict=True)):
        raise ValueError(f"table {name!r} is stored as {str(tables)[:80]}, which does not fit its partitions")
    dims = tuple(shape[1] for shape in tables)
    given = getattr(scheme, "dims", None)
    if given not in (None, dims) or dims != widths(operation, d, len(dims), dims if operation == "concat" else given):
        raise ValueError(f"table {name!r} is stored in widths {str(dims)[:80]}, which do not give {d}")
    pair = values.get("permutation")
    if pair is not None and (not isinstance(pair, list) or len(pair) != 2):
        raise ValueError(f"permutation ({str(pair)[:80]}) of table {name!r} must be null or two integers")
    permutation = None if pair is None else Permutation(pair[0], pair[1], n)
    sizes = tuple((p.size, width) for p, width in zip(stored, dims, strict=True))
    return TableSpec(n, d, scheme, partitions, sizes, operation, permutation, hidden)


def _fits(scheme: Scheme, partitions: tuple[schemes.AnyPartition, ...], operation: str) -> bool:
    """Whether a scheme can have given these partitions; their sizes are compared with the stored tables."""
    closed = all(isinstance(p, Partition) for p in partitions)
    if isinstance(scheme, Composed) and scheme.operation != operation:
        return False
    if isinstance(scheme, Path):
        return closed and operation == "add" and len(partitions) == scheme.num_partitions
    if isinstance(scheme, EqualTables):
        return closed and len(partitions) == scheme.num_partitions
    return bool(partitions) if isinstance(scheme, Custom) else closed and len(partitions) == 1 + isinstance(scheme, QR)


def table_name(name: str, j: int) -> str:
    """The name of a stored table in a ``state_dict``."""
    return f"tables.{name}.{j}" if name else f"tables.{j}"


def _of_scheme(scheme: Scheme) -> dict[str, Any]:
    if not isinstance(scheme, Custom):
        return dict(json.loads(schemes.to_json(scheme)))
    options = {f.name: getattr(scheme, f.name) for f in fields(scheme) if f.name != "partitions"}
    return {"scheme": "Custom", **options}


def _scheme(values: dict[str, Any], partitions: tuple[schemes.AnyPartition, ...]) -> Scheme:
    try:
        if values.get("scheme") != "Custom":
            return schemes.from_json(json.dumps(values))
        options = {name: value for name, value in values.items() if name != "scheme"}
        return Custom(partitions, **options)
    except TypeError as error:  # an option of another type, or of another name
        raise ValueError(str(error)) from None


def _partition(entry: Any, n: int, maps: Mapping[str, Tensor]) -> schemes.AnyPartition:
    if isinstance(entry, dict) and entry.keys() == {"map"}:
        name = entry["map"]
        if not isinstance(name, str) or name not in maps:
            raise ValueError(f"index map {str(name)[:80]!r} is missing")
        if maps[name].is_floating_point() or maps[name].shape != (n,):
            raise ValueError(f"index map {name!r} is {maps[name].dtype} {list(maps[name].shape)} for {n} ids")
        return ExplicitPartition(maps[name])
    if isinstance(entry, dict) and entry.keys() == {"stride", "size"}:
        return Partition(positive(entry, "stride"), positive(entry, "size"))
    raise ValueError(f"partition ({str(entry)[:80]}) must hold stride and size, or map")


def taken(values: Mapping[str, Any], name: str, kind: type) -> Any:
    """A value of a kind that JSON has, or ValueError."""
    if name not in values or type(values[name]) is not kind:
        found = repr(values[name])[:80] if name in values else "missing"
        raise ValueError(f"{name} ({found}) must be {_KINDS[kind]}")
    return values[name]


def positive(values: Mapping[str, Any], name: str) -> int:
    """A size: an integer in ``[1, 2**63)``, or ValueError."""
    value = int(taken(values, name, int))
    if not 1 <= value < 2**63:
        raise ValueError(f"{name} ({value}) must be in [1, 2**63)")
    return value


def check_known(values: Mapping[str, Any], names: set[str], what: str) -> None:
    """Raise ValueError for a name that this version does not write: ignoring it might change what comes out."""
    unknown = sorted(values.keys() - names)
    if unknown:
        raise ValueError(f"{what} has {', '.join(unknown)}, which this version of quorem does not know")


TABLE_NAMES = {
    *("name", "num_embeddings", "embedding_dim", "padding_idx"),
    *("scheme", "operation", "permutation", "partitions"),
}
