"""What the rows of a module mean, as integers: a buffer that is saved with the rows and compared when they are loaded.

Tables of equal shapes may differ in partitions, operation or order, and then the same rows give other vectors.
"""

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..ops.layout import pool_key
from ..paper.partitions import Partition
from ..paper.schemes import Path, TableSpec
from ..paper.schemes.frequency import Ranks, are_known, list_sizes, rank

if TYPE_CHECKING:
    from .storage import StoredTables

# How the rows of an id become its vector; the position is what is saved.
HOW = ("one row", "add", "mult", "concat", "feature", "relu path", "sigmoid path", "sums")
PART_COLUMNS = 3  # of each stored table or level of networks: stride (of an index map, minus its CRC), size, width


class Meaning(NamedTuple):
    """What the rows of one table mean; after these integers come its partitions."""

    name: int  # 31 bits of the CRC-32 of the table's name
    bits: int  # bits per number if rows are quantized, else 0
    raw_ids: int
    ranked: int  # whether the module lists the hot and cold ids; if not, ids are in order of frequency
    pool: int  # which pool the cold ids read, counted from 1; 0 for none
    first: int  # number of the table's first cold id in the pool
    mixing: int  # bits of the pool's numbers
    num_embeddings: int
    embedding_dim: int
    width: int  # of rows; below embedding_dim where a matrix turns them into vectors
    num_hot: int
    num_rest: int
    how: int
    multiplier: int
    shift: int


COLUMNS = len(Meaning._fields)


def meaning_of(tables: "StoredTables", ranked: Sequence[bool]) -> Tensor:
    """The meaning of each table's rows, ``[T, columns]``; ``ranked`` says which tables list their ids.

    It is int32, or int64 if an integer does not fit.
    """
    rows = []
    for t, (name, spec) in enumerate(zip(tables.names, tables.specs, strict=True)):
        row = [crc31(name.encode()), tables.bits, int(tables.raw_ids[t]), int(ranked[t])]
        if spec.pool is None:
            rows.append([*row, 0, 0, 0, *spec_integers(spec)])
        else:
            key, (first, mixing) = pool_key(tables.pools, spec), tables.pool_numbering(t)
            row += [list(tables.pools).index(key) + 1, first, mixing.bits, *spec_integers(spec)]
            rows.append(row + [i for extent in tables.pools[key] for i in (1, extent.rows, spec.width)])
    longest = max(map(len, rows))
    integers = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device="cpu")
    return integers.int() if int(integers.max()) < 2**31 else integers


def crc31(data: bytes) -> int:
    """31 bits of the CRC-32, which fit in an int32."""
    return zlib.crc32(data) & 0x7FFFFFFF


def spec_integers(spec: TableSpec) -> list[int]:
    """What the rows of a table mean by its spec alone: the last columns of ``Meaning``, and its partitions."""
    widths = [width for _, width in spec.shapes[spec.num_own > 0 :]]
    widths += [0] * (len(spec.partitions) - len(widths))  # levels of networks have no rows
    parts = [(1, spec.num_own, spec.width)] if spec.num_own else []
    for part, width in zip(spec.partitions, widths, strict=True):
        stride = part.stride if isinstance(part, Partition) else -crc31(part.index.numpy().tobytes())
        parts.append((stride, part.size, width))
    permutation = (spec.permutation.multiplier, spec.permutation.shift) if spec.permutation else (1, 0)
    sizes = (spec.num_embeddings, spec.embedding_dim, spec.width, spec.num_hot, spec.num_rest)
    return [*sizes, HOW.index(_how(spec)), *permutation, *(i for part in parts for i in part)]


def _how(spec: TableSpec) -> str:
    scheme = getattr(spec.scheme, "cold", spec.scheme)
    if isinstance(scheme, Path) and spec.hidden is not None:
        return f"{scheme.activation} path"
    if spec.pool is not None:
        return "sums"
    return spec.operation if len(spec.partitions) > 1 else "one row"


def differences(tables: "StoredTables", saved: Any, prefix: str = "") -> list[str]:
    """An error message for each table whose rows mean something else in a checkpoint; lists of ids may differ."""
    integers = isinstance(saved, Tensor) and saved.dtype in (torch.int32, torch.int64)
    if not integers or saved.dim() != 2 or saved.shape[1] < COLUMNS:
        return [f"{prefix}meaning must be int32 or int64 [tables, {COLUMNS} or more], as a quorem module saves it"]
    expected = meaning_of(tables, [False] * len(tables.names)).tolist()
    if len(saved) != len(expected):
        return [f"{prefix}stored holds {len(saved)} tables in the checkpoint and {len(expected)} here"]
    names = {crc31(name.encode()): repr(name) for name in tables.names}
    wrong = []
    for name, theirs, ours in zip(tables.names, saved.tolist(), expected, strict=True):
        pairs = zip(_words(theirs, names), _words(ours, names), strict=True)
        if changed := [pair for pair in pairs if pair[0] != pair[1]]:
            title = f"{prefix}stored: table{f' {name!r}' if name else ''} holds"
            there, here = (", ".join(words) for words in zip(*changed, strict=True))
            wrong.append(f"{title} {there} in the checkpoint and {here} here")
    return wrong


def _words(row: Sequence[int], names: dict[int, str]) -> list[str]:
    meaning, numbers = Meaning(*row[:COLUMNS]), row[COLUMNS:]
    parts = [numbers[i : i + PART_COLUMNS] for i in range(0, len(numbers), PART_COLUMNS)]
    parts = [part for part in parts[meaning.num_hot + meaning.num_rest > 0 :] if len(part) == PART_COLUMNS and part[1]]
    strides = ", ".join(f"{part[0]}:{part[1]}" if part[0] > 0 else f"index {-part[0]:08x}" for part in parts)
    how = HOW[meaning.how] if 0 <= meaning.how < len(HOW) else f"operation {meaning.how}"
    widths = f" with widths {', '.join(str(part[2]) for part in parts)}" if how == "concat" else ""
    renumbered = (meaning.multiplier, meaning.shift) != (1, 0)
    pool = f"numbers from {meaning.first} of {2**meaning.mixing} in pool {meaning.pool}" if meaning.pool else "no pool"
    return [
        f"the rows of {names.get(meaning.name, 'a table of another name')}",
        f"{meaning.num_embeddings} {'raw ids' if meaning.raw_ids else 'ids'} of {meaning.embedding_dim} numbers",
        f"rows of {meaning.width} numbers",
        f"numbers of {meaning.bits} bits" if meaning.bits else "floating-point numbers",
        f"{meaning.num_hot} hot and {meaning.num_rest} rest",
        f"{how} of {strides}{widths}" + renumbered * f" after {meaning.multiplier} i + {meaning.shift}",
        pool,
    ]


def are_ranked(meaning: Tensor) -> list[bool]:
    """Which tables list their hot and cold ids."""
    return [bool(ranked) for ranked in meaning[:, Meaning._fields.index("ranked")].tolist()]


def ranks_in(tables: "StoredTables", meaning: Tensor, lists: Tensor) -> list[Ranks | None]:
    """The hot and cold ids of each table that is ``ranked`` in ``meaning``, from the concatenated ``lists``.

    Raises:
        ValueError: if these are not lists of such tables.
    """
    ranked = are_ranked(meaning)
    sizes = [list_sizes(spec) if flag else (0, 0) for spec, flag in zip(tables.specs, ranked, strict=True)]
    if lists.dim() != 1 or len(lists) != sum(map(sum, sizes)):
        raise ValueError(f"ranks ({list(lists.shape)}) must list {sum(map(sum, sizes))} ids")
    parts = iter(lists.split([size for pair in sizes for size in pair]))
    pairs = [Ranks(next(parts), next(parts)) for _ in sizes]
    ranks: list[Ranks | None] = []
    for pair, spec, flag in zip(pairs, tables.specs, ranked, strict=True):
        ranks.append((rank(pair, spec) if are_known(pair) else pair) if flag else None)
    return ranks
