"""The layout: any mix of schemes as one small table of integers that every kernel reads.

All rows of a module lie in one parameter ``stored`` ``[R, W]``, where W is the greatest common divisor of the widths
of its tables; a row of a table that is ``pitch * W`` wide is ``pitch`` consecutive rows of ``stored``. The output is a
list of S *slots* of W columns. A slot takes one feature's ids and combines up to K rows, by sum or by product:

    out[n, s] = op_k stored[base[s, k] + bucket_k(id) * pitch[s, k]],   id = ids[n, feature[s]]

Concatenation and feature generation are slots of one row each, so two operations serve the paper's four.

Shapes: B batch, F features, S slots, K partitions, R rows, W columns, M map entries, V ids of a jagged batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from ..partitions import ExplicitPartition
from ..schemes import TableSpec

SLOT_COLUMNS, PART_COLUMNS = 6, 5
FEATURE, OPERATION, LIMIT, MULTIPLIER, SHIFT, PADDING = range(SLOT_COLUMNS)
STRIDE, SIZE, BASE, PITCH, MAP = range(PART_COLUMNS)
ADD, MULT = 0, 1
NO_PADDING = -1
UNUSED = -1  # in BASE: this slot has fewer than K partitions
CLOSED_FORM = -1  # in MAP: the bucket is (id // stride) % size, not an entry of ``maps``


@dataclass(frozen=True)
class Extent:
    """Where one table lies in ``stored``."""

    base: int
    rows: int
    pitch: int

    def of(self, stored: Tensor) -> Tensor:
        """This table ``[rows, pitch * W]`` as a view of ``stored`` ``[R, W]``."""
        return stored[self.base : self.base + self.rows * self.pitch].view(self.rows, self.pitch * stored.shape[1])


class Layout(NamedTuple):
    """The integers by which an op finds the rows of an id, all int64."""

    slots: Tensor  # [S, 6]
    parts: Tensor  # [S, K, 5]
    maps: Tensor  # [M]: the index maps of explicit partitions, end to end
    spans: Tensor  # [F, 2]: first slot and number of slots of each feature


@dataclass(frozen=True)
class Storage:
    """The shape of ``stored``, where each table lies in it, and how ids find their rows."""

    width: int
    num_rows: int
    extents: tuple[tuple[Extent, ...], ...]  # [F][tables of the feature]
    layout: Layout


def slot_row(feature: int, spec: TableSpec, padding: int | None) -> list[int]:
    """The row of ``slots`` that one feature's slots share."""
    operation = MULT if spec.operation == "mult" else ADD
    multiplier, shift = (spec.permutation.multiplier, spec.permutation.shift) if spec.permutation else (1, 0)
    return [feature, operation, spec.num_embeddings, multiplier, shift, NO_PADDING if padding is None else padding]


def build(specs: Sequence[TableSpec], padding: Sequence[int | None]) -> Storage:
    """Place the tables of ``specs``, one spec per feature; integers on the CPU, whatever torch's default device is.

    Args:
        specs: what each feature's table is.
        padding: the id of each feature that stands for nothing, or None.
    """
    width = gcd(*(w for spec in specs for _, w in spec.shapes))
    extents: list[tuple[Extent, ...]] = []
    slots: list[list[int]] = []
    parts: list[list[list[int]]] = []
    maps: list[Tensor] = []
    spans: list[list[int]] = []
    rows = mapped = 0
    for feature, (spec, pad) in enumerate(zip(specs, padding, strict=True)):
        tables: list[Extent] = []
        columns: list[list[int]] = []
        for part, (size, table_width) in zip(spec.partitions, spec.shapes, strict=False):
            tables.append(Extent(rows, size, table_width // width))
            if isinstance(part, ExplicitPartition):
                columns.append([1, part.size, rows, tables[-1].pitch, mapped])
                maps.append(part.index)
                mapped += len(part.index)
            else:
                columns.append([part.stride, part.size, rows, tables[-1].pitch, CLOSED_FORM])
            rows += size * tables[-1].pitch
        composed = spec.operation in ("add", "mult") and len(columns) > 1
        spans.append([len(slots), 0])
        for group in [columns] if composed else [[c] for c in columns]:
            for unit in range(group[0][PITCH]):
                slots.append(slot_row(feature, spec, pad))
                parts.append([[*c[:BASE], c[BASE] + unit, *c[PITCH:]] for c in group])
        spans[-1][1] = len(slots) - spans[-1][0]
        extents.append(tuple(tables))
    most = max(map(len, parts))
    unused = [1, 1, UNUSED, 1, CLOSED_FORM]
    layout = Layout(
        slots=torch.tensor(slots, device="cpu"),
        parts=torch.tensor([p + [unused] * (most - len(p)) for p in parts], device="cpu"),
        maps=torch.cat(maps) if maps else torch.empty(0, dtype=torch.int64, device="cpu"),
        spans=torch.tensor(spans, device="cpu"),
    )
    return Storage(width, rows, tuple(extents), layout)
