"""What ``compress_`` and ``decompress_`` did, table by table."""

from dataclasses import dataclass, field

from ..paper.schemes import Scheme
from ..planner.budget import show_bytes
from ..planner.printed import aligned


@dataclass(frozen=True)
class Entry:
    """What was done with one table.

    Args:
        name: name of its module.
        num_embeddings: number of ids.
        embedding_dim: width of its vectors.
        bytes_before: bytes of the table; 0 if an earlier module has the same weight.
        bytes_after: bytes of what is stored instead, with layout, lists of ids and what kernels keep for these.
        state_bytes: bytes of the optimizer's state for it afterwards.
        scheme: how it is stored; None if it was left as it was.
        why: the reason for the scheme, or for leaving the table as it was.

    >>> from torch import nn
    >>> import quorem
    >>> entry = quorem.compress_(nn.Sequential(nn.Embedding(1000, 16)), quorem.QR(4)).entries[0]
    >>> entry.name, entry.scheme, entry.bytes_after < entry.bytes_before
    ('0', QR(num_collisions=4), True)
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    bytes_before: int
    bytes_after: int
    state_bytes: int
    scheme: Scheme | None
    why: str

    def cells(self) -> tuple[str, ...]:
        """A row of the report."""
        sizes = [show_bytes(size) for size in (self.bytes_before, self.bytes_after, self.state_bytes)]
        stored = "as it was" if self.scheme is None else repr(self.scheme)
        return self.name, f"{self.num_embeddings:,}", str(self.embedding_dim), *sizes, stored, self.why


@dataclass
class Report:
    """What ``compress_`` or ``decompress_`` did. ``print`` shows it as a table.

    Args:
        entries: what was done with each table.
        references: other references to replaced objects that were updated, and what else changed, one sentence each.
        outdated: what goes on using an old table, one sentence each; printed first.

    >>> from torch import nn
    >>> import quorem
    >>> model = nn.ModuleDict({"user": nn.Embedding(1000, 16), "day": nn.Embedding(7, 16)})
    >>> report = quorem.compress_(model, quorem.QR(4), threshold=100)
    >>> report.swapped, report.left
    (['user'], {'day': '7 ids are at most the threshold (100)'})
    """

    entries: list[Entry] = field(default_factory=list)
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
        head = ("table", "ids", "D", "before", "after", "state", "stored as", "why")
        total = (show_bytes(self.bytes_before), show_bytes(self.bytes_after), show_bytes(self.state_bytes))
        rows = [head, *(entry.cells() for entry in self.entries), ("total", "", "", *total, "", "")]
        return "\n".join([*self.outdated, aligned(rows), *self.references])
