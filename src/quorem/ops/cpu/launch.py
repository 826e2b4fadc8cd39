"""From tensors to what the kernels take: the ids of a batch and the rows that they read."""

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..codes import NARROW, row_bytes
from ..layout import Layout
from ..lookup import CodeOptions
from ..rows import IdBatch, accumulator
from ..words import Words, words_on_cpu
from . import lookup
from .pages import in_huge_pages
from .source import Source, source_fits

# What the kernels take as ``kind`` (see ``vector``).
KINDS = {
    torch.float32: np.float32(0),
    torch.float64: np.float64(0),
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
}
# Of quantized rows, by their bits and whether they are narrow.
CODE_KINDS = {(8, False): np.uint8(0), (4, False): np.int8(0), (8, True): np.uint32(0), (4, True): np.int32(0)}
MOST_PARTITIONS = 128  # kernels keep the rows of a block on the stack, 1 KB for each partition
COPIED_BY_FEATURE = 1 << 20  # bytes of ids from which on they are copied by feature, as gradients are summed
_NO_CODES = CodeOptions()


@dataclass(eq=False)
class KernelInput:
    """The ids of a batch and the rows that they read, as kernels take them."""

    kind: Any  # of the rows
    source: tuple[int, ...]  # a ``Source``
    size: int  # B
    num_ids: int  # of all features
    longest: int  # the most ids of one feature
    memory: tuple[Any, ...]  # keeps alive what ``source`` points to


def kernel_input(
    batch: IdBatch,
    stored: Tensor,
    layout: Layout,
    grad: Tensor | None = None,
    check: bool = True,
    codes: CodeOptions = _NO_CODES,
) -> KernelInput | None:
    """What kernels take of a batch; None if they cannot take it.

    Args:
        batch: the ids.
        stored: what they read from.
        layout: of ``stored``.
        grad: of the vectors, where there is one.
        check: raise ValueError if ``stored`` does not have all rows of its layout; else the kernel has to look.
        codes: of ``stored``, where its rows are quantized.
    """
    ids, offsets, sample_weights, mean = batch
    features, width = layout.spans.shape[0], codes.get("width", stored.shape[1])
    if offsets is None:
        size, fits = len(ids), ids.dim() == 2 and ids.shape[1] == features
    else:
        size, rest = divmod(len(offsets) - 1, features)
        fits = ids.dim() == 1 and not rest and (sample_weights is None or sample_weights.shape == ids.shape)
    kind = _kind(ids, stored, layout, grad, size, codes)
    if kind is None or not fits:
        return None
    stored = stored.contiguous()
    if offsets is None:
        if grad is not None and ids.nbytes >= COPIED_BY_FEATURE:
            ids = in_huge_pages(ids.new_empty(ids.shape[::-1])).copy_(ids.t()).t()
        source, words = _source(stored, width, layout, ids, *ids.stride(), size, 0, 0, 0)
        if check and not source_fits(source):
            raise_misfit(source)
        return KernelInput(kind, source, size, size * features, size, (ids, stored, words))
    ids, offsets = ids.contiguous(), offsets.long().contiguous()
    entries = ids.new_empty(ids.shape, dtype=torch.int32)  # the batch entry of each id
    factors = stored.new_empty(ids.shape, dtype=accumulator(stored))
    weights = None if sample_weights is None else sample_weights.to(factors.dtype).contiguous()
    jagged = (offsets.data_ptr(), entries.data_ptr(), factors.data_ptr())
    source, words = _source(stored, width, layout, ids, 1, 0, size, *jagged)
    if not source_fits(source):
        raise_misfit(source)
    if not lookup.fill_bags(kind, source, 0 if weights is None else weights.data_ptr(), len(ids), mean):
        return None
    longest = int(offsets[::size].diff().max()) if size else 0
    return KernelInput(kind, source, size, len(ids), longest, (ids, stored, words, offsets, entries, factors))


def _kind(
    ids: Tensor, stored: Tensor, layout: Layout, grad: Tensor | None, size: int, codes: CodeOptions
) -> Any | None:
    """The kind of the rows; None if kernels cannot take the arguments."""
    kind: Any = KINDS.get(stored.dtype)
    if codes:
        width, bits = codes["width"], codes["bits"]
        fits = stored.dtype == torch.uint8 and stored.shape[1] == row_bytes(width, bits)
        kind = CODE_KINDS.get((bits, width <= NARROW)) if fits else None
    if ids.dtype not in (torch.int32, torch.int64):
        return None
    for tensor in layout:
        if not tensor.is_contiguous():
            return None
    num_slots, num_partitions, _ = layout.parts.shape
    if num_partitions > MOST_PARTITIONS:
        return None
    if grad is not None and (grad.dtype != stored.dtype or grad.shape != (size, num_slots, stored.shape[1])):
        return None
    return kind


def _source(
    stored: Tensor, width: int, layout: Layout, ids: Tensor, *rest: int
) -> tuple[tuple[int, ...], Words | None]:
    """The fields of ``Source`` in their order, of which ``rest`` are those from ``entry_stride`` on; and its words.

    Raises:
        TypeError: if a tensor of the layout is not int64; ``ranks`` may be int32.
    """
    slots, parts, maps, spans, ranks = layout
    dtypes = slots.dtype == parts.dtype == maps.dtype == spans.dtype == torch.int64
    if not dtypes or ranks.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"layout ({', '.join(str(t.dtype) for t in layout)}) must be torch.int64")
    slots_address = slots.data_ptr()
    tensors = (slots_address, parts.data_ptr(), maps.data_ptr(), spans.data_ptr(), ranks.data_ptr())
    sizes = (*parts.shape[:2], maps.shape[0], spans.shape[0], ranks.shape[0], int(ranks.dtype == torch.int64))
    words, searched = None, (0, slots_address, 0)
    if ranks.shape[0]:
        words = words_on_cpu(layout)
        searched = (words.maps.data_ptr(), words.slots.data_ptr(), words.levels)
    rows = (stored.data_ptr(), stored.shape[0], width)
    return (*rows, *tensors, *sizes, *searched, ids.data_ptr(), int(ids.dtype == torch.int64), *rest), words


def raise_misfit(source: tuple[int, ...]) -> NoReturn:
    """Say that ``stored`` and its layout do not belong together."""
    rows = Source(*source).num_rows
    raise ValueError(f"stored ({rows} rows) must have every row that its layout names: was one of them replaced?")
