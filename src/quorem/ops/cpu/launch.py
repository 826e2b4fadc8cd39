"""From tensors to what the kernels take: the ids of a batch and the rows that they read; and lookups.

A small batch runs on the calling thread, a large one on as many threads as torch may use.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack, cast

import numpy as np
import torch
from torch import Tensor

from ..codes import NARROW, row_bytes
from ..layout import Layout, check_rows, num_rows_read
from ..lookup import CodeOptions, count_invalid_
from ..per_tensor import PerTensor
from ..rows import IdBatch, accumulator, raise_out_of_range
from ..words import with_words
from . import lookup as kernels
from .pages import in_huge_pages
from .source import BLOCK
from .threads import run_tasks, threads_for
from .vector import columns

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
STREAMED = 1 << 23  # bytes of output from which on it is written past the caches
_NO_CODES = CodeOptions()


@dataclass(eq=False)
class KernelInput:
    """The ids of a batch and the rows that they read, as kernels take them."""

    kind: Any  # of the rows
    width: Any  # W, as ``columns`` gives it
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
    codes: CodeOptions = _NO_CODES,
) -> KernelInput | None:
    """What kernels take of a batch; None if they cannot take it.

    Args:
        batch: the ids.
        stored: what they read from.
        layout: of ``stored``.
        grad: of the vectors, where there is one.
        codes: of ``stored``, where its rows are quantized.
    """
    ids, offsets, sample_weights, mean = batch
    features, width = layout.spans.shape[0], columns(codes.get("width", stored.shape[1]))
    if offsets is None:
        size, fits = ids.shape[0], ids.dim() == 2 and ids.shape[1] == features
    else:
        size, rest = divmod(len(offsets) - 1, features)
        fits = ids.dim() == 1 and not rest and (sample_weights is None or sample_weights.shape == ids.shape)
    kind = _kind(ids, stored, layout, grad, size, codes)
    known = kernel_layout(layout) if fits and kind is not None else None
    if known is None:
        return None
    stored = stored.contiguous()
    check_rows(stored, known.num_rows)
    rows = (stored.data_ptr(), stored.shape[1] * stored.itemsize, *known.fields)
    if offsets is None:
        source = (*rows, ids.data_ptr(), int(ids.dtype == torch.int64), *ids.stride(), size, 0, 0, 0)
        return KernelInput(kind, width, source, size, size * features, size, (ids, stored, known))
    ids, offsets = ids.contiguous(), offsets.long().contiguous()
    entries = ids.new_empty(ids.shape, dtype=torch.int32)  # the batch entry of each id
    factors = stored.new_empty(ids.shape, dtype=accumulator(stored))
    weights = None if sample_weights is None else sample_weights.to(factors.dtype).contiguous()
    jagged = (offsets.data_ptr(), entries.data_ptr(), factors.data_ptr())
    source = (*rows, ids.data_ptr(), int(ids.dtype == torch.int64), 1, 0, size, *jagged)
    if not kernels.fill_bags(kind, source, 0 if weights is None else weights.data_ptr(), len(ids), mean):
        return None
    longest = int(offsets[::size].diff().max()) if size else 0
    return KernelInput(kind, width, source, size, len(ids), longest, (ids, stored, known, offsets, entries, factors))


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
    if grad is not None and (
        grad.dtype != stored.dtype or grad.shape != (size, layout.slots.shape[0], stored.shape[1])
    ):
        return None
    return kind


class KernelLayout(NamedTuple):
    """A layout that was checked, as kernels take it."""

    stamp: tuple[int, ...]
    num_rows: int  # that ``stored`` must have
    fields: tuple[int, ...]  # of ``Source``, from ``slots`` to ``integer``
    maps: Tensor  # with the words of lists
    kept: tuple[Tensor, ...]  # with the addresses of ``fields`` and ``stamp``; not ``layout.slots``: this dies with it


_layouts = PerTensor()  # layout.slots -> KernelLayout


def kernel_layout(layout: Layout) -> KernelLayout | None:
    """A layout as kernels take it, kept until one of its tensors changes; None if they cannot take it.

    Raises:
        TypeError, ValueError: as ``num_rows_read``.
    """
    stamp, known = _stamp(layout), _layouts.get(layout.slots)
    if known is not None and known.stamp == stamp:
        return cast(KernelLayout, known)
    if layout.parts.shape[1] > MOST_PARTITIONS or not all(t.is_contiguous() for t in layout):
        return None
    num_rows, words = num_rows_read(layout), with_words(layout, layout.slots)
    tensors = (words.slots, layout.parts, words.maps, layout.spans)
    integer = np.int32(0) if layout.slots.dtype == torch.int32 else np.int64(0)
    sizes = (words.levels, *layout.parts.shape[:2], layout.spans.shape[0], integer)
    fields = (*(tensor.data_ptr() for tensor in tensors), *sizes)
    kept = (*layout[1:], words.slots) if words.levels else layout[1:]
    return _layouts.set(layout.slots, KernelLayout(stamp, num_rows, fields, words.maps, kept))


def _stamp(layout: Layout) -> tuple[int, ...]:
    """Numbers of which one changes if a tensor is written to or its memory is exchanged."""
    slots, parts, maps, spans, ranks = layout
    addresses = (slots.data_ptr(), parts.data_ptr(), maps.data_ptr(), spans.data_ptr(), ranks.data_ptr())
    try:
        return (slots._version, parts._version, maps._version, spans._version, ranks._version, *addresses)
    except RuntimeError:  # tensors that were made in inference mode do not count writes
        return (*(hash(tensor.numpy().tobytes()) for tensor in layout), *addresses)


def lookup(
    batch: IdBatch,
    stored: Tensor,
    layout: Layout,
    invalid: Tensor | None = None,
    *,
    names: str,
    **codes: Unpack[CodeOptions],
) -> Tensor:
    """``ops.lookup.lookup``, or IndexError for an id out of range."""
    inputs = kernel_input(batch, stored, layout, codes=codes)
    if inputs is None:
        return NotImplemented
    dtype = wanted = codes.get("dtype", stored.dtype)
    if codes and wanted is torch.float64:
        dtype = torch.float32  # what kernels write if rows are codes
    shape = (inputs.size, layout.parts.shape[0], codes.get("width", stored.shape[1]))
    out = in_huge_pages(stored.new_empty(shape, dtype=dtype))
    if _write(inputs, layout, out, single=batch.offsets is None):
        if invalid is None:
            raise_out_of_range(batch, layout, names)
        else:
            count_invalid_(batch, invalid, layout)
    return out if dtype is wanted else out.double()


def _write(inputs: KernelInput, layout: Layout, out: Tensor, single: bool) -> bool:
    """Write the vectors of single ids, or the pooled vectors of bags. Returns whether an id was out of range."""
    (slots, partitions, _), width, address = layout.parts.shape, out.shape[2], out.data_ptr()
    streamed = out.nbytes >= STREAMED and (address | width * out.itemsize) % 64 == 0
    fixed = (inputs.kind, inputs.width, inputs.source, KINDS[out.dtype], address)

    def run(first: int, last: int) -> bool:
        if single:
            invalid: bool = kernels.lookup(*fixed, streamed, first, last)
        else:
            carry = out.new_empty(width, dtype=accumulator(out))
            invalid = kernels.bag(*fixed, carry.data_ptr(), first, last)
        return invalid

    threads = threads_for(inputs.num_ids * slots // layout.spans.shape[0] * width * partitions)
    return run(0, inputs.size) if threads == 1 else run_tasks(run, ranges(inputs.size, threads), threads)


def ranges(n: int, threads: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """``n`` entries in ranges of whole blocks, four a thread, so that a slow thread can leave some to the others."""
    step = n if threads == 1 else -(-n // (4 * threads * BLOCK)) * BLOCK
    return ((first, min(first + step, start + n)) for first in range(start, start + n, max(step, 1)))
