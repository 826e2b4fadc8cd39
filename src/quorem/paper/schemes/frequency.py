"""Schemes that use frequencies: hot ids have rows of their own, cold ids are composed, the rest share one row.

The paper's partitions treat all ids alike, but in a click log some ids are far more frequent than others. Ranked by
frequency, the ids of a table fall into three ranges, which two integers describe:

    rank   0 ........ num_hot .................. n - num_rest ........ n
             hot: own row       cold: composed            rest: one row for all
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...checks import check_int, check_options
from ..hashing import as_int64, mixed_ids
from ..renumbering import Mixing
from ..sizes import coprime_sizes, coprime_sizes_for_rows
from .scheme import Scheme, TableSpec


@dataclass(frozen=True)
class Pool:
    """Rows that the cold ids of several tables share; the vector of a cold id is the sum of ``num_partitions`` rows.

    The cold ids of all tables are numbered, the numbers are mixed, and partitioned by Chinese remainders: each cold id
    has a combination of rows of its own (section 3.1). There is a pool of ``num_rows`` rows for each width of tables.

    Args:
        num_rows: number of rows of the pool, over all its partitions.
        num_partitions: number of rows that are summed for a cold id.
        operation: must be ``"add"``, which any engine with plain embedding bags can run.
        name: tables whose pools have the same name and options share the rows.

    >>> Pool(1000).sizes(10_000)
    (501, 499)
    """

    num_rows: int
    num_partitions: int = 2
    operation: Literal["add"] = "add"
    name: str = "pool"

    def __post_init__(self) -> None:
        check_options(self)
        check_int("num_rows", self.num_rows, self.num_partitions)
        if not self.name or set(self.name) & set(".\n"):
            raise ValueError(f"name ({self.name!r}) must be a string of one line without dots that is not empty")

    def sizes(self, num_cold: int) -> tuple[int, ...]:
        """Rows of each partition, with which each of ``num_cold`` cold ids has a combination of its own."""
        space = 2 ** Mixing.covering(num_cold).bits
        sizes = coprime_sizes_for_rows(self.num_rows, self.num_partitions)
        if math.prod(sizes) < space:
            least = sum(coprime_sizes(space, self.num_partitions))
            raise ValueError(
                f"num_rows ({self.num_rows}) of pool {self.name!r} must be at least {least}"
                f" for {num_cold} cold ids in {self.num_partitions} partitions"
            )
        return sizes


@dataclass(frozen=True, repr=False)
class HotCold(Scheme):
    """Hot ids have rows of their own, cold ids are composed, and one row stands for all the rest.

    Either ids are in order of frequency (``quorem prepare --ids frequency``), or the module is given ``frequencies``,
    and stores lists of the hot and cold ids.

    Args:
        num_hot: number of ids with rows of their own, the most frequent.
        cold: how the cold ids are stored: a scheme, or a ``Pool`` that several tables share.
        num_rest: number of ids that share one row, the least frequent.
        force: store the table this way even where that does not shrink it; else it stays full.
        width: width of stored rows, which a learned matrix ``[width, D]`` turns into vectors; None for rows of width D.

    >>> HotCold(100, cold=Pool(64), num_rest=500).spec(1000, 16).shapes
    ((101, 16),)
    """

    num_hot: int = field(metadata={"low": 0})
    cold: Scheme | Pool
    num_rest: int = field(default=0, metadata={"low": 0})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.cold, Scheme | Pool):
            raise TypeError(f"cold ({self.cold!r}) must be a Scheme or a Pool")
        if isinstance(self.cold, HotCold):
            raise ValueError(f"cold ({self.cold!r}) must not be a HotCold itself")
        if getattr(self.cold, "width", None) is not None:
            raise ValueError(f"width of cold ({self.cold!r}) must be None: all rows have the width of HotCold")
        if getattr(self.cold, "operation", "add") == "feature":
            raise ValueError("operation ('feature') of cold must be 'add', 'mult' or 'concat': hot ids have one vector")

    def _spec(self, n: int, d: int) -> TableSpec:
        if self.num_hot + self.num_rest > n:
            raise ValueError(
                f"num_hot ({self.num_hot}) + num_rest ({self.num_rest}) must be at most num_embeddings ({n})"
            )
        num_cold = n - self.num_hot - self.num_rest
        num_own = self.num_hot + (self.num_rest > 0)
        own = ((num_own, d),) if num_own else ()
        spec = TableSpec(n, d, self, (), own, "add", num_hot=self.num_hot, num_rest=self.num_rest)
        if not num_cold:
            return spec
        if isinstance(self.cold, Pool):
            return replace(spec, pool=self.cold)
        cold = replace(self.cold, force=True, width=self.width)._spec(num_cold, d)
        return replace(
            spec, partitions=cold.partitions, shapes=own + cold.shapes, operation=cold.operation, hidden=cold.hidden
        )


class Ranks(NamedTuple):
    """Which ids of a table are hot and which are cold; all others are the rest.

    Attributes:
        hot: ids with rows of their own, int32 or int64 ``[num_hot]``, rising.
        cold: composed ids, rising; empty if there is no rest, since then every id that is not hot is cold.

    >>> from quorem import HotCold, QR, Table
    >>> hot = torch.tensor([7, 12])
    >>> table = Table("user", 1000, 16, HotCold(2, cold=QR(4)), frequencies=Ranks(hot, hot[:0]))
    """

    hot: Tensor
    cold: Tensor


class RawCounts(NamedTuple):
    """How often each raw id occurs in training; ids that are not listed do not occur.

    Attributes:
        ids: raw ids, int64 or uint64 ``[N]``, in any order, each once or several times.
        counts: how often each of ``ids`` occurs, ``[N]``.

    >>> from quorem import HotCold, QR, Table
    >>> seen = RawCounts(torch.tensor([2**50, -3]), torch.tensor([90, 10]))
    >>> table = Table("user", 2**40, 16, HotCold(1, cold=QR(2**20)), frequencies=seen, raw_ids=True)
    """

    ids: Tensor
    counts: Tensor


Ranking = Tensor | Ranks | RawCounts | Literal["loaded"]  # what ids are ranked by


def list_sizes(spec: TableSpec) -> tuple[int, int]:
    """Lengths of the lists of hot and cold ids; without a rest, every id that is not hot is cold."""
    return spec.num_hot, spec.num_composed if spec.num_rest else 0


def are_known(ranks: Ranks) -> bool:
    """Whether the lists hold ids; those that are to be ``"loaded"`` hold -1."""
    return not any(len(ids) and int(ids[0]) < 0 for ids in ranks)


def rank(frequencies: Ranking, spec: TableSpec) -> Ranks:
    """The hot and cold ids of a ``HotCold`` table, by falling frequency; of equally frequent ids the lower comes first.

    ``frequencies`` are as ``check_ranking`` gives them. The counts of raw ids that map to one id of the table are
    added. ``"loaded"`` gives lists of -1, in the place of those that a ``state_dict`` will bring.

    >>> from quorem import Full
    >>> spec = HotCold(1, cold=Full(), num_rest=2).spec(5, 4)
    >>> rank(torch.tensor([3, 0, 9, 0, 5]), spec)
    Ranks(hot=tensor([2], dtype=torch.int32), cold=tensor([0, 4], dtype=torch.int32))
    """
    n, sizes = spec.num_embeddings, list_sizes(spec)
    num_ranked = sum(sizes)
    if isinstance(frequencies, str):
        return Ranks(*(torch.full((size,), -1, dtype=_id_dtype(n), device="cpu") for size in sizes))
    if isinstance(frequencies, Ranks):
        if (len(frequencies.hot), len(frequencies.cold)) != sizes:
            got = f"{len(frequencies.hot)} hot and {len(frequencies.cold)} cold ids"
            raise ValueError(f"frequencies lists {got} but must list {sizes[0]} and {sizes[1]}")
        return frequencies
    if isinstance(frequencies, RawCounts):
        ids, counts = counts_by_id(frequencies, n)
        if len(ids) < num_ranked:
            raise ValueError(f"frequencies lists {len(ids)} ids but must list at least {num_ranked}, those ranked")
        order = ids[torch.argsort(counts, descending=True, stable=True)]
    else:
        order = torch.argsort(frequencies, descending=True, stable=True)
    return Ranks(*(ids.sort().values.to(_id_dtype(n)) for ids in order[:num_ranked].split(sizes)))


def _id_dtype(n: int) -> torch.dtype:
    return torch.int32 if n < 2**31 else torch.int64


def comes_by_frequency(frequencies: Tensor) -> bool:
    """Whether ids are in order of frequency, so that a rank is the id itself and no list of ids is needed.

    The first two ids may have any frequency: prepared data reserve them for missing and unknown values.

    >>> comes_by_frequency(torch.tensor([0, 2, 9, 5, 5, 0])), comes_by_frequency(torch.tensor([0, 2, 5, 9]))
    (True, False)
    """
    return bool((frequencies[3:] <= frequencies[2:-1]).all())


def places(spec: TableSpec, ranks: Ranks | None) -> Tensor:
    """The place of each id of a table: hot ids first, then the rest in one place, then the cold ids; ``[n]``.

    >>> from quorem import Full
    >>> places(HotCold(2, cold=Full(), num_rest=2).spec(6, 4), None)
    tensor([0, 1, 3, 4, 2, 2])
    """
    ids = torch.arange(spec.num_embeddings, device="cpu")
    place = torch.full_like(ids, spec.num_hot)
    hot = ids[: spec.num_hot] if ranks is None else ranks.hot.cpu().long()
    place[hot] = ids[: spec.num_hot]
    cold = ids[: spec.num_composed]
    place[cold_ids(cold, spec, ranks)] = spec.num_own + cold
    return place


def cold_ids(nth: Tensor, spec: TableSpec, ranks: Ranks | None) -> Tensor:
    """The ``nth`` composed ids of a table, counted from 0: the inverse of ``places``, without the ids of all places."""
    if ranks is None:
        return nth + spec.num_hot
    if spec.num_rest:
        return ranks.cold.to(nth.device).long()[nth]
    hot = ranks.hot.to(nth.device).long()
    cold_below = hot - torch.arange(len(hot), device=nth.device)  # for each hot id, how many cold ids are below it
    return nth + torch.searchsorted(cold_below, nth, right=True)


def first_of_rest(spec: TableSpec, ranks: Ranks | None, count: int) -> Tensor:
    """The lowest ids of the rest, at most ``count``."""
    n = spec.num_embeddings
    if ranks is None:
        return torch.arange(n - spec.num_rest, min(n, n - spec.num_rest + count), device="cpu")
    ids = torch.arange(min(n, count + spec.num_hot + spec.num_composed), device="cpu")
    return ids[~torch.isin(ids, torch.cat([each.cpu().long() for each in ranks]))][:count]


def counts_by_id(frequencies: RawCounts, n: int) -> tuple[Tensor, Tensor]:
    """The ids in ``[0, n)`` that raw ids map to, rising, and how often each occurs."""
    ids, position = mixed_ids(frequencies.ids, n).unique(return_inverse=True)
    counts = frequencies.counts
    return ids, counts.new_zeros(len(ids)).index_add_(0, position, counts)


def check_ranking(frequencies: Any, n: int) -> Ranking:
    """Check ``frequencies`` ``[n]``, lists of hot and cold ids, or counts of raw ids, and move them to the CPU."""
    if isinstance(frequencies, str):
        if frequencies != "loaded":
            raise ValueError(f"frequencies ({frequencies!r}) must be 'loaded' or counts")
        return "loaded"
    if isinstance(frequencies, RawCounts):
        ids = as_int64(frequencies.ids).cpu()
        return RawCounts(ids, check_frequencies(frequencies.counts, len(ids), "frequencies.counts"))
    return check_ranks(frequencies, n) if isinstance(frequencies, Ranks) else check_frequencies(frequencies, n)


def check_frequencies(frequencies: Any, n: int, name: str = "frequencies") -> Tensor:
    """Check ``frequencies`` ``[n]``, and move it to the CPU."""
    if not isinstance(frequencies, Tensor):
        try:
            frequencies = torch.from_numpy(np.array(frequencies))
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{name} ({type(frequencies).__name__}) must be a tensor of numbers") from None
    if frequencies.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise TypeError(f"{name} ({frequencies.dtype}) must hold integers or floats")
    if frequencies.shape != (n,):
        raise ValueError(f"{name} has shape {tuple(frequencies.shape)} but must be [num_embeddings] ({n})")
    # Unsigned integers cannot be compared, and sums of narrow numbers overflow.
    wide = torch.promote_types(frequencies.dtype, torch.float32) if frequencies.is_floating_point() else torch.int64
    frequencies = frequencies.detach().to("cpu", wide)
    wrong = ~(frequencies >= 0) | (frequencies == torch.inf)
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ValueError(f"{name}[{i}] ({frequencies[i].item()}) must be at least 0 and finite")
    return frequencies


def check_ranks(ranks: Ranks, n: int) -> Ranks:
    """Check lists of hot and cold ids of a table of ``n`` ids, and copy them to the CPU."""
    for kind, ids in ranks._asdict().items():
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
            raise TypeError(f"frequencies.{kind} must be a 1-D tensor of int32 or int64")
        if len(ids) and (int(ids[0]) < 0 or int(ids[-1]) >= n or (ids.diff() <= 0).any()):
            raise ValueError(f"frequencies.{kind} must rise and lie in [0, {n})")
    if torch.isin(ranks.hot, ranks.cold, assume_unique=True).any():
        raise ValueError("frequencies must not list an id as hot and as cold")
    return Ranks(*(ids.detach().to("cpu", _id_dtype(n), copy=True) for ids in ranks))
