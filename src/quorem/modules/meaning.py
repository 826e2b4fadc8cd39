"""What the rows of a module mean, as integers: a buffer that is saved with the rows and compared when they are loaded.

Tables of equal shapes may differ in partitions, operation or order, and then the same rows give other vectors.
"""

import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..paper.partitions import Partition
from ..paper.schemes import TableSpec
from ..paper.schemes.frequency import Ranks, are_known, check_ranks, list_sizes
from .path_networks import path_scheme

if TYPE_CHECKING:
    from .storage import StoredTables

# How the rows of an id become its vector; the position is what is saved.
HOW = ("one row", "add", "mult", "concat", "feature", "relu path", "sigmoid path", "sums")
BITS, RAW_IDS, RANKED = 4, 8, 9  # where the kind has bits per number (0 for floats) and two flags; ``HOW`` comes first
COLUMNS = 4  # name, kind, sizes and partitions of a table; of all but the kind 31 bits of a CRC


def meaning_of(tables: "StoredTables") -> Tensor:
    """The meaning of each table's rows, ``[T, 4]``, int32."""
    rows = [[number for number, _ in _meaning(tables, t, ranks is not None)] for t, ranks in enumerate(tables._ranks)]
    return torch.tensor(rows, dtype=torch.int32, device="cpu")


def _meaning(tables: "StoredTables", t: int, ranked: bool) -> list[tuple[int, str]]:
    """The columns of one table, whose ids are ``ranked`` by lists or not, each as an integer and in words."""
    name, spec, pool = tables.names[t], tables.specs[t], tables.pool_of(t)
    kind = HOW.index(_how(spec)) | tables.bits << BITS | tables.raw_ids[t] << RAW_IDS | ranked << RANKED
    sizes = [spec.num_embeddings, spec.embedding_dim, spec.width, spec.num_hot, spec.num_rest]
    widths = [width for _, width in spec.shapes[spec.num_own > 0 :]]
    widths += [0] * (len(spec.partitions) - len(widths))  # levels of networks have no rows
    partitions: list[int] = []
    for part, width in zip(spec.partitions, widths, strict=True):
        stride = part.stride if isinstance(part, Partition) else -_crc31(part.index.numpy().tobytes())
        partitions += (stride, part.size, width)
    partitions_in_words = f"the partitions of {spec.scheme}"
    if pool is None:
        partitions.append(0)
    else:
        position = [*tables.pools.values()].index(pool) + 1
        partitions += (position, pool.offsets[t], pool.mixing.bits, *(extent.rows for extent in pool.extents))
        partitions_in_words += f" from number {pool.offsets[t]} of its pool"
    crcs = [_crc31(",".join(map(str, integers)).encode()) for integers in (sizes, partitions)]
    return [
        (_crc31(name.encode()), f"the rows of {name!r}"),
        (kind, _kind_words(kind)),
        (crcs[0], "{} ids of {} numbers in rows of {}, {} hot and {} rest".format(*sizes)),
        (crcs[1], partitions_in_words),
    ]


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
    known = {_crc31(name.encode()): f"the rows of {name!r}" for name in tables.names}
    wrong = []
    for t, (name, theirs, ranked) in enumerate(zip(tables.names, saved.tolist(), are_ranked(saved), strict=True)):
        their_name, kind, *_ = theirs
        their_rows = known.get(their_name, "the rows of another table")
        there = (their_rows, _kind_words(kind), "other sizes", "other partitions")
        numbers, here = zip(*_meaning(tables, t, ranked), strict=True)
        if changed := [i for i in range(COLUMNS) if theirs[i] != numbers[i]]:
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
    sizes = [size for spec, flag in zip(tables.specs, ranked, strict=True) if flag for size in list_sizes(spec)]
    if lists.dim() != 1 or len(lists) != sum(sizes):
        hint = "make the module with frequencies, or 'loaded', if its ids were ranked by them"
        raise ValueError(f"ranks ({list(lists.shape)}) must list {sum(sizes)} ids: {hint}")
    parts, ranks = iter(lists.split(sizes)), list[Ranks | None]()
    for spec, flag in zip(tables.specs, ranked, strict=True):
        pair = Ranks(next(parts), next(parts)) if flag else None
        ranks.append(check_ranks(pair, spec.num_embeddings) if pair and are_known(pair) else pair)
    return ranks
