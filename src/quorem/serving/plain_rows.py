"""Stored tables and ``composition.Operators`` in plain torch operators.

``member`` is the position in the group of the feature that an id belongs to; it has the shape of the ids or broadcasts
to it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..hashing import mixed_ids
from ..ops.codes import fields_of, unpacked
from .groups import JoinedTables


class PlainRows(nn.Module):
    """Concatenated tables."""

    def __init__(self, rows: JoinedTables) -> None:
        super().__init__()
        # Copied, since an exported program keeps whole storages, and the tables are views of one shared storage.
        self.values = nn.Parameter(torch.cat(rows.tables), requires_grad=False)

    def forward(self, row: Tensor) -> Tensor:
        """The rows at ``row``."""
        return self.values[row]


class QuantizedRows(nn.Module):
    """Concatenated tables of quantized rows: codes, scales and zero points of their pieces (``ops.codes``)."""

    def __init__(self, rows: JoinedTables, width: int, bits: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.bits = width, bits
        codes, scales, zeros = fields_of(torch.cat(rows.tables).unflatten(1, (rows.pitch, -1)))
        self.codes = nn.Parameter(codes.contiguous(), requires_grad=False)
        self.scales = nn.Parameter(scales.to(dtype), requires_grad=False)
        self.zeros = nn.Parameter(zeros.to(dtype), requires_grad=False)

    def forward(self, row: Tensor) -> Tensor:
        """The dequantized rows at ``row``."""
        codes = unpacked(self.codes[row], self.width, self.bits).to(self.scales.dtype)
        return ((codes - self.zeros[row]) * self.scales[row]).flatten(-2)


class TensorOperators:
    """``composition.Operators`` on tensors.

    Args:
        stored: the stored tables by name.
        member: for each id, the position of its feature in the group.
        compute: dtype of the computation.
    """

    def __init__(self, stored: Mapping[str, nn.Module], member: Tensor, compute: torch.dtype) -> None:
        self.stored, self.member, self.compute = stored, member, compute
        self.where = torch.where

    def constant(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.member.device)[self.member]

    def column(self, mask: Tensor) -> Tensor:
        return mask[..., None]

    def clamped(self, ids: Tensor, last: Sequence[int]) -> Tensor:
        return torch.minimum(ids.clamp(min=0), self.constant(last))

    def hashed(self, ids: Tensor, sizes: Sequence[int]) -> Tensor:
        return mixed_ids(ids, self.constant(sizes))

    def entries(self, tables: JoinedTables, row: Tensor) -> Tensor:
        last = sum(map(len, tables.tables)) - 1
        return self.stored[tables.name](self._joined_row(tables, row).clamp(max=last))

    def numbers(self, tables: JoinedTables, row: Tensor, in_range: Tensor | None = None) -> Tensor:
        return self.stored[tables.name](self._joined_row(tables, row)).to(self.compute)

    def concatenated(self, vectors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(vectors), -1)

    def product(self, vectors: Tensor, matrices: Tensor) -> Tensor:
        return (vectors[..., None, :] @ matrices)[..., 0, :]

    def activated(self, vectors: Tensor, activation: str | None) -> Tensor:
        return torch.sigmoid(vectors) if activation == "sigmoid" else torch.relu(vectors)

    def _joined_row(self, tables: JoinedTables, row: Tensor) -> Tensor:
        return row if tables.starts is None else row + self.constant(tables.starts)
