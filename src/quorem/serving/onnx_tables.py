"""Lookups and pooled lookups of a module as ONNX nodes, one group of tables that are stored alike at a time.

Shapes: N ids of each feature, G features of a group, V ids of a jagged batch, B bags, W output columns of a table.
"""

import torch

from ..tables import Tables
from .composition import composed, filled
from .groups import columns_in_order, group_of, groups_of
from .onnx_graph import Graph, Operand, Value
from .onnx_operators import GraphOperators
from .signature import UnknownVector


class TableNodes:
    """The tables of a module as nodes of a graph.

    Args:
        graph: the graph to which nodes are added.
        tables: the module.
        unknown_vector: the vector of an id out of range, ``"nan"`` or ``"zeros"``.
    """

    def __init__(self, graph: Graph, tables: Tables, unknown_vector: UnknownVector) -> None:
        self.graph, self.tables, self.unknown_vector = graph, tables, unknown_vector
        self.operators = GraphOperators(graph, tables)
        self.mode = getattr(tables, "mode", None)

    def lookup(self, ids: Value) -> Value:
        """Vectors of ``ids`` ``[B, F]``, features in order: ``[B, sum W]``."""
        graph, groups, parts = self.graph, groups_of(self.tables), []
        for group in groups:
            columns = ids if len(groups) == 1 else graph.op("Gather", ids, group.features, axis=1)
            vectors = composed(self.operators, columns, group, with_nan=self.unknown_vector == "nan")
            parts.append(filled(self.operators, vectors, self.unknown_vector))
        order = [feature for group in groups for feature in group.features]
        if len({group.width for group in groups}) == 1:
            together = parts[0] if len(parts) == 1 else graph.op("Concat", *parts, axis=1)
            if order != sorted(order):
                positions = sorted(range(len(order)), key=lambda position: order[position])
                together = graph.op("Gather", together, positions, axis=1)
            return graph.op("Reshape", together, [0, len(order) * groups[0].width])
        flat = [
            graph.op("Reshape", part, [0, len(group.features) * group.width])
            for part, group in zip(parts, groups, strict=True)
        ]
        return graph.op("Gather", graph.op("Concat", *flat, axis=1), columns_in_order(groups), axis=1)

    def bag(self, ids: Value, offsets: Value, weights: Value | None) -> Value:
        """Pooled vectors ``[B, sum W]`` of jagged ``ids`` ``[V]``; ``offsets`` ``[F * B + 1]``, feature by feature."""
        graph, features = self.graph, len(self.tables.features)
        bag, batch = self._bag_numbers(ids, offsets, features)
        if features == 1:
            return self._pooled(0, ids, bag, batch, weights)
        pooled = []
        for feature in range(features):
            first, last = batch * [feature], batch * [feature + 1]
            limits = [graph.op("Gather", offsets, bag_end, axis=0) for bag_end in (first, last)]
            feature_ids, feature_bag = (graph.op("Slice", values, *limits) for values in (ids, bag))
            feature_weights = None if weights is None else graph.op("Slice", weights, *limits)
            pooled.append(self._pooled(feature, feature_ids, feature_bag - first, batch, feature_weights))
        return graph.op("Concat", *pooled, axis=1)

    def bag_of_rows(self, ids: Value, weights: Value | None) -> Value:
        """Pooled vectors ``[B, W]`` of ids ``[B, L]`` of the only table; each row is a bag."""
        graph = self.graph
        batch, length = graph.split(graph.op("Shape", ids), 2, axis=0)
        positions = graph.op("Range", 0, graph.op("Squeeze", batch * length, [0]), 1)
        bag = positions // graph.op("Max", length, [1])  # do not divide by 0 where bags are empty
        flat_weights = None if weights is None else graph.op("Reshape", weights, [-1])
        return self._pooled(0, graph.op("Reshape", ids, [-1]), bag, batch, flat_weights)

    def _bag_numbers(self, ids: Value, offsets: Value, features: int) -> tuple[Value, Value]:
        """The bag of each id ``[V]``, computed as the number of bags that end before it; and the batch size ``[1]``."""
        graph = self.graph
        ends = graph.op("Slice", offsets, [1], [2**62])
        bags = graph.op("Shape", ends)
        counts = graph.op("Expand", [0], graph.op("Shape", ids) + 1)
        marks = graph.op("ScatterElements", counts, ends, graph.op("Expand", [1], bags), axis=0, reduction="add")
        return graph.op("Slice", graph.op("CumSum", marks, 0), [0], [-1]), bags // [features]

    def _pooled(self, feature: int, ids: Value, bag: Value, batch: Value, weights: Value | None) -> Value:
        """Pool the vectors of one feature's ids ``[V]`` into ``[B, W]``; ids past the last bag are ignored."""
        graph, column = self.graph, self.graph.op("Unsqueeze", ids, [1])
        vectors, in_range, is_padding = composed(self.operators, column, group_of(self.tables, [feature]))
        bags = batch + 1  # plus one for ids past the last bag
        index = graph.op("Unsqueeze", bag, [1])

        def scattered(values: Value, start: float, columns: Operand, reduction: str) -> Value:
            initial = graph.op("Expand", start, graph.op("Concat", bags, columns, axis=0))
            reduced = graph.op("ScatterND", initial, index, values, reduction=reduction)
            return graph.op("Slice", reduced, [0], [-1])

        def count(mask: Value) -> Value:
            return scattered(graph.cast(mask, graph.compute), 0.0, [1], "add")

        counted = index == index if in_range is None else in_range
        if is_padding is not None:
            counted = counted & graph.op("Not", is_padding)
        start = -torch.inf if self.mode == "max" else 0.0
        vectors = graph.op("Where", counted, graph.op("Squeeze", vectors, [1]), start)
        if weights is not None:
            vectors = vectors * graph.op("Unsqueeze", weights, [1])
        columns = graph.op("Slice", graph.op("Shape", vectors), [1], [2])
        pooled = scattered(vectors, start, columns, "max" if self.mode == "max" else "add")
        if self.mode == "mean":
            pooled = pooled / graph.op("Max", count(counted), 1.0)
        if self.mode == "max":
            pooled = graph.op("Where", count(counted) > 0.0, pooled, 0.0)
        if self.unknown_vector == "nan" and in_range is not None:
            pooled = graph.op("Where", count(graph.op("Not", in_range)) > 0.0, torch.nan, pooled)
        return pooled
