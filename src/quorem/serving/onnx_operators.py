"""``composition.Operators`` as nodes of an ONNX graph."""

from collections.abc import Sequence

import torch

from .. import hashing
from ..ops.codes import fields_of
from ..tables import Tables
from .groups import JoinedTables
from .onnx_graph import Graph, Operand, Value


class GraphOperators:
    """``composition.Operators`` that add nodes to a graph.

    Args:
        graph: the graph.
        tables: the module whose tables are looked up.
    """

    def __init__(self, graph: Graph, tables: Tables) -> None:
        self.graph, self.width, self.bits = graph, tables.width, tables.bits

    def constant(self, values: Sequence[int]) -> Value:
        return self.graph.constant(values)

    def where(self, mask: Value, value: Operand, other: Operand) -> Value:
        return self.graph.op("Where", mask, value, other)

    def column(self, mask: Value) -> Value:
        return self.graph.op("Unsqueeze", mask, [2])

    def clamped(self, ids: Value, last: Sequence[int]) -> Value:
        return self.graph.op("Min", self.graph.op("Max", ids, 0), last)

    def hashed(self, ids: Value, sizes: Sequence[int]) -> Value:
        """Bits are shifted in unsigned integers, as ONNX requires."""
        graph = self.graph

        def shifted(value: Value, bits: int) -> Value:
            unsigned = graph.cast(value, torch.uint64)
            return graph.cast(
                graph.op("BitShift", unsigned, graph.constant(bits, "u8"), direction="RIGHT"), torch.int64
            )

        ids = ids + hashing.GOLDEN
        for shift, multiplier in hashing.ROUNDS:
            ids = (ids ^ shifted(ids, shift)) * multiplier
        return ((ids ^ shifted(ids, hashing.LAST_SHIFT)) & (2**63 - 1)) % sizes

    def entries(self, tables: JoinedTables, row: Value) -> Value:
        last = sum(map(len, tables.tables)) - 1
        row = self.graph.op("Min", self._joined_row(tables, row), last)
        return self.graph.op("Gather", self.graph.weight(tables.name, tables.tables), row, axis=0)

    def numbers(self, tables: JoinedTables, row: Value, in_range: Value | None = None) -> Value:
        """With ``in_range``, a row of NaN is appended to the tables."""
        graph, parts = self.graph, tables.tables
        row = self._joined_row(tables, row)
        if in_range is not None:
            row = self.where(in_range, row, sum(map(len, parts)))
        if parts[0].dtype == torch.uint8:
            return self._dequantized(tables, row, in_range is not None)
        dtype = parts[0].dtype
        parts = parts if in_range is None else [*parts, torch.full_like(parts[0][:1], torch.nan)]
        numbers = graph.op("Gather", graph.weight(tables.name, parts), row, axis=0)
        return numbers if dtype == graph.compute else graph.cast(numbers, graph.compute)

    def concatenated(self, vectors: Sequence[Value]) -> Value:
        return vectors[0] if len(vectors) == 1 else self.graph.op("Concat", *vectors, axis=2)

    def product(self, vectors: Value, matrices: Value) -> Value:
        product = self.graph.op("MatMul", self.graph.op("Unsqueeze", vectors, [2]), matrices)
        return self.graph.op("Squeeze", product, [2])

    def activated(self, vectors: Value, activation: str | None) -> Value:
        return self.graph.op({"relu": "Relu", "sigmoid": "Sigmoid"}[str(activation)], vectors)

    def _joined_row(self, tables: JoinedTables, row: Value) -> Value:
        return row if tables.starts is None else row + tables.starts

    def _dequantized(self, rows: JoinedTables, row: Value, with_nan: bool) -> Value:
        """Dequantized rows. Codes, scales and zero points become separate weights: a graph cannot reinterpret bytes."""
        graph, width, bits = self.graph, self.width, self.bits
        pieces = [fields_of(table.unflatten(1, (rows.pitch, -1))) for table in rows.tables]
        codes, scales = [piece[0].contiguous() for piece in pieces], [piece[1] for piece in pieces]
        zeros, size = [piece[2].to(torch.uint8) for piece in pieces], codes[0].shape[2]
        if with_nan:
            codes, zeros = [*codes, codes[0][:1]], [*zeros, zeros[0][:1]]
            scales = [*scales, torch.full_like(scales[0][:1], torch.nan)]
        code = graph.op("Gather", graph.weight(f"{rows.name}_codes", codes), row, axis=0)
        code = graph.cast(code, graph.compute)  # [N, G, pitch, bytes]
        if bits == 4:
            high = graph.op("Floor", code / 16.0)
            low = code - high * 16.0
            pair = graph.op("Concat", *(graph.op("Unsqueeze", half, [4]) for half in (low, high)), axis=4)
            code = graph.op("Reshape", pair, [0, 0, 0, 2 * size])
        if size * 8 // bits != width:
            code = graph.op("Slice", code, [0], [width], [3])
        scale = graph.op("Gather", graph.weight(f"{rows.name}_scales", scales), row, axis=0)  # [N, G, pitch, 1]
        zero = graph.op("Gather", graph.weight(f"{rows.name}_zeros", zeros), row, axis=0)
        numbers = (code - graph.cast(zero, graph.compute)) * graph.cast(scale, graph.compute)
        return graph.op("Reshape", numbers, [0, 0, rows.pitch * width])
