"""The base class of schemes, the spec of a table, and the full table (sections 2 to 4)."""

from dataclasses import KW_ONLY, dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from ...checks import check_int, check_options
from .. import partitions as P
from ..operations import Operation, widths

if TYPE_CHECKING:
    from .frequency import Pool

AnyPartition = P.Partition | P.ExplicitPartition


@dataclass(frozen=True)
class TableSpec:
    """A scheme applied to one table: its partitions and the shape of each stored table.

    ``scheme.spec(n, d)`` makes it; nothing is allocated.

    Args:
        num_embeddings: number of ids, n.
        embedding_dim: width of an embedding vector, D.
        scheme: the scheme that is used: ``Full()`` where the requested one would not shrink the table.
        partitions: how the ids are divided, least significant digit first.
        shapes: rows and width of each stored table.
        operation: how the rows of an id become its vector.
        hidden: widths of the hidden layers of path networks; None for other schemes.
        fallback: why the table is full although another scheme was requested, in one sentence; else None.
        num_hot: number of ids that have rows of their own (``HotCold``).
        num_rest: number of ids that share one row (``HotCold``).
        pool: the rows that cold ids share with other tables (``HotCold``); else None.
        width: width of what rows are composed to; D, or less where a matrix turns it into a vector.

    >>> from quorem import QR
    >>> spec = QR(num_collisions=4).spec(1000, 16)
    >>> spec.shapes, spec.num_parameters, round(spec.compression, 2)
    (((250, 16), (4, 16)), 4064, 3.94)
    """

    num_embeddings: int
    embedding_dim: int
    scheme: "Scheme"
    partitions: tuple[AnyPartition, ...]
    shapes: tuple[tuple[int, int], ...]
    operation: Operation
    hidden: tuple[int, ...] | None = None
    fallback: str | None = None
    num_hot: int = 0
    num_rest: int = 0
    pool: "Pool | None" = None
    width: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", self.width or self.embedding_dim)

    @property
    def is_narrow(self) -> bool:
        """Whether a matrix ``[width, D]`` turns composed rows into vectors."""
        return self.width < self.embedding_dim

    @property
    def is_naive(self) -> bool:
        """Whether each id has one row, at its number."""
        one_row = self.partitions == P.naive(self.num_embeddings)
        return one_row and self.operation != "feature" and not self.num_own  # feature has an extra dimension

    @property
    def num_own(self) -> int:
        """Rows of the first table that are not composed: one for each hot id, and one for all the rest."""
        return self.num_hot + (self.num_rest > 0)

    @property
    def num_composed(self) -> int:
        """Ids whose vectors are composed: all but the hot ones and the rest."""
        return self.num_embeddings - self.num_hot - self.num_rest

    @property
    def num_vectors(self) -> int:
        """Number of vectors for one id: K for feature generation, one otherwise."""
        return len(self.partitions) if self.operation == "feature" else 1

    @property
    def vector_shape(self) -> tuple[int, ...]:
        """Shape of what an id gives: ``[K, D]`` for feature generation, ``[D]`` otherwise."""
        return (self.num_vectors, self.embedding_dim) if self.operation == "feature" else (self.embedding_dim,)

    @property
    def path_sizes(self) -> tuple[int, ...]:
        """Number of networks at each level of a path (section 4.1); empty for other schemes."""
        return () if self.hidden is None else tuple(p.size for p in self.partitions[1:])

    @property
    def num_parameters(self) -> int:
        """Number of stored parameters: all tables, path networks, and the matrix of narrow rows."""
        tables = sum(rows * width for rows, width in self.shapes)
        tables += self.width * self.embedding_dim if self.is_narrow else 0
        if self.hidden is None:
            return tables
        layers = (self.width, *self.hidden, self.width)
        network = sum(i * o + o for i, o in pairwise(layers))
        return tables + sum(self.path_sizes) * network

    @property
    def compression(self) -> float:
        """Parameters of the full table over stored parameters."""
        return self.num_embeddings * self.embedding_dim / self.num_parameters


@dataclass(frozen=True, repr=False)
class Scheme:
    """The base class of schemes: two options, and ``spec``, which applies the scheme to one table.

    Args:
        force: store the table this way even where that does not shrink it; else it stays full.
        width: width of stored rows, which a learned matrix ``[width, D]`` turns into vectors; None for rows of width D.

    >>> from quorem import Full, QR
    >>> isinstance(QR(4), Scheme), QR(4) == QR(num_collisions=4), Full().spec(1000, 16).num_parameters
    (True, True, 16000)
    """

    _: KW_ONLY
    force: bool = False
    width: int | None = None

    def __post_init__(self) -> None:
        check_options(self)

    def __repr__(self) -> str:
        """The scheme as Python code, without keyword options at their defaults."""
        options = sorted(fields(self), key=lambda f: bool(f.kw_only))
        shown = [f.name for f in options if not f.kw_only or getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def partitions_of(self, n: int) -> tuple[AnyPartition, ...]:
        """The partitions of ``n`` ids, least significant digit first."""
        raise NotImplementedError

    def spec(self, n: int, d: int) -> TableSpec:
        """This scheme applied to one table; nothing is allocated.

        Args:
            n: number of ids.
            d: width of an embedding vector.

        Raises:
            ValueError: if the scheme cannot store such a table.

        >>> from quorem import QR
        >>> QR(num_collisions=4).spec(1000, 16).shapes
        ((250, 16), (4, 16))
        >>> QR(num_collisions=4).spec(3, 16).fallback
        'QR would store 64 parameters where the full table has 48'
        """
        n, d = check_int("num_embeddings", n, 1), check_int("embedding_dim", d, 1)
        if self.width is not None and self.width >= d:
            raise ValueError(f"width ({self.width}) of rows must be below embedding_dim ({d})")
        spec = replace(self._spec(n, self.width or d), embedding_dim=d)
        always = self.force or (isinstance(self, Full) and not spec.is_narrow)
        if always or spec.num_parameters < n * d:
            return spec
        full = Full()._spec(n, d)
        reason = f"{type(self).__name__} would store {spec.num_parameters} parameters where the full table has {n * d}"
        return replace(full, fallback=reason, operation=spec.operation)

    def _spec(self, n: int, d: int) -> TableSpec:
        parts = self.partitions_of(n)
        operation: Operation = getattr(self, "operation", "add")  # any operation is the identity on one vector
        hidden = getattr(self, "hidden", None)
        if hidden is None:
            name = "embedding_dim" if self.width is None else "width"
            dims = widths(operation, d, len(parts), getattr(self, "dims", None), name)
            shapes = tuple((p.size, width) for p, width in zip(parts, dims, strict=True))
        else:
            shapes = ((parts[0].size, d),)
        return TableSpec(n, d, self, parts, shapes, operation, hidden)


@dataclass(frozen=True, repr=False)
class Full(Scheme):
    """One row per category: the naive partition.

    Args:
        force: store narrow rows even where they do not shrink the table; has no effect without ``width``.
        width: width of stored rows, which a learned matrix ``[width, D]`` turns into vectors; None for rows of width D.

    >>> Full().spec(1000, 16).num_parameters, Full(width=4).spec(1000, 16).num_parameters
    (16000, 4064)
    """

    def partitions_of(self, n: int) -> tuple[AnyPartition, ...]:
        """The naive partition."""
        return P.naive(n)


def check_scheme(scheme: Scheme) -> None:
    """Raise TypeError unless ``scheme`` is a ``Scheme``."""
    if not isinstance(scheme, Scheme):
        raise TypeError(f"scheme ({scheme!r}) must be a Scheme, such as quorem.QR(num_collisions=4)")
