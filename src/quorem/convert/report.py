"""What ``compress_`` and ``decompress_`` did, table by table."""

from dataclasses import dataclass, field

from ..paper.schemes import Scheme
from ..planner.budget import show_bytes
from ..planner.planned import aligned


@dataclass(frozen=True)
class Entry:
    """What was done with one table."""

    name: str  # of its module
    num_embeddings: int
    embedding_dim: int
    bytes_before: int  # 0 if an earlier module has the same weight
    bytes_after: int  # of what is stored instead, with layout, lists of ids and what kernels keep for these
    state_bytes: int  # of the optimizer's state for it afterwards
    scheme: Scheme | None  # None if it was left as it was
    why: str  # the reason for the scheme, or for leaving the table as it was


@dataclass
class Report:
    """What ``compress_`` or ``decompress_`` did. ``print`` shows it as a table.

    >>> from torch import nn
    >>> import quorem
    >>> model = nn.ModuleDict({"user": nn.Embedding(1000, 16), "day": nn.Embedding(7, 16)})
    >>> report = quorem.compress_(model, quorem.QR(4), threshold=100)
    >>> report.swapped, report.left
    (['user'], {'day': '7 ids are at most the threshold (100)'})
    """

    entries: list[Entry] = field(default_factory=list)
    # One sentence each. ``references``: references to replaced objects that were updated, and what else changed.
    # ``outdated``: what goes on using an old table; it is printed first.
    references: list[str] = field(default_factory=list)
    outdated: list[str] = field(default_factory=list)

    @property
    def bytes_before(self) -> int:
        """Bytes of all tables before."""
        return sum(entry.bytes_before for entry in self.entries)

    @property
    def bytes_after(self) -> int:
        """Bytes of all tables after, layouts included."""
        return sum(entry.bytes_after for entry in self.entries)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state for all tables after."""
        return sum(entry.state_bytes for entry in self.entries)

    @property
    def swapped(self) -> list[str]:
        """Names of the modules that were replaced."""
        return [entry.name for entry in self.entries if entry.scheme is not None]

    @property
    def left(self) -> dict[str, str]:
        """Names of the modules that were left as they were, with the reason."""
        return {entry.name: entry.why for entry in self.entries if entry.scheme is None}

    def __str__(self) -> str:
        rows = [("table", "ids", "D", "before", "after", "state", "stored as", "why")]
        for entry in self.entries:
            size = (entry.name, f"{entry.num_embeddings:,}", str(entry.embedding_dim))
            stored = "as it was" if entry.scheme is None else repr(entry.scheme)
            rows.append((*size, *_bytes_of(entry), stored, entry.why))
        rows.append(("total", "", "", *_bytes_of(self), "", ""))
        return "\n".join([*self.outdated, aligned(rows), *self.references])


def _bytes_of(entry: Entry | Report) -> tuple[str, str, str]:
    return show_bytes(entry.bytes_before), show_bytes(entry.bytes_after), show_bytes(entry.state_bytes)
