"""Lookups in rows stored in 8 or 4 bits a number (``codes``): the truth, in plain PyTorch."""

import torch
from torch import Tensor

from .codes import dequantize
from .layout import Layout
from .lookup import compose_vectors, count_invalid_, pool, with_identity
from .rows import bag_reads, lookup_reads, raise_out_of_range


def lookup_quantized(
    ids: Tensor, stored: Tensor, layout: Layout, *, width: int, bits: int, dtype: torch.dtype, names: str = ""
) -> Tensor:
    """``lookup`` in rows as bytes."""
    raise_out_of_range(ids, None, layout, names)
    return _composed(ids, stored, layout, width, bits, dtype)


def lookup_quantized_counting(
    ids: Tensor,
    stored: Tensor,
    layout: Layout,
    invalid: Tensor,
    *,
    width: int,
    bits: int,
    dtype: torch.dtype,
    names: str = "",
) -> Tensor:
    """``lookup_counting`` in rows as bytes."""
    count_invalid_(ids, None, invalid, layout)
    return _composed(ids, stored, layout, width, bits, dtype)


def _composed(ids: Tensor, stored: Tensor, layout: Layout, width: int, bits: int, dtype: torch.dtype) -> Tensor:
    reads = lookup_reads(ids, layout)
    vectors = dequantize(stored[reads.rows.clamp(min=0)], width, bits)
    return compose_vectors(with_identity(vectors, reads), reads).to(dtype)


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
) -> Tensor:
    """``bag`` in rows as bytes."""
    raise_out_of_range(ids, offsets, layout, names)
    reads, bags = bag_reads(ids, offsets, layout)
    vectors = dequantize(stored[reads.rows.clamp(min=0)], width, bits)
    vectors = compose_vectors(with_identity(vectors, reads), reads)
    return pool(vectors, reads, bags, offsets, sample_weights, layout, mean).to(dtype)
