"""A plan: a scheme for each table, with the bytes that it will take; as JSON, and as a table for the terminal."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from ..checks import FLOAT_DTYPES, check_int, check_unique, dtype_name
from ..files import atomic as files
from ..files.checked_json import build
from ..modules.collection import Table
from ..optimizer_names import Optimizer, StateDtype
from ..paper import schemes
from ..paper.schemes import Full, HotCold, Scheme
from ..paper.schemes.frequency import Ranking
from .budget import show_bytes

FORMAT = "quorem-plan"
SHARED = "layouts, scales, other state"


@dataclass(frozen=True, kw_only=True)
class PlannedTable:
    """One table of a plan."""

    name: str  # the path of its module, or the name of a ``quorem.Table``
    num_embeddings: int
    embedding_dim: int
    scheme: Scheme  # how it is to be stored
    dtype: torch.dtype  # of its rows
    bytes_before: int  # before planning, without an optimizer's state
    bytes: int  # of its rows and lists of ids
    state_bytes: int  # that the optimizer keeps for it
    cost: float  # share of its visits that go to ids which share a row, weighted: see ``Plan.cost``
    why: str  # the reason for the scheme
    visits: float = 0.0  # how often its ids occur in all, where they are counted
    traffic: tuple[float, float, float] | None = None  # shares of the visits that go to hot, cold and rest ids
    ranked: bool = False  # whether it stores lists of ids, made from frequencies: its ids are not in order of these

    def __post_init__(self) -> None:
        """Check what a table is made from, which may come from a file."""
        for name in ("num_embeddings", "embedding_dim"):
            check_int(name, getattr(self, name), 1)
        self.scheme.spec(self.num_embeddings, self.embedding_dim)


@dataclass(frozen=True, kw_only=True)
class PlannedPool:
    """The rows that cold ids of several tables share."""

    name: str
    tables: tuple[str, ...]  # names of the tables that share it
    width: int  # of its rows
    num_rows: int
    num_ids: int  # cold ids of all its tables
    bytes: int  # of its rows
    state_bytes: int  # that the optimizer keeps for it
    traffic: float  # share of all traffic that goes to its ids


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Mapping[str, Scheme]):
    """A mapping of table name to scheme; ``print`` shows what each table gets, and why.

    Args:
        tables: the planned tables, in the order of the model.
        budget: the budget in bytes.
        optimizer: the optimizer whose state counts; None for none.
        state_dtype: dtype of its state for rows (``quorem.optim.Adagrad(..., state_dtype=...)``).
        shared_bytes: bytes that belong to no single table: the integers of layouts.
        shared_state_bytes: bytes of the optimizer's state that belong to no single table.
        index_bytes: the most bytes of indices over lists of ids, which a device makes at the first lookup.
        pools: the pools of rows that tables share.
        bits: bits of a number after training, where ``quantize_`` is to store rows so; None keeps the tables' dtype.

    >>> import quorem
    >>> plan = quorem.plan([quorem.Table("user", 100_000, 16)], "2MB")
    >>> list(plan), plan.budget
    (['user'], 2000000)
    """

    tables: tuple[PlannedTable, ...]
    budget: int
    optimizer: Optimizer | None
    state_dtype: StateDtype = "float32"
    shared_bytes: int = 0
    shared_state_bytes: int = 0
    index_bytes: int = 0
    pools: tuple[PlannedPool, ...] = ()
    bits: Literal[8, 4] | None = None

    def __post_init__(self) -> None:
        """Check what types do not say of a plan from a file."""
        check_unique("names", [table.name for table in self.tables])
        check_int("budget", self.budget, 1)

    @cached_property
    def _by_name(self) -> dict[str, PlannedTable]:
        return {table.name: table for table in self.tables}

    @property
    def bytes(self) -> int:
        """All bytes that will be allocated: tables, pools, lists of ids, layouts and the optimizer's state."""
        rows = sum(table.bytes for table in self.tables) + sum(pool.bytes for pool in self.pools)
        return rows + self.shared_bytes + self.index_bytes + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        rows = sum(table.state_bytes for table in self.tables) + sum(pool.state_bytes for pool in self.pools)
        return rows + self.shared_state_bytes

    @property
    def cost(self) -> float:
        """The expected loss, as the share of all visits that go to ids which share a row; 0 if every id has its own.

        It is the mean of the tables' costs, each of which is weighted by the table's visits over those of the average
        table. Where ids are not counted, all are taken to be visited equally often.
        """
        return sum(table.cost for table in self.tables) / max(len(self.tables), 1)

    @property
    def traffic(self) -> tuple[float, float, float]:
        """Shares of all traffic that go to hot, cold and rest ids, where ids are counted."""
        counted = [(table.traffic, table.visits) for table in self.tables if table.traffic is not None]
        total = sum(visits for _, visits in counted) or 1.0
        hot, cold, rest = (sum(shares[k] * visits for shares, visits in counted) / total for k in range(3))
        return (hot, cold, rest)

    def __getitem__(self, name: str) -> Scheme:
        return self._by_name[name].scheme

    def __iter__(self) -> Iterator[str]:
        return (table.name for table in self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def __repr__(self) -> str:
        compressed = sum(not isinstance(table.scheme, Full) for table in self.tables)
        size = f"{show_bytes(self.bytes)} of {show_bytes(self.budget)}"
        return f"Plan({len(self)} tables, {compressed} of them compressed, {size})"

    def __str__(self) -> str:
        counted = any(table.traffic for table in self.tables)
        about = ["hot", "cold", "rest", "hot %", "cold %", "rest %"] if counted else ["D"]
        rows = [["table", "ids", *about, "before", "after", "state", "stored as" if counted else "scheme"]]
        for table in self.tables:
            dtype = "" if table.dtype == torch.float32 else dtype_name(table.dtype)
            if counted:
                scheme, n = table.scheme, table.num_embeddings
                hot, rest = (scheme.num_hot, scheme.num_rest) if isinstance(scheme, HotCold) else (n, 0)
                about = [*(f"{x:,}" for x in (hot, n - hot - rest, rest)), *map(_percent, table.traffic or (0, 0, 0))]
                how = ["full"] * (table.scheme == Full()) + ["lists its hot and cold ids"] * table.ranked
                how += [f"rows of {table.scheme.width} numbers"] if table.scheme.width else []
            else:
                about, how = [str(table.embedding_dim)], [repr(table.scheme), table.why]
            sizes = [show_bytes(size) for size in (table.bytes_before, table.bytes, table.state_bytes)]
            size = (table.name, f"{table.num_embeddings:,}", *about)
            rows.append([*size, *sizes, ", ".join(filter(None, [*how, dtype]))])
        for pool in self.pools:
            use = f"{pool.num_rows:,} rows, of which each of these ids sums two"
            about = ["", f"{pool.num_ids:,}", "", "", _percent(pool.traffic), ""]
            rows.append([f"({pool.name})", "", *about, "", show_bytes(pool.bytes), show_bytes(pool.state_bytes), use])
        blank = [""] * len(about)
        shared = [show_bytes(self.shared_bytes), show_bytes(self.shared_state_bytes)]
        rows.append(["(shared)", "", *blank, "", *shared, SHARED])
        total = [sum(t.bytes_before for t in self.tables), self.bytes - self.state_bytes, self.state_bytes]
        whole = f"together {show_bytes(self.bytes)} of {show_bytes(self.budget)}"
        whole += ", every table is full" * all(table.scheme == Full() for table in self.tables)
        whole += "" if self.state_dtype == "float32" else f", with the state in {self.state_dtype}"
        whole += f", once rows are stored in {self.bits} bits" if self.bits else ""
        about = ["", "", "", *map(_percent, self.traffic)] if counted else blank
        ids = sum(table.num_embeddings for table in self.tables)
        rows.append(["total", f"{ids:,}", *about, *map(show_bytes, total), whole])
        return aligned(rows)

    def applied_to(self, tables: Sequence[Table]) -> list[Table]:
        """The tables with their planned schemes; they keep ``frequencies`` only where lists of ids are needed.

        Where these are needed and a table has none, its lists come from the ``state_dict`` that is loaded.

        Raises:
            ValueError: if a table is not in the plan, or has other sizes there.

        >>> import torch, quorem
        >>> counts = torch.tensor([900, 800] + [3] * 2000 + [0] * 8000)
        >>> tables = [quorem.Table("user", 10_002, 16, frequencies=counts)]
        >>> quorem.plan(tables, "100kB").applied_to(tables)[0].scheme
        HotCold(num_hot=...)
        """
        applied = []
        for table in tables:
            planned = self._by_name.get(table.name)
            size = (table.num_embeddings, table.embedding_dim)
            if planned is None or size != (planned.num_embeddings, planned.embedding_dim):
                raise ValueError(f"plan must have table {table.name!r} with {size[0]} ids of width {size[1]}")
            given: Ranking = "loaded" if table.frequencies is None else table.frequencies
            frequencies = given if planned.ranked else None
            spec = planned.scheme.spec(*size)
            # No id is cold, so an unknown id is treated as one that was hardly ever seen.
            unknown = "rest" if table.unknown == "hash" and spec.num_rest and not spec.num_composed else table.unknown
            applied.append(replace(table, scheme=planned.scheme, frequencies=frequencies, unknown=unknown))
        return applied

    def to_json(self) -> str:
        """The plan as JSON text, with a checksum."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["pools"] = [vars(pool) for pool in self.pools]
        values["tables"] = [
            {**vars(table), "scheme": schemes.to_dict(table.scheme), "dtype": dtype_name(table.dtype)}
            for table in self.tables
        ]
        return json.dumps(files.sealed({"format": FORMAT, "version": 1, **values}), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that ``to_json`` wrote. Text that was edited must have no ``checksum``.

        Raises:
            ValueError: if the text is not a plan, or differs from its checksum.

        >>> from quorem import Table, plan
        >>> wished = plan([Table("user", 1_000_000, 16), Table("day", 7, 16)], "16MB")
        >>> Plan.from_json(wished.to_json()) == wished
        True
        """
        try:
            options = files.unsealed(json.loads(text))
            if options.pop("format", None) != FORMAT or options.pop("version", None) != 1:
                raise ValueError(f"it must be an object of format {FORMAT!r}, version 1")
            return build(cls, options, converters={Scheme: schemes.from_dict, torch.dtype: _row_dtype})
        except (ValueError, RecursionError) as error:
            hint = "; if you edited it, remove its checksum" * ("its checksum" in str(error))
            raise ValueError(f"plan JSON ({text[:40]!r}...) is not a plan: {error}{hint}") from None


class Candidate(NamedTuple):
    """A plan, and what is needed to compare it with others."""

    plan: Plan | None  # None if the budget is too small
    least: int  # bytes of the smallest possible budget
    gives_rows_to_all: bool = False  # whether each id that is known to count has a row of its own
    shared: float = 0.0  # share of the traffic that goes to ids without rows of their own; the rest's counts more


def _row_dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in FLOAT_DTYPES:
        raise ValueError(f"{name!r} must be one of {', '.join(map(repr, FLOAT_DTYPES))}")
    return FLOAT_DTYPES[name]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines with aligned columns; columns of numbers are aligned to the right."""
    columns = list(zip(*rows, strict=True))
    is_number = [j > 0 and any(cell[:1].isdigit() for cell in column) for j, column in enumerate(columns[:-1])]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in rows:
        cells = zip(row, widths, [*is_number, False], strict=True)
        lines.append("  ".join(cell.rjust(width) if number else cell.ljust(width) for cell, width, number in cells))
    return "\n".join(line.rstrip() for line in lines)
