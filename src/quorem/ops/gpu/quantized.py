"""Lookups and bags of rows stored in 8 or 4 bits a number: the kernels of ``lookup``, which take them apart.

``ops.quantized`` has the format of a row and is the truth.
"""

from typing import Any

import torch
from torch import Tensor

from ..layout import Layout
from ..quantized import BITS, code_bytes
from .host import IdBatch, checked_rows
from .lookup import StoredRows, bag_rows, lookup_rows


def lookup_quantized(
    ids: Tensor, stored: Tensor, layout: Layout, *, width: int, bits: int, dtype: torch.dtype, names: str = ""
) -> Any:
    """``ops.quantized.lookup_quantized`` in one launch."""
    if not _readable(stored, width, bits):
        return NotImplemented
    return lookup_rows(ids, StoredRows(stored, width, bits), layout, checked_rows(stored, layout), None, dtype)


def bag_quantized(
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    stored: Tensor,
    layout: Layout,
    *,
    width: int,
    bits: int,
    dtype: torch.dtype,
    mean: bool,
    names: str = "",
) -> Any:
    """``ops.quantized.bag_quantized`` in one launch."""
    if not _readable(stored, width, bits):
        return NotImplemented
    batch, rows = IdBatch(ids, offsets, sample_weights, mean), StoredRows(stored, width, bits)
    return bag_rows(batch, rows, layout, checked_rows(stored, layout), dtype)


def _readable(stored: Tensor, width: int, bits: int) -> bool:
    """Whether the kernels can address the bytes."""
    fits = bits in BITS and stored.dtype == torch.uint8 and stored.shape[1] == code_bytes(width, bits) + 4
    return fits and stored.is_contiguous() and stored.data_ptr() % 2 == 0
