"""Convert tables to JSON values and back: the description that a file holds besides the tensors.

A table's partitions are written out, not only its scheme. So a file keeps its meaning even if a later version chooses
other sizes for the scheme, and opening it needs no search for sizes. Index maps and lists of ids are tensors of the
file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .. import schemes
from ..operations import OPERATIONS, Operation, widths
from ..ops.codes import code_bytes
from ..partitions import ExplicitPartition, Partition
from ..renumbering import Permutation
from ..saved import entry_name
from ..schemes import QR, AnyPartition, Composed, Custom, EqualTables, HotCold, Path, Pool, Scheme, TableSpec
from ..tables import Tables

_KINDS = {int: "an integer", str: "a string", bool: "true or false", list: "a list", dict: "an object"}
TABLE_NAMES = {
    *("name", "features", "num_embeddings", "embedding_dim", "padding_idx", "num_hot", "num_rest", "ranked"),
    *("raw_ids", "unknown"),
    *("scheme", "operation", "permutation", "partitions", "dims"),
}


@dataclass(frozen=True, repr=False)
class Known(Scheme):
    """A scheme that returns a saved spec, so that a module's constructor uses that spec."""

    table: TableSpec | None = None

    def spec(self, n: int, d: int) -> TableSpec:
        """The spec that was saved."""
        assert self.table is not None
        return self.table


def of_table(tables: Tables, t: int) -> dict[str, Any]:
    """The description of one table of a module, as JSON values."""
    spec, name = tables.specs[t], tables.names[t]
    return {
        "name": name,
        "features": tables.features_of(t),
        "num_embeddings": spec.num_embeddings,
        "embedding_dim": spec.embedding_dim,
        "padding_idx": tables.padding_ids[t],
        "raw_ids": tables.raw_ids[t],
        "unknown": tables.unknown[t],
        "num_hot": spec.num_hot,
        "num_rest": spec.num_rest,
        "ranked": tables.ranks_of[t] is not None,
        "scheme": schemes.to_dict(spec.scheme, with_partitions=False),
        "operation": spec.operation,
        "permutation": None if spec.permutation is None else [spec.permutation.multiplier, spec.permutation.shift],
        "partitions": [
            {"stride": p.stride, "size": p.size} if isinstance(p, Partition) else {"map": entry_name("maps", name, j)}
            for j, p in enumerate(spec.partitions)
        ],
        "dims": [width for _, width in spec.shapes],
    }


def maps_of(tables: Tables) -> dict[str, Tensor]:
    """The index maps of a module's tables, by name; int32 if the buckets fit."""
    maps = {}
    for name, spec in zip(tables.names, tables.specs, strict=True):
        for j, partition in enumerate(spec.partitions):
            if isinstance(partition, ExplicitPartition):
                fits = partition.size <= torch.iinfo(torch.int32).max
                maps[entry_name("maps", name, j)] = partition.index.to(torch.int32) if fits else partition.index
    return maps


def table_spec(
    values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], maps: Mapping[str, Tensor], bits: int
) -> TableSpec:
    """The spec that ``of_table`` described. It is checked against the file before memory of its size is allocated.

    Args:
        values: the description of one table.
        shapes: the shapes of the file's tensors, by their names in the module's ``state_dict``.
        maps: the file's index maps, by name.
        bits: bits per stored number if rows are quantized, else 0.

    Raises:
        ValueError: if the values do not describe a table, or not one that the file holds.
    """
    check_known(values, TABLE_NAMES, "a table")
    name = taken(values, "name", str)
    n, d = at_least(values, "num_embeddings", 1), at_least(values, "embedding_dim", 1)
    num_hot, num_rest = at_least(values, "num_hot", 0), at_least(values, "num_rest", 0)
    num_composed = n - num_hot - num_rest
    if num_composed < 0:
        raise ValueError(f"table {name!r} has {n} ids and cannot have {num_hot} hot ones and {num_rest} of the rest")
    operation = taken(values, "operation", str)
    if operation not in OPERATIONS:
        raise ValueError(f"operation ({operation!r}) of table {name!r} must be one of {', '.join(OPERATIONS)}")
    partitions = tuple(_partition(entry, num_composed, maps) for entry in taken(values, "partitions", list))
    scheme = schemes.from_dict(values.get("scheme"), partitions or (Partition(1, 1),))
    composing = scheme.cold if isinstance(scheme, HotCold) else scheme
    pool = composing if isinstance(composing, Pool) and num_composed else None
    if (num_hot, num_rest) != (getattr(scheme, "num_hot", 0), getattr(scheme, "num_rest", 0)):
        raise ValueError(f"table {name!r} has {num_hot} hot ids and {num_rest} of the rest, which its scheme has not")
    if not _fits(composing, partitions, operation, num_composed):
        raise ValueError(f"table {name!r} has {operation} of {str(partitions)[:80]}, which does not fit its scheme")
    hidden = composing.hidden if isinstance(composing, Path) and partitions else None
    stored = partitions[: 1 if hidden is not None else None]
    num_own = num_hot + (num_rest > 0)
    dims = tuple(taken(values, "dims", list))
    given = getattr(composing, "dims", None)
    own_widths = (d,) * (num_own > 0)
    composed = dims[len(own_widths) :]
    expected = widths(operation, d, len(stored), (composed if operation == "concat" else given)) if stored else ()
    if not all(type(w) is int for w in dims) or given not in (None, composed) or dims != own_widths + tuple(expected):
        raise ValueError(f"dims ({str(dims)[:80]}) of table {name!r} must be the widths of its stored tables")
    rows = [num_own] * len(own_widths) + [p.size for p in stored]
    for j, (size, width) in enumerate(zip(rows, dims, strict=True)):
        entry = entry_name("tables", name, j)
        _check_shape(entry, shapes.get(entry, ()), size, width, bits)
    pair = values.get("permutation")
    if pair is not None and (not isinstance(pair, list) or len(pair) != 2 or not num_composed):
        raise ValueError(f"permutation ({str(pair)[:80]}) of table {name!r} must be null or two integers")
    return TableSpec(
        n,
        d,
        scheme,
        partitions,
        tuple(zip(rows, dims, strict=True)),
        cast(Operation, operation),
        None if pair is None else Permutation(pair[0], pair[1], num_composed),
        hidden,
        num_hot=num_hot,
        num_rest=num_rest,
        pool=pool,
    )


def _check_shape(name: str, shape: tuple[int, ...], rows: int, width: int, bits: int) -> None:
    """Raise ValueError unless the file has ``rows`` rows that can hold ``width`` numbers.

    The exact shape of quantized rows is checked when the module is built.
    """
    least = code_bytes(width, bits) if bits else width
    if len(shape) != 2 or shape[0] != rows or (shape[1] < least if bits else shape[1] != width):
        raise ValueError(f"{name} is {shape or 'missing'} and must hold {rows} rows of {width} numbers")


def _fits(composing: Scheme | Pool, partitions: tuple[AnyPartition, ...], operation: str, num_composed: int) -> bool:
    """Whether these partitions can come from the scheme; their sizes are not checked here."""
    if isinstance(composing, Pool) or not num_composed:
        return not partitions and operation == "add"
    closed = all(isinstance(p, Partition) for p in partitions)
    if isinstance(composing, Composed) and composing.operation != operation:
        return False
    if isinstance(composing, Path):
        return closed and operation == "add" and len(partitions) == composing.num_partitions
    if isinstance(composing, EqualTables):
        return closed and len(partitions) == composing.num_partitions
    if isinstance(composing, Custom):
        return bool(partitions)
    return closed and len(partitions) == 1 + isinstance(composing, QR)


def _partition(entry: Any, n: int, maps: Mapping[str, Tensor]) -> AnyPartition:
    if isinstance(entry, dict) and entry.keys() == {"map"}:
        name = entry["map"]
        if not isinstance(name, str) or name not in maps:
            raise ValueError(f"index map {str(name)[:80]!r} is missing")
        if maps[name].is_floating_point() or maps[name].shape != (n,):
            raise ValueError(f"index map {name!r} is {maps[name].dtype} {list(maps[name].shape)} for {n} ids")
        return ExplicitPartition(maps[name])
    if isinstance(entry, dict) and entry.keys() == {"stride", "size"}:
        return Partition(at_least(entry, "stride", 1), at_least(entry, "size", 1))
    raise ValueError(f"partition ({str(entry)[:80]}) must hold stride and size, or map")


def taken(values: Mapping[str, Any], name: str, kind: type) -> Any:
    """The value of that name; raises ValueError unless it has the type ``kind``."""
    if name not in values or type(values[name]) is not kind:
        given = repr(values[name])[:80] if name in values else "missing"
        raise ValueError(f"{name} ({given}) must be {_KINDS[kind]}")
    return values[name]


def at_least(values: Mapping[str, Any], name: str, least: int) -> int:
    """The value of that name; raises ValueError unless it is an integer in ``[least, 2**63)``."""
    value = int(taken(values, name, int))
    if not least <= value < 2**63:
        raise ValueError(f"{name} ({value}) must be in [{least}, 2**63)")
    return value


def check_known(values: Mapping[str, Any], names: set[str], what: str) -> None:
    """Raise ValueError for a name that this version does not know: ignoring it could change the result."""
    if extra := sorted(values.keys() - names):
        raise ValueError(f"{what} has {', '.join(extra)}, which this version of quorem does not know")
