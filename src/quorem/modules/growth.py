"""Adding ids to a trained table: new ids get vectors of the same scheme, and the vectors of old ids do not change.

Old ids keep their buckets. Rows are added only to a stored table whose partition can be extended without moving old
ids: the full table, or the partition with the largest stride. Schemes without such a partition are refused.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops.layout import build
from ..ops.rounding import converted_state
from ..paper import init
from ..paper.partitions import Partition, are_digits
from ..paper.schemes import Custom, Full, HotCold, Pool, Scheme, TableSpec

if TYPE_CHECKING:
    from .lookup import Tables

ABLE = "Full, Hash, QR, GeneralizedQR without num_rows, and HotCold with a rest or with one of these as cold"


def grown_spec(spec: TableSpec, n: int) -> TableSpec:
    """The spec of a table of ``n`` ids in which the ids of ``spec`` read the same rows as before; or a ValueError."""
    if n < spec.num_embeddings:
        raise ValueError(f"n ({n}) must be at least num_embeddings ({spec.num_embeddings}): tables do not shrink")
    if n == spec.num_embeddings:
        return spec
    if isinstance(spec.scheme, Full):
        return replace(spec.scheme.spec(n, spec.embedding_dim), operation=spec.operation, fallback=spec.fallback)
    if not isinstance(spec.scheme, HotCold):
        scheme = replace(_grown(spec, spec.scheme, n), width=spec.scheme.width)
    elif spec.num_rest:
        scheme = replace(spec.scheme, num_rest=spec.num_rest + n - spec.num_embeddings, force=True)
    else:
        scheme = replace(spec.scheme, cold=_grown(spec, spec.scheme.cold, n - spec.num_hot), force=True)
    return scheme.spec(n, spec.embedding_dim)


def _grown(spec: TableSpec, scheme: Scheme | Pool, n: int) -> Scheme:
    """A scheme for ``n`` composed ids that puts the old ids into the same buckets as ``scheme`` does."""
    if isinstance(scheme, Full) and spec.num_composed:
        return scheme
    grown: list[Any] = list(spec.partitions)  # none where there is a pool
    if grown and spec.hidden is None and are_digits(grown, spec.num_composed):  # also of a table that grew before
        last = max(range(len(grown)), key=lambda j: (grown[j].stride, grown[j].size))  # digits of size 1 share a stride
        grown[last] = Partition(grown[last].stride, max(grown[last].size, -(-n // grown[last].stride)))
    elif len(grown) != 1 or not isinstance(grown[0], Partition):  # hashing takes any number
        raise ValueError(f"scheme ({spec.scheme}) cannot take more ids; those that can are {ABLE}")
    widths = tuple(width for _, width in spec.shapes[len(spec.shapes) - len(grown) :])
    dims = widths if spec.operation == "concat" else None
    return Custom(tuple(grown), check=False, operation=spec.operation, dims=dims, force=True)


def grow_(tables: "Tables", t: int, n: int, optimizer: torch.optim.Optimizer | None) -> None:
    """Extend one table of a module to ``n`` ids, in place."""
    spec, title = tables.specs[t], f" of table {tables.names[t]!r}" if tables.names[t] else ""
    _check(tables, t, title, optimizer)
    try:
        grown = grown_spec(spec, n)
    except ValueError as error:
        raise ValueError(f"{error}{title}") from None
    if grown == spec:
        return
    old, stored = tables.all_extents, tables.stored
    specs = (*tables.specs[:t], grown, *tables.specs[t + 1 :])
    storage = build(specs, tables.padding, tables.table_of, tables._ranks)
    rows = stored.detach().new_empty(storage.num_rows, storage.width)  # raises if there is no memory for so many
    tables.specs, tables.extents, tables.pools = specs, storage.extents, storage.pools
    with torch.no_grad():
        new_rows = torch.empty(len(stored), dtype=torch.int64, device="cpu")  # new position of each old row
        for before, after in zip(old, tables.all_extents, strict=True):
            count = before.rows * before.pitch
            new_rows[before.base : before.base + count] = torch.arange(after.base, after.base + count, device="cpu")
            after.of(rows)[: before.rows] = before.of(stored)
            if after.rows > before.rows:
                _draw_(after.of(rows)[before.rows :], before.of(stored), tables, t)
        tables.updates.lag_under(None)  # move_state_ builds a new row rule
        stored.grad = None
        # A graph from before keeps the accumulator of the old shape alive; torch drops it if the dtype changes.
        stored.data = torch.empty(0, dtype=torch.complex64, device=stored.device)
        stored.data = rows
    tables.register_integers()
    if optimizer is not None:
        move_state_(optimizer, stored, new_rows.to(stored.device))


def _check(tables: "Tables", t: int, title: str, optimizer: torch.optim.Optimizer | None) -> None:
    if tables.bits:
        raise ValueError(f"a module of {tables.bits} bits cannot grow: grow it before quantize_")
    if tables.raw_ids[t]:
        raise ValueError(f"raw_ids (True){title} must be False: a table of raw ids takes any id as it is")
    if len(tables.updates.modules) > 1:
        raise ValueError(f"stored must belong to one module: {len(tables.updates.modules)} share it")
    if optimizer is not None:
        groups = getattr(optimizer, "param_groups", ())
        if not any(p is tables.stored for group in groups for p in group["params"]):
            raise ValueError(f"optimizer ({type(optimizer).__name__}) must be one that updates this module")
    elif tables.updates.lagging is not None or tables.updates.collector is not None:
        raise ValueError("optimizer (None) must be the one that updates this module's rows, whose state follows")


def _draw_(rows: Tensor, known: Tensor, tables: "Tables", t: int) -> None:
    """Draw new rows: like initial ones for a full table, else the mean of the ``known`` rows plus noise."""
    if tables.specs[t].is_naive:
        rows.uniform_(*init.intervals(tables.specs[t], tables.initial_std([t]))[0])
        return
    wide = known.to(torch.promote_types(known.dtype, torch.float32))
    noise = torch.empty_like(rows, dtype=wide.dtype).uniform_(-1, 1) * init.NOISE * wide.std().nan_to_num()
    rows.copy_(wide.mean(0) + noise)


def move_state_(optimizer: Any, stored: Tensor, new_rows: Tensor) -> None:
    """Move an optimizer's state for ``stored`` to the rows' new positions; added rows get the initial state."""
    group = next(group for group in optimizer.param_groups if any(p is stored for p in group["params"]))
    state = optimizer.state.get(stored, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() and len(value) == len(new_rows):
            start = group.get("initial_accumulator_value", 0) if name == "sum" else 0
            numbers = torch.tensor(float(start), device=value.device).expand(len(stored), *value.shape[1:])
            state[name] = converted_state(numbers, value.dtype).index_copy_(0, new_rows.to(value.device), value)
    by_row = getattr(optimizer, "_row_rules", {}).pop(stored, None)
    if by_row is not None:
        optimizer._row_rule(group, stored)
