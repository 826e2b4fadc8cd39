"""What the host knows of a layout, so that a launch need not ask the GPU; and whether the kernels can take it."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import layout as column
from ..layout import CLOSED_FORM, MULT, NO_PADDING, UNUSED, Layout, is_plain
from ..per_tensor import PerTensor
from ..rows import accumulator
from .fast_launch import Plan
from .rows import TYPES

WIDEST = 512  # columns that a program holds of a row
LARGEST = 2**62  # of a layout's integers


class IdBatch(NamedTuple):
    """The ids of an op: ``[B, F]``, or jagged ``[V]`` with offsets ``[F * B + 1]``."""

    ids: Tensor
    offsets: Tensor | None = None
    sample_weights: Tensor | None = None
    mean: bool = False

    @property
    def jagged(self) -> bool:
        """Whether there are offsets."""
        return self.offsets is not None

    @property
    def stride(self) -> int:
        """How far apart the ids of one feature lie."""
        return 1 if self.jagged else self.ids.stride(0)

    def contiguous(self) -> "IdBatch":
        """The same with tensors that a kernel can read."""
        offsets, sample_weights = (t if t is None else t.contiguous() for t in (self.offsets, self.sample_weights))
        return IdBatch(self.ids.contiguous(), offsets, sample_weights, self.mean)


@dataclass
class HostLayout:
    """A layout on the host, and what follows from it.

    Each of ``flags`` is a constant of ``lookup_kernel``. PLAIN: slot ``s`` reads feature ``s``. PADDED, PERMUTED,
    PITCHED, MAPPED: some slot has a padding id, a permutation, rows of several rows of ``stored``, an index map. MULT:
    slots of several rows multiply them (1) or add them (0), or some do and some do not (-1).
    """

    slots: Tensor
    parts: Tensor
    spans: Tensor
    table: Tensor  # on the GPU [15 + 5 K, S], for kernels that read many slots at a time: ``slots``, whether a slot is
    # the first of its feature, and ``parts``, column by column
    flags: dict[str, Any]
    num_rows: int  # that ``stored`` must have
    is_plain: bool  # what the kernels can take (see ``layout.is_plain``)
    places: dict[Any, Any] = field(default_factory=dict)  # of places.py, by batch size
    plans: dict[Any, Plan] = field(default_factory=dict)


_host_layouts = PerTensor()  # of ``parts``


def host_layout(layout: Layout) -> HostLayout:
    """What is known of a layout; waits for the GPU the first time.

    Raises:
        ValueError: if the integers are none of a layout, such as those of ``to_empty``.
    """
    known: HostLayout | None = _host_layouts.get(layout.parts)
    if known is None:
        known = _host_layouts.set(layout.parts, _read(layout))
    return known


def fused_layout(
    stored: Tensor, layout: Layout, *, whole_rows: bool = False, any_order: bool = False
) -> HostLayout | None:
    """The layout for the kernels, or None where they cannot take the rows: the truth then runs.

    Args:
        stored: the rows.
        layout: how ids find them.
        whole_rows: whether a program holds whole rows, so that they cannot be wide.
        any_order: whether sums are taken in any order, which PyTorch's deterministic mode forbids.

    Raises:
        ValueError: if ids would find rows that ``stored`` does not have.
    """
    if stored.dtype not in TYPES or not stored.is_contiguous() or (whole_rows and stored.shape[1] > WIDEST):
        return None
    if any_order and torch.are_deterministic_algorithms_enabled():
        return None
    known = host_layout(layout)
    if not known.is_plain:
        return None
    if stored.shape[0] < known.num_rows:
        raise ValueError(f"stored has {stored.shape[0]} rows but must have {known.num_rows}: the layout reads them")
    return known


def check_state(stored: Tensor, *averages: Tensor | None, last: Tensor | None = None) -> None:
    """Raise ValueError if an optimizer's tensors do not fit the rows that they are kept for."""
    for tensor, dtype in [(average, accumulator(stored)) for average in averages] + [(last, torch.int32)]:
        if tensor is not None and (tensor.shape[0] != stored.shape[0] or tensor.dtype != dtype):
            raise ValueError(
                f"the optimizer's state has {tensor.shape[0]} rows of {tensor.dtype} but must have {stored.shape[0]} of"
                f" {dtype}, as stored does"
            )


def _read(layout: Layout) -> HostLayout:
    if any(tensor.dtype != torch.int64 for tensor in layout[:4]):
        raise ValueError(f"the layout is {layout.parts.dtype} but must be int64")
    device, mapped = layout.parts.device, layout.maps.shape[0]
    slots, parts, spans = (tensor.cpu() for tensor in (layout.slots, layout.parts, layout.spans))
    _check(slots, parts, spans, layout.maps)
    number = torch.arange(len(slots), device="cpu")  # whatever torch's default device
    first = spans[slots[:, column.FEATURE], 0] == number
    table = torch.cat([slots.T, first[None], parts.flatten(1).T])
    end = parts[..., column.BASE] + (parts[..., column.SIZE] - 1) * parts[..., column.PITCH] + 1
    if max(int(table.max()), int((end + parts[..., column.PITCH]).max()), mapped) < 2**31:
        table = table.int()
    used = parts[..., column.BASE] != UNUSED
    operations = slots[used.sum(1) > 1, column.OPERATION].unique().tolist()
    flags = {
        "PLAIN": bool((slots[:, column.FEATURE] == number).all()),
        "PADDED": bool((slots[:, column.PADDING] != NO_PADDING).any()),
        "PERMUTED": bool(((slots[:, column.MULTIPLIER] != 1) | (slots[:, column.SHIFT] != 0)).any()),
        "PITCHED": bool((parts[..., column.PITCH] != 1).any()),
        "MAPPED": bool((parts[..., column.MAP] != CLOSED_FORM).any()),
        "MULT": -1 if len(operations) > 1 else int(operations == [MULT]),
    }
    return HostLayout(slots, parts, spans, table.contiguous().to(device), flags, int(end[used].max()), is_plain(layout))


def _check(slots: Tensor, parts: Tensor, spans: Tensor, maps: Tensor) -> None:
    """Raise ValueError if the integers would lead a kernel out of its arrays."""
    feature, limit = slots[:, column.FEATURE], slots[:, column.LIMIT]
    multiplier, shift = slots[:, column.MULTIPLIER], slots[:, column.SHIFT]
    stride, size, base, pitch, start = parts.unbind(-1)  # in the order of the columns
    fits = (
        ((feature >= 0) & (feature < len(spans)) & (limit > 0)).all()
        & ((multiplier > 0) & (multiplier <= limit) & (shift >= 0) & (shift < limit)).all()
        & ((stride > 0) & (pitch > 0) & (base >= UNUSED) & (base < LARGEST)).all()
        & ((size > 0) & (size < LARGEST // pitch.clamp(min=1))).all()
        & ((start == CLOSED_FORM) | ((start >= 0) & (limit[:, None] <= len(maps) - start))).all()
        & ((spans >= 0) & (spans <= len(slots)) & (spans.sum(1, keepdim=True) <= len(slots))).all()
    )
    if fits:
        mapped = torch.stack([start, limit[:, None].expand_as(start), size], -1)[start != CLOSED_FORM]
        for first, length, buckets in mapped.unique(dim=0).tolist():
            part = maps[first : first + length]
            fits &= bool((part.min() >= 0) & (part.max() < buckets))
    if not fits:
        raise ValueError("the layout's integers are none of a layout: were they replaced, or never initialized?")
