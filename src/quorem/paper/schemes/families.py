"""The paper's families of partitions as schemes (sections 2 to 4)."""

from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from typing import Literal

from ...checks import check_int
from .. import partitions as P
from ..operations import Operation
from ..sizes import balanced_sizes, ceil_div, coprime_sizes, coprime_sizes_for_rows
from .scheme import AnyPartition, Scheme

LargeTable = Literal["remainder", "quotient"]
Activation = Literal["relu", "sigmoid"]
_complementary = lru_cache(maxsize=64)(P.is_complementary)


@dataclass(frozen=True, repr=False)
class Hash(Scheme):
    """The hashing trick (algorithm 1): ``ceil(n / num_collisions)`` rows, shared by remainder.

    Args:
        num_collisions: ids that share a row.
        force: store the table this way even where that does not shrink it; else it stays full.
        width: width of stored rows, which a learned matrix ``[width, D]`` turns into vectors; None for rows of width D.

    >>> Hash(num_collisions=4).spec(1000, 16).shapes
    ((250, 16),)
    """

    num_collisions: int = 4

    def partitions_of(self, n: int) -> tuple[AnyPartition, ...]:
        """The remainder alone; not complementary."""
        return P.hashing(n, ceil_div(n, self.num_collisions))


@dataclass(frozen=True, repr=False)
class Composed(Scheme):
    """The options of the operation-based schemes (section 4); ``QR`` explains them."""

    _: KW_ONLY
    operation: Operation = "mult"
    dims: tuple[int, ...] | None = None


@dataclass(frozen=True, repr=False)
class QR(Composed):
    """The quotient-remainder trick (algorithm 2).

    Args:
        num_collisions: ids that share a row of the large table, which has ``ceil(n / num_collisions)`` rows.
        large: the partition with the large table: ``"remainder"`` (better where low ids are frequent) or
            ``"quotient"`` (as in the public reference code).
        operation: ``"mult"``, ``"add"``, ``"concat"``, or ``"feature"``, which keeps the rows of an id apart.
        dims: widths of the tables for ``"concat"``; if None, the width is split evenly.
        force: store the table this way even where that does not shrink it; else it stays full.
        width: width of stored rows, which a learned matrix ``[width, D]`` turns into vectors; None for rows of width D.

    >>> QR(num_collisions=4, operation="add").spec(1000, 16).shapes
    ((250, 16), (4, 16))
    """

    num_collisions: int = 4
    _: KW_ONLY
    large: LargeTable = "remainder"

    def partitions_of(self, n: int) -> tuple[AnyPartition, ...]:
        """Remainder, then quotient."""
        if self.large == "quotient":
            return P.quotient_remainder(n, min(self.num_collisions, n))
        return P.quotient_remainder(n, ceil_div(n, self.num_collisions))


@dataclass(frozen=True, repr=False)
class EqualTables(Composed):
    """The options of the schemes with several tables of about one size (section 3.1)."""

    num_partitions: int = 3
    _: KW_ONLY
    num_rows: int | None = None
    num_collisions: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_rows is not None:
            check_int("num_rows", self.num_rows, self.num_partitions)
            if self.num_collisions is not None:
                raise ValueError(f"num_collisions ({self.num_collisions}) must be None where num_rows is given")

    def rows_to_spend(self, n: int, fewest: int, tables: str) -> int | None:
        """Number of rows over all tables, or None for the fewest that cover ``n`` ids."""
        if self.num_collisions is not None:
            rows = ceil_div(n, self.num_collisions)
            return rows if rows > fewest else None
        if self.num_rows is not None and self.num_rows < fewest:
            many = f"{self.num_partitions} {tables}"
            raise ValueError(f"num_rows ({self.num_rows}) must be at least {fewest} for {many} to cover {n} ids")
        return self.num_rows


@dataclass(frozen=True, repr=False)
class GeneralizedQR(EqualTables):
    """Generalized quotient-remainder: the digits of the id in a mixed radix (section 3.1), a table for each.

    Args:
        num_partitions: number of partitions, hence of tables.
        num_rows: rows of all tables together, split evenly; if None, the fewest that keep all ids apart.
        num_collisions: instead of ``num_rows``: ``ceil(n / num_collisions)`` rows, or the fewest if that is more.
        operation: ``"mult"``, ``"add"``, ``"concat"``, or ``"feature"``, which keeps the rows of an id apart.
        dims: widths of the tables for ``"concat"``; if None, the width is split evenly.
        force: store the table this way even where that does not shrink it; else it stays full.
        width: width of stored rows, which a learned matrix ``[width, D]`` turns into vectors; None for rows of width D.

    >>> GeneralizedQR(3).spec(1000, 16).shapes, GeneralizedQR(2, num_collisions=10).spec(1000, 16).shapes
    (((10, 16), (10, 16), (10, 16)), ((50, 16), (50, 16)))
    """

    def partitions_of(self, n: int) -> tuple[AnyPartition, ...]:
        """Digits of balanced sizes; with rows to spend, digits that overlap so that every row is used."""
        k = self.num_partitions
        fewest = balanced_sizes(n, k)
        rows = self.rows_to_spend(n, sum(fewest), "tables")
        if rows is None:
            return P.generalized_quotient_remainder(n, fewest)
        even, extra = divmod(rows, k)
        return P.overlapping_quotient_remainder(n, [min(n, even + (j < extra)) for j in range(k)])


@dataclass(frozen=True, repr=False)
class ChineseRemainder(EqualTables):
    """Remainders by pairwise coprime sizes (section 3.1), a table for each.

    The arguments are those of ``GeneralizedQR``.

    >>> ChineseRemainder(3).spec(1000, 16).shapes
    ((13, 16), (11, 16), (7, 16))
    """

    def partitions_of(self, n: int) -> tuple[AnyPartition, ...]:
        """Remainders by the smallest coprime sizes, or by the largest that there are rows for."""
        fewest = coprime_sizes(n, self.num_partitions)
        rows = self.rows_to_spend(n, sum(fewest), "coprime tables")
        return P.chinese_remainder(n, fewest if rows is None else coprime_sizes_for_rows(rows, self.num_partitions))


@dataclass(frozen=True, repr=False)
class Custom(Composed):
    """Partitions that the user defines, such as a car's make, year and type (section 3.1).

    Args:
        partitions: ``Partition`` and ``ExplicitPartition`` objects.
        check: raise unless the partitions are complementary.

    The other arguments are those of ``QR``.

    >>> make = P.ExplicitPartition.from_labels(["audi", "audi", "ford", "ford"])
    >>> year = P.ExplicitPartition.from_labels([1999, 2005, 1999, 2005])
    >>> Custom((make, year), force=True).spec(4, 16).shapes
    ((2, 16), (2, 16))
    """

    partitions: tuple[AnyPartition, ...]
    _: KW_ONLY
    check: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.partitions, list | tuple):
            raise TypeError(f"partitions ({self.partitions!r}) must be a tuple of Partition or ExplicitPartition")
        object.__setattr__(self, "partitions", tuple(self.partitions))
        if not self.partitions or not all(isinstance(p, AnyPartition) for p in self.partitions):
            raise ValueError(f"partitions ({self.partitions!r}) must be one or more Partition or ExplicitPartition")

    def partitions_of(self, n: int) -> tuple[AnyPartition, ...]:
        """The given partitions, checked against ``n``."""
        for p in self.partitions:
            if isinstance(p, P.ExplicitPartition) and len(p.index) != n:
                raise ValueError(f"index of {p!r} has {len(p.index)} entries, but num_embeddings ({n}) must match")
        if self.check and not _complementary(self.partitions, n):
            raise ValueError(
                f"partitions {self.partitions!r} must be complementary over {n} ids"
                " (check=False lets ids share a vector)"
            )
        return self.partitions


@dataclass(frozen=True, repr=False)
class Path(Scheme):
    """Path-based: the row of the first partition goes through one network for each other partition (section 4.1).

    Args:
        num_collisions: ids that share a row of the table, which has ``ceil(n / num_collisions)`` rows.
        hidden: widths of the hidden layers of each network; ``()`` is the linear map.
        num_partitions: number of levels of the path plus one; the levels together tell apart ``num_collisions`` ids.
        activation: ``"relu"`` or ``"sigmoid"``, between layers.
        force: store the table this way even where that does not shrink it; else it stays full.
        width: width of stored rows, which a learned matrix ``[width, D]`` turns into vectors; None for rows of width D.

    >>> Path(num_collisions=4, hidden=(64,)).spec(100_000, 16).num_parameters
    408512
    """

    num_collisions: int = 4
    hidden: tuple[int, ...] = (64,)
    _: KW_ONLY
    num_partitions: int = field(default=2, metadata={"low": 2})
    activation: Activation = "relu"

    def partitions_of(self, n: int) -> tuple[AnyPartition, ...]:
        """Remainder, then the digits of the quotient."""
        m = ceil_div(n, self.num_collisions)
        return P.generalized_quotient_remainder(n, (m, *balanced_sizes(ceil_div(n, m), self.num_partitions - 1)))
