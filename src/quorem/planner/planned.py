"""A plan: a scheme for each table, with the bytes that it will take."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from .. import schemes
from ..checks import DTYPES, check_int
from ..schemes import Scheme
from .budget import show_bytes
from .footprint import Optimizer, check_optimizer

FORMAT = "quorem-plan"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True, kw_only=True)
class PlannedTable:
    """One table of a plan.

    Args:
        name: of the table: the path of its module, or the name of a ``quorem.Table``.
        num_embeddings: number of ids.
        embedding_dim: width that comes out.
        scheme: how it is to be stored.
        dtype: of its rows.
        bytes_before: of the table as it was planned from, without an optimizer's state.
        bytes: of its rows and maps.
        state_bytes: that the optimizer keeps for it.
        cost: share of the average table's traffic that goes to ids which share a row.
        why: the scheme was chosen.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    scheme: Scheme
    dtype: torch.dtype
    bytes_before: int
    bytes: int
    state_bytes: int
    cost: float
    why: str

    def __post_init__(self) -> None:
        """Check the fields, which may come from a file."""
        for name, kind in (("name", str), ("why", str), ("scheme", Scheme), ("dtype", torch.dtype)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} ({getattr(self, name)!r}) must be a {kind.__name__}")
        for name, least in (("num_embeddings", 1), ("embedding_dim", 1), ("bytes_before", 0)):
            check_int(name, getattr(self, name), least)
        for name in ("bytes", "state_bytes"):
            check_int(name, getattr(self, name), 0)
        if isinstance(self.cost, bool) or not isinstance(self.cost, int | float) or not 0 <= self.cost < float("inf"):
            raise ValueError(f"cost ({self.cost!r}) must be a number of at least 0")
        self.scheme.spec(self.num_embeddings, self.embedding_dim)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Mapping[str, Scheme]):
    """A mapping of table name to scheme; ``print`` shows what each table gets, and why.

    Args:
        tables: in the order of the model.
        budget: that was planned for, in bytes.
        optimizer: whose state counts; None for none.
        shared_bytes: that no single table accounts for: the integers of layouts.
        shared_state_bytes: likewise, of the optimizer's state.

    >>> import quorem
    >>> plan = quorem.plan([quorem.Table("user", 100_000, 16)], "2MB")
    >>> list(plan), plan.budget
    (['user'], 2000000)
    """

    tables: tuple[PlannedTable, ...]
    budget: int
    optimizer: Optimizer | None
    shared_bytes: int = 0
    shared_state_bytes: int = 0

    def __post_init__(self) -> None:
        """Check that names are unique and the optimizer is known."""
        names = [table.name for table in self.tables]
        if len(set(names)) < len(names):
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"names of tables ({', '.join(map(repr, repeated))}) must be unique")
        check_int("budget", self.budget, 1)
        check_optimizer(self.optimizer)
        for name in ("shared_bytes", "shared_state_bytes"):
            check_int(name, getattr(self, name), 0)
        object.__setattr__(self, "_by_name", {table.name: table for table in self.tables})

    @property
    def bytes(self) -> int:
        """Of all tables, with their maps, the layouts and the optimizer's state: what will be allocated."""
        return sum(table.bytes for table in self.tables) + self.shared_bytes + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Of the optimizer's state."""
        return sum(table.state_bytes for table in self.tables) + self.shared_state_bytes

    @property
    def cost(self) -> float:
        """Share of all traffic that goes to ids which share a row: what the plan is expected to lose, in no unit."""
        return sum(table.cost for table in self.tables) / max(len(self.tables), 1)

    def __getitem__(self, name: str) -> Scheme:
        table: PlannedTable = self._by_name[name]  # type: ignore[attr-defined]
        return table.scheme

    def __iter__(self) -> Iterator[str]:
        return (table.name for table in self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def __repr__(self) -> str:
        compressed = sum(not isinstance(table.scheme, schemes.Full) for table in self.tables)
        size = f"{show_bytes(self.bytes)} of {show_bytes(self.budget)}"
        return f"Plan({len(self)} tables, {compressed} of them compressed, {size})"

    def __str__(self) -> str:
        head = ("table", "ids", "D", "before", "after", "state", "scheme", "why")
        rows = [
            (
                table.name,
                f"{table.num_embeddings:,}",
                str(table.embedding_dim),
                show_bytes(table.bytes_before),
                show_bytes(table.bytes),
                show_bytes(table.state_bytes),
                repr(table.scheme) + ("" if table.dtype == torch.float32 else f", {_name_of(table.dtype)}"),
                table.why,
            )
            for table in self.tables
        ]
        if self.shared_bytes or self.shared_state_bytes:
            shared = (show_bytes(self.shared_bytes), show_bytes(self.shared_state_bytes))
            rows.append(("(shared)", "", "", "", *shared, "", "layouts, and what the optimizer keeps once"))
        before = sum(table.bytes_before for table in self.tables)
        after = self.bytes - self.state_bytes
        total = (show_bytes(before), show_bytes(after), show_bytes(self.state_bytes))
        rows.append(("total", "", "", *total, "", f"{show_bytes(self.bytes)} of {show_bytes(self.budget)}"))
        widths = [max(len(row[j]) for row in (head, *rows)) for j in range(len(head))]
        aligned = [
            "  ".join(
                cell.rjust(w) if 0 < j < 6 else cell.ljust(w)
                for j, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in (head, *rows)
        ]
        return "\n".join(line.rstrip() for line in aligned)

    def to_json(self) -> str:
        """The plan as JSON text."""
        tables = [
            {**vars(table), "scheme": json.loads(schemes.to_json(table.scheme)), "dtype": _name_of(table.dtype)}
            for table in self.tables
        ]
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tables"}
        return json.dumps({"format": FORMAT, "version": 1, **options, "tables": tables}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that ``to_json`` wrote.

        Raises:
            ValueError: if the text is not a plan.

        >>> from quorem import Table, plan
        >>> wished = plan([Table("user", 1_000_000, 16), Table("day", 7, 16)], "16MB")
        >>> Plan.from_json(wished.to_json()) == wished
        True
        """
        try:
            options = json.loads(text)
            if (
                not isinstance(options, dict)
                or options.pop("format", None) != FORMAT
                or options.pop("version", None) != 1
            ):
                raise ValueError(f"it must be an object of format {FORMAT!r}, version 1")
            tables = tuple(_table_from(entry) for entry in options.pop("tables"))
            return cls(tables=tables, **options)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"plan JSON ({text[:40]!r}...) is not a plan: {reason}") from None


def _table_from(entry: Any) -> PlannedTable:
    if not isinstance(entry, dict):
        raise TypeError(f"a table ({entry!r}) must be an object")
    scheme = schemes.from_json(json.dumps(entry["scheme"]))
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"dtype ({entry['dtype']!r}) must be one of {', '.join(map(repr, _DTYPES))}")
    return PlannedTable(**{**entry, "scheme": scheme, "dtype": _DTYPES[entry["dtype"]]})


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
