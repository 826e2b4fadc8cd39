"""What the rows of a module mean, as integers: a buffer that is saved with the rows and compared when they are loaded.

Tables of equal shapes may differ in partitions, operation or order, and then the same rows give other vectors.
"""

import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..paper.partitions import Partition
from ..paper.schemes import TableSpec
from ..paper.schemes.frequency import Ranks, are_known, list_sizes, rank
from .path_networks import path_scheme

if TYPE_CHECKING:
    from .storage import StoredTables

# How the rows of an id become its vector; the position is what is saved.
HOW = ("one row", "add", "mult", "concat", "feature", "relu path", "sigmoid path", "sums")
BITS, RAW_IDS, RANKED = 4, 8, 9  # where the kind has bits per number (0 for floats) and two flags; ``HOW`` comes first


class Meaning(NamedTuple):
    """What the rows of one table mean, in integers that take few bytes, or in words."""

    name: Any  # of this, the sizes and the partitions 31 bits of a CRC
    kind: Any
    sizes: Any
    partitions: Any


COLUMNS = len(Meaning._fields)


def meaning_of(tables: "StoredTables") -> Tensor:
    """The meaning of each table's rows, ``[T, 4]``, int32."""
    rows = [_meaning(tables, t, ranks is not None)[0] for t, ranks in enumerate(tables._ranks)]
    return torch.tensor(rows, dtype=torch.int32, device="cpu")


def _meaning(tables: "StoredTables", t: int, ranked: bool) -> tuple[Meaning, Meaning]:
    """The meaning of one table, whose ids are ``ranked`` by lists or not, in integers and in words."""
    name, spec, pool = tables.names[t], tables.specs[t], tables.pool_of(t)
    kind = HOW.index(_how(spec)) | tables.bits << BITS | tables.raw_ids[t] << RAW_IDS | ranked << RANKED
    sizes = [spec.num_embeddings, spec.embedding_dim, spec.width, spec.num_hot, spec.num_rest]
    widths = [width for _, width in spec.shapes[spec.num_own > 0 :]]
    widths += [0] * (len(spec.partitions) - len(widths))  # levels of networks have no rows
    partitions: list[int] = []
    for part, width in zip(spec.partitions, widths, strict=True):
        stride = part.stride if isinstance(part, Partition) else -_crc31(part.index.numpy().tobytes())
        partitions += (stride, part.size, width)
    if pool is None:
        partitions.append(0)
    else:
        position = [*tables.pools.values()].index(pool) + 1
        partitions += (position, pool.offsets[t], pool.mixing.bits, *(extent.rows for extent in pool.extents))
    words = Meaning(
        f"the rows of {name!r}",
        _kind_words(kind),
        "{} ids of {} numbers in rows of {}, {} hot and {} rest".format(*sizes),
        f"the partitions of {spec.scheme}" + (f" from number {pool.offsets[t]} of its pool" if pool else ""),
    )
    crcs = [_crc31(",".join(map(str, integers)).encode()) for integers in (sizes, partitions)]
    return Meaning(_crc31(name.encode()), kind, *crcs), words


def _how(spec: TableSpec) -> str:
    """How the rows of an id become its vector: one of ``HOW``."""
    if scheme := path_scheme(spec):
        return f"{scheme.activation} path"
    if spec.pool is not None:
        return "sums"
    return spec.operation if len(spec.partitions) > 1 else "one row"


def _kind_words(kind: int) -> str:
    how, bits = kind & 15, kind >> BITS & 15
    numbers = f"numbers of {bits} bits" if bits else "floating-point numbers"
    ids = "raw ids" if kind >> RAW_IDS & 1 else "ids"
    return f"{HOW[how] if how < len(HOW) else how} of {numbers} for {ids}"


def _crc31(data: bytes) -> int:
    """31 bits of the CRC-32, which fit in an int32."""
    return zlib.crc32(data) & 0x7FFFFFFF


def differences(tables: "StoredTables", saved: Any, prefix: str = "") -> list[str]:
    """An error message for each table whose rows mean something else in a checkpoint; lists of ids may differ."""
    if not isinstance(saved, Tensor) or saved.dtype != torch.int32 or saved.dim() != 2 or saved.shape[1] != COLUMNS:
        return [f"{prefix}meaning must be int32 [tables, {COLUMNS}], as a quorem module saves it"]
    if len(saved) != len(tables.names):
        return [f"{prefix}stored holds {len(saved)} tables in the checkpoint and {len(tables.names)} here"]
    names = {_crc31(name.encode()): f"the rows of {name!r}" for name in tables.names}
    wrong = []
    for t, (name, row, ranked) in enumerate(zip(tables.names, saved.tolist(), are_ranked(saved), strict=True)):
        (ours, here), theirs = _meaning(tables, t, ranked), Meaning(*row)
        their_rows = names.get(theirs.name, "the rows of another table")
        there = Meaning(their_rows, _kind_words(theirs.kind), "other sizes", "other partitions")
        if changed := [i for i in range(COLUMNS) if theirs[i] != ours[i]]:
            their_words, our_words = (", ".join(words[i] for i in changed) for words in (there, here))
            title = f"{prefix}stored: table{f' {name!r}' if name else ''}"
            wrong.append(f"{title} holds {their_words} in the checkpoint and {our_words} here")
    return wrong


def are_ranked(meaning: Tensor) -> list[bool]:
    """Which tables list their hot and cold ids."""
    return [bool(kind >> RANKED & 1) for kind in meaning[:, 1].tolist()]


def ranks_in(tables: "StoredTables", meaning: Tensor, lists: Tensor) -> list[Ranks | None]:
    """The hot and cold ids of each table that is ``ranked`` in ``meaning``, from the concatenated ``lists``."""
    ranked = are_ranked(meaning)
    sizes = [list_sizes(spec) if flag else (0, 0) for spec, flag in zip(tables.specs, ranked, strict=True)]
    if lists.dim() != 1 or len(lists) != sum(map(sum, sizes)):
        hint = "make the module with frequencies, or 'loaded', if its ids were ranked by them"
        raise ValueError(f"ranks ({list(lists.shape)}) must list {sum(map(sum, sizes))} ids: {hint}")
    parts = iter(lists.split([size for pair in sizes for size in pair]))
    pairs = [Ranks(next(parts), next(parts)) for _ in sizes]
    ranks: list[Ranks | None] = []
    for pair, spec, flag in zip(pairs, tables.specs, ranked, strict=True):
        ranks.append((rank(pair, spec) if are_known(pair) else pair) if flag else None)
    return ranks
