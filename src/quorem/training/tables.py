"""The tables of a run: by a plan, or as in the paper (section 5), one scheme for all features and a threshold."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from ..data.prepared import Prepared
from ..modules.collection import Table
from ..modules.table import UnknownIds
from ..paper.operations import Operation
from ..paper.schemes import QR, Composed, Full, Hash, Path, Scheme
from .config import RunConfig

PAPER_METHODS = ("full", "hash", "feature", "concat", "add", "mult", "path")


def scheme_of(method: str, num_collisions: int = 4, *, hidden: int = 64, force: bool = True) -> Scheme:
    """The scheme behind a name in the paper's figures and table; ``hidden`` is the width of ``"path"``'s networks.

    >>> scheme_of("mult", 60).spec(6000, 16).shapes, scheme_of("hash", 60).spec(6000, 16).shapes
    (((100, 16), (60, 16)), ((100, 16),))
    """
    if method not in PAPER_METHODS:
        raise ValueError(f"method ({method!r}) must be one of {', '.join(map(repr, PAPER_METHODS))}")
    others = {
        "full": Full(),
        "hash": Hash(num_collisions, force=force),
        "path": Path(num_collisions, hidden=(hidden,), force=force),
    }
    return others.get(method) or QR(num_collisions, operation=cast(Operation, method), force=force)


def tables_of(
    cardinalities: Sequence[int],
    scheme: Scheme,
    *,
    threshold: int = 0,
    embedding_dim: int = 16,
    names: Sequence[str] | None = None,
) -> list[Table]:
    """One table per feature, stored by ``scheme``; tables of at most ``threshold`` ids stay full.

    ``concat`` concatenates K rows of width ``embedding_dim``, so all tables are K times as wide, including the full
    ones (section 5.1). Features without ``names`` are called ``C1``, ``C2``, ...

    >>> [(t.embedding_dim, type(t.scheme).__name__) for t in tables_of([10, 1000], scheme_of("concat"), threshold=20)]
    [(32, 'Full'), (32, 'QR')]
    """
    names = [f"C{f + 1}" for f in range(len(cardinalities))] if names is None else names
    width = embedding_dim
    if isinstance(scheme, Composed) and scheme.operation == "concat" and scheme.dims is None and cardinalities:
        width *= len(scheme.partitions_of(max(cardinalities)))
    return [
        Table(name, n, width, Full() if n <= threshold else scheme)
        for name, n in zip(names, cardinalities, strict=True)
    ]


def tables_of_run(config: RunConfig, cardinalities: Sequence[int], names: Sequence[str] | None = None) -> list[Table]:
    """The tables of a run: by its plan, or by one scheme and threshold.

    >>> run = RunConfig(data="log", plan={"C1": Full(), "C2": QR(4)})
    >>> [table.scheme for table in tables_of_run(run, [10, 1000])]
    [Full(), QR(num_collisions=4)]
    """
    scheme, width = config.scheme if config.plan is None else Full(), config.embedding_dim
    tables = tables_of(cardinalities, scheme, threshold=config.threshold, embedding_dim=width, names=names)
    if config.plan is not None:
        schemes, features = dict(config.plan), {table.name for table in tables}
        if missing := sorted(features - set(schemes)):
            raise ValueError(f"plan must name every feature of the data: {', '.join(missing)} is missing")
        if extra := sorted(set(schemes) - features):
            raise ValueError(f"plan names {', '.join(extra)}, which the data do not have")
        tables = [replace(table, scheme=schemes[table.name]) for table in tables]
    return [_with_unknown(table, config.unknown) for table in tables]


def _with_unknown(table: Table, unknown: str) -> Table:
    """The table with the option ``unknown``, if it supports it; else unchanged."""
    spec = table.scheme.spec(table.num_embeddings, table.embedding_dim)
    able = {"rest": spec.num_rest > 0, "hash": not isinstance(spec.scheme, Full) and spec.num_composed > 0}
    return replace(table, unknown=cast(UnknownIds, unknown)) if able.get(unknown) else table


def counted_tables(prepared: Prepared, embedding_dim: int) -> list[Table]:
    """Full tables of prepared data with the counts of their training rows, for a planner."""
    return [
        Table(name, n, embedding_dim, frequencies=torch.from_numpy(prepared.frequencies(name)))
        for name, n in zip(prepared.names, prepared.cardinalities, strict=True)
    ]
