"""Composed lookups as ONNX nodes, one group of tables that are stored alike at a time.

Shapes: N ids of each feature, G features of a group, V ids of a jagged batch, B bags, W output columns of a table.

An id outside ``[0, n)`` gets the row of the rest or a composed vector if ``unknown`` of its table says so. Otherwise it
is clamped into the table before the arithmetic, and its vector is replaced by NaN or zeros afterwards. Without
clamping, ``Gather`` would read -1 as the last row, and an id past n could give some valid row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import hashing
from ..ops.codes import code_bytes
from ..renumbering import MIXING_FACTORS
from ..tables import Tables
from .groups import (
    Buckets,
    FeatureGroup,
    JoinedTables,
    OwnRows,
    columns_in_order,
    group_of,
    groups_of,
)
from .onnx_graph import Graph
from .signature import UnknownVector


class ComposedNodes(NamedTuple):
    """Names of values in the graph: composed vectors ``[N, G, W]``, and masks ``[N, G]``."""

    vectors: str
    in_range: str | None  # None if the vectors of ids out of range are final already
    is_padding: str | None  # None if no table has padding


class TableNodes:
    """The tables of a module as nodes of a graph.

    Args:
        graph: the graph to which nodes are added.
        tables: the module.
        unknown_vector: the vector of an id out of range, ``"nan"`` or ``"zeros"``.
    """

    def __init__(self, graph: Graph, tables: Tables, unknown_vector: UnknownVector) -> None:
        self.graph, self.tables, self.unknown_vector = graph, tables, unknown_vector
        self.mode = getattr(tables, "mode", None)

    def lookup(self, ids: str) -> str:
        """Vectors of ``ids`` ``[B, F]``, features in order: ``[B, sum W]``."""
        graph, groups, parts = self.graph, groups_of(self.tables), []
        for group in groups:
            columns = ids if len(groups) == 1 else graph.op("Gather", ids, graph.constant(group.features), axis=1)
            parts.append(self._filled(self._compose(columns, group, with_nan=self.unknown_vector == "nan")))
        order = [feature for group in groups for feature in group.features]
        if len({group.width for group in groups}) == 1:
            together = parts[0] if len(parts) == 1 else graph.op("Concat", *parts, axis=1)
            if order != sorted(order):
                positions = sorted(range(len(order)), key=lambda position: order[position])
                together = graph.op("Gather", together, graph.constant(positions), axis=1)
            return graph.op("Reshape", together, graph.constant([0, len(order) * groups[0].width]))
        flat = [
            graph.op("Reshape", part, graph.constant([0, len(group.features) * group.width]))
            for part, group in zip(parts, groups, strict=True)
        ]
        together = graph.op("Concat", *flat, axis=1)
        return graph.op("Gather", together, graph.constant(columns_in_order(groups)), axis=1)

    def _compose(self, ids: str, group: FeatureGroup, with_nan: bool = False) -> ComposedNodes:
        """Vectors of int64 ``ids`` ``[N, G]`` of one group.

        Ids out of range give the vector of another id, which the caller replaces. With ``with_nan``, and if rows are
        added or multiplied, they read a row of NaN instead, which costs less than replacing their vectors.
        """
        graph, zero = self.graph, self.graph.constant(0)
        if group.raw:
            number = ids = graph.op("Mod", self._mixed_raw(ids), graph.constant(group.limits))
            in_range = None
        else:
            last = graph.constant([limit - 1 for limit in group.limits])
            number = graph.op("Min", graph.op("Max", ids, zero), last)
            in_range = graph.op("Equal", number, ids)
        inside = "" if in_range is None else in_range  # used only with a policy for unknown ids, which excludes raw ids
        hashed = None
        if group.unknown_ids == "hash":
            hashed = graph.op("Mod", self._mixed_raw(ids), graph.constant(group.num_composed))
        by_row = with_nan and group.unknown_ids == "error" and in_range is not None and _is_sum_or_product(group)
        if group.own is None:
            number = number if hashed is None else graph.op("Where", inside, number, hashed)
            vectors = self._composed(number, group, in_range if by_row else None)
        else:
            place, num_own = self._place(number, group.own)
            if group.unknown_ids != "error":  # the row of the rest comes after those of the hot ids
                other = graph.constant(group.own.num_hot) if hashed is None else graph.op("Add", hashed, num_own)
                place = graph.op("Where", inside, place, other)
            is_composed = graph.op("GreaterOrEqual", place, num_own)
            vectors = self._gathered(group.own.rows, graph.op("Where", is_composed, zero, place))
            if group.rows:
                composed = self._composed(graph.op("Where", is_composed, graph.op("Sub", place, num_own), zero), group)
                mask = graph.op("Unsqueeze", is_composed, graph.constant([2]))
                vectors = graph.op("Where", mask, composed, vectors)
        is_padding = None
        if group.padding is not None:
            same = graph.op("Equal", ids, graph.constant(group.padding))
            is_padding = same if in_range is None else graph.op("And", same, in_range)  # the id -1 is not padding
        return ComposedNodes(vectors, None if by_row or group.unknown_ids != "error" else in_range, is_padding)

    def _composed(self, number: str, group: FeatureGroup, in_range: str | None = None) -> str:
        """Composed vectors of numbers, the arguments of the partitions; NaN where ``in_range`` is given and False."""
        graph = self.graph
        if group.permutation is not None:
            multiplier, shift, modulus = (graph.constant(values) for values in group.permutation)
            number = graph.op("Mod", graph.op("Add", graph.op("Mul", number, multiplier), shift), modulus)
        if group.mixing is not None:
            offsets, bits = group.mixing
            number = self._mixed(graph.op("Add", number, graph.constant(offsets)), bits)
        triples = zip(group.rows, group.buckets, [in_range, *[None] * len(group.rows)], strict=False)
        rows = [self._gathered(rows, self._buckets(number, buckets), known) for rows, buckets, known in triples]
        vectors = rows[0]
        if group.operation in ("concat", "feature"):
            vectors = rows[0] if len(rows) == 1 else graph.op("Concat", *rows, axis=2)
        else:
            for row in rows[1:]:
                vectors = graph.op("Mul" if group.operation == "mult" else "Add", vectors, row)
        return self._paths(vectors, number, group) if group.levels else vectors

    def _place(self, ids: str, own: OwnRows) -> tuple[str, str]:
        """The place of each id in its table, where own rows come first; and the number of own rows."""
        graph = self.graph
        hot, rest = graph.constant(own.num_hot), graph.constant(own.has_rest)
        num_own = graph.constant([hot + rest for hot, rest in zip(own.num_hot, own.has_rest, strict=True)])
        if own.hot is None or own.cold is None:
            place = graph.op("Where", graph.op("Less", ids, hot), ids, graph.op("Add", ids, rest))
            is_rest = graph.op("GreaterOrEqual", ids, graph.constant(own.rest_from))
            return graph.op("Where", is_rest, hot, place), num_own
        below_hot, is_hot = self._search(ids, own.hot, own.num_hot)
        below_cold, is_cold = self._search(ids, own.cold, own.num_listed)
        listed = graph.op("Where", is_cold, graph.op("Add", below_cold, num_own), hot)
        unlisted = graph.op("Add", graph.op("Sub", ids, below_hot), num_own)
        has_rest = graph.constant([bool(value) for value in own.has_rest], bool)
        cold = graph.op("Where", has_rest, listed, unlisted)
        return graph.op("Where", is_hot, below_hot, cold), num_own

    def _search(self, ids: str, lists: JoinedTables, lengths: Sequence[int]) -> tuple[str, str]:
        """For each id, how many entries of its sorted list are below it, and whether the list has it; by bisection."""
        graph, size = self.graph, sum(len(part) for part in lists.tables)
        if not size:
            return graph.op("Mul", ids, graph.constant(0)), graph.op("Less", ids, graph.constant(0))
        weight, length = graph.weight(lists.name, lists.tables), graph.constant(lengths)
        last, one = graph.constant(size - 1), graph.constant(1)

        def entry(position: str) -> str:
            return graph.op("Gather", weight, graph.op("Min", self._joined_row(position, lists), last), axis=0)

        below = graph.op("Mul", ids, graph.constant(0))
        for step in reversed(range(max(lengths).bit_length())):
            further = graph.op("Add", below, graph.constant(2**step))
            is_below = graph.op("Less", entry(graph.op("Sub", further, one)), ids)
            inside = graph.op("LessOrEqual", further, length)
            below = graph.op("Where", graph.op("And", is_below, inside), further, below)
        found = graph.op("And", graph.op("Equal", entry(below), ids), graph.op("Less", below, length))
        return below, found

    def _mixed(self, number: str, bits: int) -> str:
        """``renumbering.mixed_numbers`` of numbers in ``[0, 2**bits)``; shifts are done as divisions."""
        graph = self.graph
        mask, divisor = graph.constant(2**bits - 1), graph.constant(2 ** (bits // 2 + 1))
        for factor in MIXING_FACTORS:
            number = graph.op("BitwiseXor", number, graph.op("Div", number, divisor))
            number = graph.op("BitwiseAnd", graph.op("Mul", number, graph.constant(factor)), mask)
        return graph.op("BitwiseXor", number, graph.op("Div", number, divisor))

    def _mixed_raw(self, ids: str) -> str:
        """The low 63 bits of ``hashing.mix``; shifts are done on unsigned integers, which ONNX requires."""
        graph = self.graph

        def shifted(value: str, bits: int) -> str:
            right = graph.op("BitShift", graph.cast(value, torch.uint64), graph.constant(bits, "u8"), direction="RIGHT")
            return graph.cast(right, torch.int64)

        ids = graph.op("Add", ids, graph.constant(hashing.GOLDEN))
        for shift, multiplier in hashing.ROUNDS:
            mixed = graph.op("BitwiseXor", ids, shifted(ids, shift))
            ids = graph.op("Mul", mixed, graph.constant(multiplier))
        mixed = graph.op("BitwiseXor", ids, shifted(ids, hashing.LAST_SHIFT))
        return graph.op("BitwiseAnd", mixed, graph.constant(2**63 - 1))

    def _joined_row(self, row: str, rows: JoinedTables) -> str:
        """The row in the joined tables, from the row in the table of each feature."""
        return row if rows.starts is None else self.graph.op("Add", row, self.graph.constant(rows.starts))

    def _gathered(self, rows: JoinedTables, row: str, in_range: str | None = None) -> str:
        """Rows ``[N, G, w]`` of the stored tables, as numbers; ``row`` counts from the start of each table.

        If ``in_range`` is given, ids for which it is False read a row of NaN that is appended to the tables.
        """
        graph = self.graph
        row = self._joined_row(row, rows)
        if in_range is not None:
            row = graph.op("Where", in_range, row, graph.constant(sum(len(table) for table in rows.tables)))
        if self.tables.bits:
            return self._dequantized(rows, row, in_range is not None)
        tables = rows.tables if in_range is None else [*rows.tables, torch.full_like(rows.tables[0][:1], torch.nan)]
        numbers = graph.op("Gather", graph.weight(rows.name, tables), row, axis=0)
        return numbers if self.tables.stored.dtype == graph.compute else graph.cast(numbers, graph.compute)

    def _dequantized(self, rows: JoinedTables, row: str, with_nan: bool = False) -> str:
        """Dequantized rows. Codes, scales and zero points become separate weights: a graph cannot reinterpret bytes."""
        graph, width, bits = self.graph, self.tables.width, self.tables.bits
        size = code_bytes(width, bits)
        pieces = [table.view(len(table), rows.pitch, size + 4) for table in rows.tables]
        parts = [piece[..., :size].contiguous() for piece in pieces]
        codes = graph.weight(f"{rows.name}_codes", [*parts, parts[0][:1]] if with_nan else parts)
        scales = [piece[..., size : size + 2].contiguous().view(torch.float16) for piece in pieces]
        zeros = [piece[..., size + 2 :].contiguous().view(torch.int16).to(torch.uint8) for piece in pieces]
        if with_nan:
            scales, zeros = [*scales, torch.full_like(scales[0][:1], torch.nan)], [*zeros, zeros[0][:1]]
        code = graph.cast(graph.op("Gather", codes, row, axis=0), graph.compute)  # [N, G, pitch, bytes]
        if bits == 4:
            high = graph.op("Floor", graph.op("Div", code, graph.scalar(16.0)))
            low = graph.op("Sub", code, graph.op("Mul", high, graph.scalar(16.0)))
            last = graph.constant([4])
            pair = graph.op("Concat", *(graph.op("Unsqueeze", half, last) for half in (low, high)), axis=4)
            code = graph.op("Reshape", pair, graph.constant([0, 0, 0, 2 * size]))
        if size * 8 // bits != width:
            code = graph.op("Slice", code, graph.constant([0]), graph.constant([width]), graph.constant([3]))
        scale = graph.op("Gather", graph.weight(f"{rows.name}_scales", scales), row, axis=0)  # [N, G, pitch, 1]
        zero = graph.op("Gather", graph.weight(f"{rows.name}_zeros", zeros), row, axis=0)
        numbers = graph.op("Sub", code, graph.cast(zero, graph.compute))
        numbers = graph.op("Mul", numbers, graph.cast(scale, graph.compute))
        return graph.op("Reshape", numbers, graph.constant([0, 0, rows.pitch * width]))

    def _buckets(self, number: str, buckets: Buckets) -> str:
        """The rows or networks ``[N, G]`` of numbers, counted from the start of each table."""
        graph, maps = self.graph, buckets.maps
        if maps is not None:
            number = graph.op("Gather", graph.weight(maps.name, maps.tables), self._joined_row(number, maps), axis=0)
        if buckets.strides is not None:
            number = graph.op("Div", number, graph.constant(buckets.strides))
        return number if buckets.sizes is None else graph.op("Mod", number, graph.constant(buckets.sizes))

    def _paths(self, vectors: str, number: str, group: FeatureGroup) -> str:
        """Vectors after the path networks (section 4.1): the weights of each id are gathered, one product per layer."""
        graph, inner = self.graph, self.graph.constant([2])
        activation = {"relu": "Relu", "sigmoid": "Sigmoid"}[str(group.activation)]
        vectors = graph.op("Unsqueeze", vectors, inner)  # [N, G, 1, D]
        for level in group.levels:
            network = self._joined_row(self._buckets(number, level.buckets), level.weights[0])
            for layer, pair in enumerate(zip(level.weights, level.biases, strict=True)):
                weight, bias = (
                    graph.weight(rows.name, [values.to(graph.compute) for values in rows.tables]) for rows in pair
                )
                chosen, shift = (graph.op("Gather", value, network, axis=0) for value in (weight, bias))
                vectors = graph.op("Add", graph.op("MatMul", vectors, chosen), graph.op("Unsqueeze", shift, inner))
                vectors = vectors if layer == len(level.weights) - 1 else graph.op(activation, vectors)
        return graph.op("Squeeze", vectors, inner)

    def _filled(self, composed: ComposedNodes) -> str:
        """The vectors, with zeros for padding, and NaN or zeros (``unknown_vector``) for ids out of range."""
        graph, vectors = self.graph, composed.vectors
        if composed.in_range is not None:
            fill = graph.scalar(float("nan") if self.unknown_vector == "nan" else 0.0)
            mask = graph.op("Unsqueeze", composed.in_range, graph.constant([2]))
            vectors = graph.op("Where", mask, vectors, fill)
        if composed.is_padding is not None:
            mask = graph.op("Unsqueeze", composed.is_padding, graph.constant([2]))
            vectors = graph.op("Where", mask, graph.scalar(0.0), vectors)
        return vectors

    def bag(self, ids: str, offsets: str, weights: str | None) -> str:
        """Pooled vectors ``[B, sum W]`` of jagged ``ids`` ``[V]``; ``offsets`` ``[F * B + 1]``, feature by feature."""
        graph, features = self.graph, len(self.tables.features)
        bag, batch = self._bag_numbers(ids, offsets, features)
        pooled = []
        for feature in range(features):
            own_ids, own_bag, own_weights = ids, bag, weights
            if features > 1:
                first, last = (graph.op("Mul", batch, graph.constant([k])) for k in (feature, feature + 1))
                limits = [graph.op("Gather", offsets, bag_end, axis=0) for bag_end in (first, last)]
                own_ids, own_bag = (graph.op("Slice", values, *limits) for values in (ids, bag))
                own_bag = graph.op("Sub", own_bag, first)
                own_weights = None if weights is None else graph.op("Slice", weights, *limits)
            column = graph.op("Unsqueeze", own_ids, graph.constant([1]))
            composed = self._compose(column, group_of(self.tables, [feature]))
            pooled.append(self._pooled(composed, own_bag, batch, own_weights))
        return pooled[0] if len(pooled) == 1 else graph.op("Concat", *pooled, axis=1)

    def bag_of_rows(self, ids: str, weights: str | None) -> str:
        """Pooled vectors ``[B, W]`` of ids ``[B, L]`` of the only table; each row is a bag."""
        graph, column = self.graph, self.graph.constant([-1])
        batch, length = graph.split(graph.op("Shape", ids), 2, axis=0)
        flat = graph.op("Reshape", ids, column)
        last = graph.op("Mul", batch, length)
        scalars = [graph.constant(0), graph.op("Squeeze", last, graph.constant([0])), graph.constant(1)]
        longer = graph.op("Max", length, graph.constant([1]))  # do not divide by 0 where bags are empty
        bag = graph.op("Div", graph.op("Range", *scalars), longer)
        composed = self._compose(graph.op("Unsqueeze", flat, graph.constant([1])), group_of(self.tables, [0]))
        flat_weights = None if weights is None else graph.op("Reshape", weights, column)
        return self._pooled(composed, bag, batch, flat_weights)

    def _bag_numbers(self, ids: str, offsets: str, features: int) -> tuple[str, str]:
        """The bag of each id ``[V]``, computed as the number of bags that end before it; and the batch size ``[1]``."""
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

    def _pooled(self, composed: ComposedNodes, bag: str, batch: str, weights: str | None) -> str:
        """Pool the vectors ``[V, 1, W]`` of one table into ``[B, W]``; ids past the last bag are ignored."""
        graph, one, zero = self.graph, self.graph.constant([1]), self.graph.scalar(0.0)
        bags = graph.op("Add", batch, one)  # plus one for ids past the last bag
        index = graph.op("Unsqueeze", bag, one)

        def scattered(values: str, start: str, columns: str, reduction: str) -> str:
            initial = graph.op("Expand", start, graph.op("Concat", bags, columns, axis=0))
            reduced = graph.op("ScatterND", initial, index, values, reduction=reduction)
            return graph.op("Slice", reduced, graph.constant([0]), graph.constant([-1]))

        def count(mask: str) -> str:
            return scattered(graph.cast(mask, graph.compute), zero, one, "add")

        in_range = graph.op("Equal", index, index) if composed.in_range is None else composed.in_range
        counted = in_range
        if composed.is_padding is not None:
            counted = graph.op("And", counted, graph.op("Not", composed.is_padding))
        start = graph.scalar(-torch.inf) if self.mode == "max" else zero
        vectors = graph.op("Where", counted, graph.op("Squeeze", composed.vectors, one), start)
        if weights is not None:
            vectors = graph.op("Mul", vectors, graph.op("Unsqueeze", weights, one))
        columns = graph.op("Slice", graph.op("Shape", vectors), one, graph.constant([2]))
        pooled = scattered(vectors, start, columns, "max" if self.mode == "max" else "add")
        if self.mode == "mean":
            pooled = graph.op("Div", pooled, graph.op("Max", count(counted), graph.scalar(1.0)))
        if self.mode == "max":
            pooled = graph.op("Where", graph.op("Greater", count(counted), zero), pooled, zero)
        if self.unknown_vector == "nan" and composed.in_range is not None:
            invalid = graph.op("Greater", count(graph.op("Not", composed.in_range)), zero)
            pooled = graph.op("Where", invalid, graph.scalar(float("nan")), pooled)
        return pooled


def _is_sum_or_product(group: FeatureGroup) -> bool:
    """Whether a NaN row in the first stored table makes the vector NaN, and no other group reads that table."""
    alone = group.own is None and group.mixing is None and not group.levels
    return alone and (len(group.rows) == 1 or group.operation in ("add", "mult"))
