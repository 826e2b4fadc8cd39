"""Quantized rows, 8 or 4 bits per number, for inference."""

import warnings
from typing import Literal

import torch
from torch import Tensor, nn

from ..ops.codes import BITS, LARGEST_NARROW_SCALE, NARROW, quantize, stored_shape
from ..ops.memory import in_huge_pages
from .holders import exchange_, optimizers_of
from .lookup import Tables, tables_in

AT_A_TIME = 2**16  # rows quantized at a time


def quantize_(module: nn.Module, bits: Literal[8, 4] = 8) -> nn.Module:
    """Store the rows of every quorem module in ``module`` in 8 or 4 bits per number, in place.

    Each row has its own scale; 16 rows of at most 8 numbers share one. At D = 16 a row takes 20 bytes with 8 bits, 12
    bytes with 4 bits, and 64 bytes in float32; a narrow row of 4 numbers takes 4, 2 and 16 bytes. The lookup
    dequantizes rows. The matrices of narrow rows are rounded to bfloat16. Rows and matrices no longer take gradients;
    an optimizer that holds them loses them, with a warning. Networks of path-based tables are not quantized. Afterwards
    ``module.half()`` and the like change the dtype of these networks and of the output vectors.

    Args:
        module: an ``Embedding``, ``EmbeddingBag``, ``EmbeddingCollection``, or a model that contains some.
        bits: bits per number.

    Returns:
        ``module``.

    Raises:
        TypeError: if ``module`` is not a module.
        ValueError: if ``bits`` is neither 8 nor 4, there are no tables, or a table is quantized already, is updated in
            backward, is not finite, or has a row whose numbers are too far apart. In these cases nothing is changed.

    >>> from quorem import QR, Embedding
    >>> table = quantize_(Embedding(1000, 16, QR(4)), bits=8)
    >>> table(torch.tensor([7])).shape, table.stored.shape, table.stored.dtype
    (torch.Size([1, 16]), torch.Size([254, 20]), torch.uint8)
    """
    members = tables_in(module)
    if bits not in BITS or not isinstance(bits, int):
        raise ValueError(f"bits ({bits!r}) must be 8 or 4")
    for tables in members:
        if tables.bits:
            raise ValueError(f"module has tables of {tables.bits} bits already: quantize_ takes float ones")
        if tables.updates.collector is not None:
            raise ValueError("module has a table that is updated in backward: remove() that optimizer first")
        for name, table in tables.named_tables():
            if not table.is_meta:
                _check_range(name, table.detach().reshape(-1, tables.width), bits)
    optimizers = optimizers_of(p for tables in members for p in (tables.stored, *tables.projections))
    quantized: dict[nn.Parameter, nn.Parameter] = {}
    for tables in members:
        if tables.stored not in quantized:
            quantized[tables.stored] = _quantized(tables, bits)
        for matrix in tables.projections:
            halved = matrix.detach().bfloat16() if matrix.itemsize > 2 else matrix.detach()
            quantized.setdefault(matrix, nn.Parameter(halved, requires_grad=False))
        tables.vector_dtype, tables.bits = tables.stored.dtype, bits
    for tables in members:
        tables.stored = quantized[tables.stored]
        if tables.narrow:
            tables.projections = nn.ParameterList([quantized[matrix] for matrix in tables.projections])
        tables.register_integers()
    for optimizer in optimizers:
        exchange_(optimizer, dict.fromkeys(quantized, ()))
        text = f"{type(optimizer).__name__} no longer trains the tables: rows of {bits} bits take no gradient"
        warnings.warn(text, stacklevel=2)
    return module


def _check_range(name: str, rows: Tensor, bits: int) -> None:
    """Raise ValueError unless the numbers of ``rows`` are finite, and the scale of each row can be stored."""
    narrow = rows.shape[1] <= NARROW
    limit = (2**bits - 1) * torch.finfo(torch.float16).max
    if narrow:
        limit = (2 ** (bits - 1) - 1) * LARGEST_NARROW_SCALE
    for block in rows.split(AT_A_TIME):
        if not block.isfinite().all():
            raise ValueError(f"{name} must be finite to be quantized")
        low, high = block.amin(1).clamp(max=0).double(), block.amax(1).clamp(min=0).double()
        span = torch.maximum(-low, high) if narrow else high - low
        if (span > limit).any():
            how = "numbers up to {:.3g}" if narrow else "numbers up to {:.3g} apart in a row"
            raise ValueError(f"{name} has {how.format(span.max())}: {bits} bits take {limit:.3g}")


@torch.no_grad()
def _quantized(tables: Tables, bits: int) -> nn.Parameter:
    stored = tables.stored
    shape = stored_shape(len(stored), tables.width, bits)
    rows = in_huge_pages(torch.empty(shape, dtype=torch.uint8, device=stored.device))
    if not stored.is_meta:
        taken = stored_shape(AT_A_TIME, tables.width, bits)[0]
        for source, target in zip(stored.split(AT_A_TIME), rows.split(taken), strict=True):
            target.copy_(quantize(source, bits))
    return nn.Parameter(rows, requires_grad=False)
