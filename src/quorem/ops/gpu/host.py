"""A copy of a layout on the host, so that a launch need not wait for the GPU; and whether the kernels support it."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import layout as column
from ..layout import CLOSED_FORM, MULT, NO_PADDING, UNUSED, UNUSED_PART, Layout, check_rows, num_rows_read
from ..memory import PerTensor
from ..rows import accumulator
from ..state import NARROW
from ..words import with_words
from .launch import LaunchPlan
from .rows import TYPES

WIDEST = 512  # the most columns of a row that one program handles


@dataclass(frozen=True)
class LayoutFlags:
    """Constants of kernels: what no slot of a layout has is left out of them."""

    plain: bool  # slot ``s`` reads feature ``s``; for the kernel also: ids lie as vectors do
    padded: bool  # some slot has a padding id
    pitched: bool  # some table has rows that are several rows of ``stored``
    mapped: bool  # some partition is an index map
    owned: bool  # some ids have rows of their own
    rested: bool  # some slot has a rest
    mixed: bool  # some slot mixes its numbers over a pool
    joined: bool  # the slots of each feature read one row of its tables after another, for ``lookup_split``
    levels: int  # of the words in ``maps``, 0 without lists of ids
    product: int  # 1 if the slots that read several rows all multiply them, 0 if all add them, -1 if some do


class DeviceLayout(NamedTuple):
    """A layout as most kernels take it."""

    # [15 + 8 K, S], int32 or int64: ``slots``, whether a slot is the first of its feature, base and pitch of the rows
    # of ids that have their own, and the other parts with their reciprocals.
    table: Tensor
    maps: Tensor  # with the words of lists
    spans: Tensor
    parts: Tensor  # int64


@dataclass
class HostLayout:
    """A layout on the host, and values that are derived from it."""

    slots: Tensor
    parts: Tensor
    spans: Tensor
    num_slots: int
    num_parts: int  # rows that an id reads at most, in one slot
    flags: LayoutFlags
    row_flags: LayoutFlags  # without what matters to lookups alone: other kernels are compiled for fewer layouts
    num_rows: int  # rows that ``stored`` must have at least
    on_device: DeviceLayout
    places: dict[Any, Any] = field(default_factory=dict)  # cache of ``places.places_of``
    plans: dict[Any, LaunchPlan] = field(default_factory=dict)


_host_layouts = PerTensor()  # layout.parts -> HostLayout


def host_layout(layout: Layout, stored_rows: int | None = None) -> HostLayout:
    """The host's copy of a layout, cached; the first call checks the layout, and waits for the GPU.

    ValueError if ids would read rows that ``stored``, which has ``stored_rows``, does not have.
    """
    host: HostLayout | None = _host_layouts.get(layout.parts)
    if host is None:
        host = _host_layouts.set(layout.parts, _read(layout))
    if stored_rows is not None:
        check_rows(stored_rows, host.num_rows)
    return host


def fused_layout(
    stored: Tensor, layout: Layout, *, whole_rows: bool = False, any_order: bool = False
) -> HostLayout | None:
    """``host_layout``; None if the kernels do not support the rows, so that the plain reference must run.

    With ``whole_rows`` a program handles whole rows, so that their width is limited. With ``any_order`` sums are taken
    in any order, which PyTorch's deterministic mode forbids.
    """
    if stored.dtype not in TYPES or not stored.is_contiguous() or (whole_rows and stored.shape[1] > WIDEST):
        return None
    if any_order and torch.are_deterministic_algorithms_enabled():
        return None
    return host_layout(layout, stored.shape[0])


def check_state(stored: Tensor, *averages: Tensor | None, last: Tensor | None = None) -> None:
    """Raise ValueError if the tensors of an optimizer's state do not fit ``stored``."""
    for tensor, dtype in [(average, accumulator(stored)) for average in averages] + [(last, torch.int32)]:
        if tensor is not None and (tensor.shape[0] != stored.shape[0] or tensor.dtype not in (dtype, *NARROW)):
            raise ValueError(
                f"the optimizer's state has {tensor.shape[0]} rows of {tensor.dtype} but must have {stored.shape[0]} of"
                f" {dtype}, as stored does"
            )


def _read(layout: Layout) -> HostLayout:
    num_rows, device = num_rows_read(layout), layout.parts.device
    integers = (layout.slots, layout.parts, layout.spans)
    slots, parts, spans = (tensor.to("cpu", torch.int64, copy=True) for tensor in integers)
    slots, maps, levels = with_words(layout, slots)
    number = torch.arange(len(slots), device="cpu")  # independent of torch's default device
    first = spans[slots[:, column.FEATURE], 0] == number
    has_own = slots[:, column.OWN] > 0
    own = parts[:, 0, [column.BASE, column.PITCH]] * has_own[:, None]
    unused = torch.tensor(UNUSED_PART, device="cpu").expand(len(parts), 1, -1)
    composed = torch.where(has_own[:, None, None], torch.cat([parts[:, 1:], unused], 1), parts)
    num_composed = (composed[..., column.BASE] != UNUSED).sum(1)
    table = torch.cat([slots.T, first[None], own.T, torch.cat([composed, reciprocals(composed)], 2).flatten(1).T])
    end = parts[..., column.BASE] + (parts[..., column.SIZE] - 1) * parts[..., column.PITCH] + 1
    largest = max(int(slots.max()), int(composed.max()), int((end + parts[..., column.PITCH]).max()), len(maps))
    if largest < 2**31 and int(slots[:, column.BITS].max()) < 32:
        table = table.int()
    operations = slots[num_composed > 1, column.OPERATION].unique().tolist()
    begin = spans[slots[:, column.FEATURE], 0]
    following, last = parts[begin], column.GROUP
    following[..., column.BASE] += (number - begin)[:, None] * (following[..., column.BASE] != UNUSED)
    flags = LayoutFlags(
        plain=bool((slots[:, column.FEATURE] == number).all()),
        padded=bool((slots[:, column.PADDING] != NO_PADDING).any()),
        pitched=bool((parts[..., column.PITCH] != 1).any()),
        mapped=bool((parts[..., column.MAP] != CLOSED_FORM).any()),
        owned=bool((slots[:, column.OWN] > 0).any()),
        rested=bool((slots[:, column.REST] < slots[:, column.LIMIT]).any()),
        mixed=bool((slots[:, column.BITS] > 0).any()),
        joined=torch.equal(parts, following) and torch.equal(slots[:, :last], slots[begin, :last]),
        levels=levels,
        product=-1 if len(operations) > 1 else int(operations == [MULT]),
    )
    return HostLayout(
        slots,
        parts,
        spans,
        len(slots),
        max(int(num_composed.max()), 1),
        flags,
        replace(flags, plain=False, padded=False, joined=False, product=0),
        num_rows,
        DeviceLayout(table.contiguous().to(device), maps, spans.to(device), parts.to(device)),
    )


def reciprocals(parts: Tensor) -> Tensor:
    """BY_STRIDE, BY_SIZE and SHIFTS ``[S, K, 3]`` (``rows``) of parts ``[S, K, 5]`` whose integers are below 2**31.

    For each n in [0, 2**31), ``n // d`` is ``(2 * n * multiplier >> 32) >> shift``: the shift is that of the first
    power of two that is not below d, and the multiplier is ``2**31 * 2**shift / d``, rounded up.

    >>> stride, size = 1, 6
    >>> reciprocals(torch.tensor([[[stride, size, 0, 1, -1]]])).tolist(), -(-(2**34) // 6)
    ([[[2147483648, 2863311531, 96]]], 2863311531)
    """
    divisors = parts[..., [column.STRIDE, column.SIZE]].clamp(max=2**31)
    shifts = (divisors[..., None] > 2 ** torch.arange(31, device="cpu")).sum(-1)
    multipliers = ((1 << 31 + shifts) + divisors - 1) // divisors
    return torch.cat([multipliers, shifts[..., :1] + (shifts[..., 1:] << 5)], -1)
