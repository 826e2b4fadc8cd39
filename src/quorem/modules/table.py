"""``Table``: the options of one table, and how they go together."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from ..checks import check_choice, check_int
from ..paper.hashing import mixed_ids
from ..paper.schemes import Full, Scheme, TableSpec, check_scheme
from ..paper.schemes.frequency import Ranking, RawCounts, check_ranking

UnknownIds = Literal["error", "rest", "hash"]  # what ``id_rules`` does with ids outside a table


@dataclass(frozen=True)
class Table:
    """One table of an ``EmbeddingCollection``, or the only one of a module, whose name is empty.

    Args:
        name: name of the table, in ``state_dict`` and in errors.
        num_embeddings: number of ids, n.
        embedding_dim: width of an output vector, D.
        scheme: how the table is stored.
        padding_idx: an id whose vector is zero and takes no gradient.
        features: names of the features that read this table; if empty, one feature with the table's name.
        frequencies: what a ``HotCold`` scheme ranks ids by: how often each id occurs, ``[n]``; ``schemes.Ranks``, the
            hot and cold ids themselves; or ``schemes.RawCounts``, how often raw ids occur.
        raw_ids: take any 64-bit id, as in ``Embedding``.
        unknown: how an id outside ``[0, n)`` is treated: ``"error"``, ``"rest"`` or ``"hash"``, as in ``Embedding``.

    >>> from quorem import QR
    >>> Table("user", 1000, 16, QR(num_collisions=4))
    Table(name='user', num_embeddings=1000, embedding_dim=16, scheme=QR(num_collisions=4), ...)
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    scheme: Scheme = Full()  # noqa: RUF009 - a scheme is frozen
    padding_idx: int | None = None
    features: tuple[str, ...] = ()
    frequencies: Ranking | None = field(default=None, compare=False, repr=False)
    raw_ids: bool = field(default=False, kw_only=True)
    unknown: UnknownIds = field(default="error", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or "\n" in self.name:
            raise ValueError(f"name ({self.name!r}) must be a string of one line")
        check_scheme(self.scheme)
        n = check_int("num_embeddings", self.num_embeddings)
        if not isinstance(self.features, list | tuple) or not all(isinstance(f, str) and f for f in self.features):
            raise TypeError(f"features ({self.features!r}) must be a tuple of names")
        object.__setattr__(self, "features", tuple(self.features) or (self.name,))
        if self.frequencies is not None:
            object.__setattr__(self, "frequencies", check_ranking(self.frequencies, n))

    def checked_spec(self) -> TableSpec:
        """The scheme applied to the table, if it can store it and the options go together."""
        spec = self.scheme.spec(self.num_embeddings, self.embedding_dim)
        title, unknown = f" of table {self.name!r}" if self.name else "", self.unknown
        if not isinstance(self.raw_ids, bool):
            raise TypeError(f"raw_ids ({self.raw_ids!r}) must be a bool")
        if isinstance(self.frequencies, RawCounts) and not self.raw_ids:
            raise ValueError(f"frequencies{title} counts raw ids: raw_ids must be True")
        check_choice(f"unknown{title}", unknown, UnknownIds)
        if self.raw_ids and unknown != "error":
            raise ValueError(f"unknown ({unknown!r}){title} must be 'error' with raw_ids: no raw id is unknown")
        if unknown == "rest" and not spec.num_rest:
            raise ValueError(f"unknown ('rest'){title} must be 'error' or 'hash': scheme ({spec.scheme}) has no rest")
        if unknown == "hash" and not spec.num_composed:
            raise ValueError(f"unknown ('hash'){title} must be 'error' or 'rest': no id of the table is composed")
        return spec

    def padding(self) -> int | None:
        """The padding id as an id of the table: counted from the front, or hashed if ids are raw."""
        n, padding_idx = self.num_embeddings, self.padding_idx
        if padding_idx is None:
            return None
        if not self.raw_ids:
            return check_int("padding_idx", padding_idx, -n, n - 1) % n
        raw = check_int("padding_idx", padding_idx, -(2**63), 2**64 - 1)
        return int(mixed_ids(torch.tensor([raw % 2**64], dtype=torch.uint64, device="cpu"), n))
