"""Composed lookups as ONNX nodes, group by group of tables that are stored alike.

Shapes: N ids of each table, G tables of a group, V ids of a jagged batch, B bags, W columns that come out of a table.

An id outside ``[0, n)`` never reads a row: it is replaced by 0 before the arithmetic, and its vector by NaN or zeros
after it. Without that ``Gather`` would read -1 as the last row, and an id past n can pass the arithmetic.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..tables import Tables
from .groups import Buckets, Group, Unknown, columns_in_order, group_of, groups_of
from .onnx_graph import Graph


class Composed(NamedTuple):
    """Composed vectors ``[N, G, W]``, and names of masks ``[N, G]``; None where no id can be padding."""

    vectors: str
    in_range: str
    is_padding: str | None


class TableNodes:
    """The tables of a module as nodes of a graph.

    Args:
        graph: that the nodes go to.
        tables: the module.
        unknown: what an id out of range gives.
    """

    def __init__(self, graph: Graph, tables: Tables, unknown: Unknown) -> None:
        self.graph, self.tables, self.unknown = graph, tables, unknown
        self.stored = tables.stored.dtype
        self.compute = torch.float64 if self.stored == torch.float64 else torch.float32

    def lookup(self, ids: str) -> str:
        """Vectors of ``ids`` ``[B, F]``, features in order: ``[B, sum W]``."""
        graph, groups, parts = self.graph, groups_of(self.tables), []
        for group in groups:
            columns = ids if len(groups) == 1 else graph.op("Gather", ids, graph.constant(group.features), axis=1)
            composed = self._compose(columns, group)
            parts.append(self._filled(composed))
        order = [feature for group in groups for feature in group.features]
        if len({group.width for group in groups}) == 1:
            together = parts[0] if len(parts) == 1 else graph.op("Concat", *parts, axis=1)
            if order != sorted(order):
                places = sorted(range(len(order)), key=lambda place: order[place])
                together = graph.op("Gather", together, graph.constant(places), axis=1)
            return str(graph.op("Reshape", together, graph.constant([0, len(order) * groups[0].width])))
        flat = [
            graph.op("Reshape", part, graph.constant([0, len(group.features) * group.width]))
            for part, group in zip(parts, groups, strict=True)
        ]
        return str(
            graph.op("Gather", graph.op("Concat", *flat, axis=1), graph.constant(columns_in_order(groups)), axis=1)
        )

    def _compose(self, ids: str, group: Group) -> Composed:
        """Vectors of int64 ``ids`` ``[N, G]`` of the tables of one group; those out of range give the id 0's."""
        graph = self.graph
        zero, limit = graph.constant(0), graph.constant(group.limits)
        in_range = graph.op("And", graph.op("GreaterOrEqual", ids, zero), graph.op("Less", ids, limit))
        place = graph.op("Where", in_range, ids, zero)
        if group.permutations is not None:
            multiplier, shift = (graph.constant(values) for values in group.permutations)
            place = graph.op("Mod", graph.op("Add", graph.op("Mul", place, multiplier), shift), limit)
        vectors = self._combined([self._rows(place, group, j) for j in range(len(group.rows))], group.operation)
        if group.levels:
            vectors = self._paths(vectors, place, group)
        is_padding = None
        if group.padding is not None:
            same = graph.op("Equal", ids, graph.constant(group.padding))
            is_padding = graph.op("And", same, in_range)  # the id -1 is not padding
        return Composed(vectors, in_range, is_padding)

    def _rows(self, place: str, group: Group, j: int) -> str:
        """Rows ``[N, G, w]`` of the j-th stored tables of a group."""
        name = f"{group.features[0]}_{j}"
        table = self.graph.weight(f"tables_{name}", group.rows[j])
        rows = self.graph.op("Gather", table, self._buckets(place, group.buckets[j], name), axis=0)
        return str(rows if self.stored == self.compute else self.graph.cast(rows, self.compute))

    def _buckets(self, place: str, buckets: Buckets, name: str) -> str:
        """Rows, or networks, ``[N, G]`` of ids in range."""
        graph = self.graph
        if buckets.maps is not None:
            place = place if buckets.map_starts is None else graph.op("Add", place, graph.constant(buckets.map_starts))
            place = graph.op("Gather", graph.weight(f"maps_{name}", buckets.maps), place, axis=0)
        if buckets.strides is not None:
            place = graph.op("Div", place, graph.constant(buckets.strides))
        if buckets.sizes is not None:
            place = graph.op("Mod", place, graph.constant(buckets.sizes))
        return place if buckets.starts is None else str(graph.op("Add", place, graph.constant(buckets.starts)))

    def _combined(self, rows: Sequence[str], operation: str) -> str:
        if operation in ("concat", "feature"):
            return str(rows[0] if len(rows) == 1 else self.graph.op("Concat", *rows, axis=2))
        total = rows[0]
        for row in rows[1:]:
            total = self.graph.op("Mul" if operation == "mult" else "Add", total, row)
        return total

    def _paths(self, vectors: str, place: str, group: Group) -> str:
        """Vectors after the networks of section 4.1: each id's weights are gathered, one product a layer."""
        graph, inner = self.graph, self.graph.constant([2])
        activation = {"relu": "Relu", "sigmoid": "Sigmoid"}[str(group.activation)]
        vectors = graph.op("Unsqueeze", vectors, inner)  # [N, G, 1, D]
        for number, level in enumerate(group.levels):
            network = self._buckets(place, level.buckets, "")
            for layer, (weights, biases) in enumerate(zip(level.weights, level.biases, strict=True)):
                name = f"{group.features[0]}_{number}_{layer}"
                weight, bias = (
                    graph.weight(f"path_{kind}_{name}", [value.to(self.compute) for value in values])
                    for kind, values in (("weights", weights), ("biases", biases))
                )
                vectors = graph.op("MatMul", vectors, graph.op("Gather", weight, network, axis=0))
                vectors = graph.op(
                    "Add", vectors, graph.op("Unsqueeze", graph.op("Gather", bias, network, axis=0), inner)
                )
                vectors = vectors if layer == len(level.weights) - 1 else graph.op(activation, vectors)
        return str(graph.op("Squeeze", vectors, inner))

    def _filled(self, composed: Composed) -> str:
        """The vectors, with zeros for padding and what ``unknown`` says for ids out of range."""
        graph, last = self.graph, self.graph.constant([2])
        fill = graph.scalar(float("nan") if self.unknown == "nan" else 0.0, self.compute)
        vectors = graph.op("Where", graph.op("Unsqueeze", composed.in_range, last), composed.vectors, fill)
        if composed.is_padding is not None:
            zero = graph.scalar(0.0, self.compute)
            vectors = graph.op("Where", graph.op("Unsqueeze", composed.is_padding, last), zero, vectors)
        return str(vectors)

    def bag(self, ids: str, offsets: str, weights: str | None, mode: str) -> str:
        """Pooled vectors ``[B, sum W]`` of jagged ``ids`` ``[V]``; ``offsets`` ``[F * B + 1]``, feature by feature."""
        graph, features = self.graph, len(self.tables.specs)
        bag, batch = self._bag_numbers(ids, offsets, features)
        pooled = []
        for feature in range(features):
            own_ids, own_bag, own_weights = ids, bag, weights
            if features > 1:
                first, last = (graph.op("Mul", batch, graph.constant([k])) for k in (feature, feature + 1))
                limits = [graph.op("Gather", offsets, place, axis=0) for place in (first, last)]
                own_ids, own_bag = (graph.op("Slice", values, *limits) for values in (ids, bag))
                own_bag = graph.op("Sub", own_bag, first)
                own_weights = None if weights is None else graph.op("Slice", weights, *limits)
            column = graph.op("Unsqueeze", own_ids, graph.constant([1]))
            composed = self._compose(column, group_of(self.tables, [feature]))
            pooled.append(self._pooled(composed, own_bag, batch, own_weights, mode))
        return str(pooled[0] if len(pooled) == 1 else graph.op("Concat", *pooled, axis=1))

    def bag_of_rows(self, ids: str, weights: str | None, mode: str) -> str:
        """Pooled vectors ``[B, W]`` of the only table's ids ``[B, L]``: each row is a bag."""
        graph, column = self.graph, self.graph.constant([-1])
        batch, length = graph.op("Split", graph.op("Shape", ids), outputs=2, axis=0, num_outputs=2)
        flat = graph.op("Reshape", ids, column)
        last = graph.op("Mul", batch, length)
        scalars = [graph.constant(0), graph.op("Squeeze", last, graph.constant([0])), graph.constant(1)]
        longer = graph.op("Max", length, graph.constant([1]))  # empty rows have no place to divide
        bag = graph.op("Div", graph.op("Range", *scalars), longer)
        composed = self._compose(graph.op("Unsqueeze", flat, graph.constant([1])), group_of(self.tables, [0]))
        flat_weights = None if weights is None else graph.op("Reshape", weights, column)
        return self._pooled(composed, bag, batch, flat_weights, mode)

    def _bag_numbers(self, ids: str, offsets: str, features: int) -> tuple[str, str]:
        """The bag of each id ``[V]``, which is how many bags end before it, and the batch size ``[1]``."""
        graph = self.graph
        one, end = graph.constant([1]), graph.constant([2**62])
        ends = graph.op("Slice", offsets, one, end)
        bags = graph.op("Shape", ends)
        counts = graph.op("Expand", graph.constant([0]), graph.op("Add", graph.op("Shape", ids), one))
        ones = graph.op("Expand", one, bags)
        marks = graph.op("ScatterElements", counts, ends, ones, axis=0, reduction="add")
        bag = graph.op("CumSum", marks, graph.constant(0))
        bag = graph.op("Slice", bag, graph.constant([0]), graph.constant([-1]))
        return bag, graph.op("Div", bags, graph.constant([features]))

    def _pooled(self, composed: Composed, bag: str, batch: str, weights: str | None, mode: str) -> str:
        """Pool the vectors ``[V, 1, W]`` of one table into ``[B, W]``; ids past the last bag count for nothing."""
        graph, one, zero = self.graph, self.graph.constant([1]), self.graph.scalar(0.0, self.compute)
        bags = graph.op("Add", batch, one)  # and one for ids past the last
        index = graph.op("Unsqueeze", bag, one)

        def scattered(values: str, start: str, columns: str, reduction: str) -> str:
            initial = graph.op("Expand", start, graph.op("Concat", bags, columns, axis=0))
            reduced = graph.op("ScatterND", initial, index, values, reduction=reduction)
            return str(graph.op("Slice", reduced, graph.constant([0]), graph.constant([-1])))

        def count(mask: str) -> str:
            return scattered(graph.cast(mask, self.compute), zero, one, "add")

        counted = composed.in_range
        if composed.is_padding is not None:
            counted = graph.op("And", counted, graph.op("Not", composed.is_padding))
        start = graph.scalar(-torch.inf, self.compute) if mode == "max" else zero
        vectors = graph.op("Where", counted, graph.op("Squeeze", composed.vectors, one), start)
        if weights is not None:
            vectors = graph.op("Mul", vectors, graph.op("Unsqueeze", weights, one))
        columns = graph.op("Slice", graph.op("Shape", vectors), one, graph.constant([2]))
        pooled = scattered(vectors, start, columns, "max" if mode == "max" else "add")
        if mode == "mean":
            pooled = graph.op("Div", pooled, graph.op("Max", count(counted), graph.scalar(1.0, self.compute)))
        if mode == "max":
            pooled = graph.op("Where", graph.op("Greater", count(counted), zero), pooled, zero)
        if self.unknown == "nan":
            invalid = graph.op("Greater", count(graph.op("Not", composed.in_range)), zero)
            pooled = graph.op("Where", invalid, graph.scalar(float("nan"), self.compute), pooled)
        return str(pooled)
