"""What the host knows of a layout, so that a launch need not ask the GPU."""

import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import layout
from .launch import Plan

Kept = TypeVar("Kept")


@dataclass
class Host:
    """A layout on the host, and what follows from it.

    Of ``kinds``, each a constant of a kernel: PLAIN, slot ``s`` reads feature ``s``; PADDED, PERMUTED, PITCHED and
    MAPPED, some slot has a padding id, a permutation, rows of several rows of the weight, an index map; MULT, slots of
    several rows multiply them (1) or add them (0), or some do and some do not (-1).
    """

    slots: Tensor
    parts: Tensor
    spans: Tensor
    table: Tensor  # on the GPU [7 + 5 K, S], for kernels that read many slots at a time: ``slots``, whether a slot is
    # the first of its feature, and ``parts``, column by column
    kinds: dict[str, Any]  # what a lookup need not read of the table
    places: dict[Any, Any] = field(default_factory=dict)  # of places.py
    plans: dict[Any, Plan] = field(default_factory=dict)


class PerTensor:
    """What is kept for a tensor, the object, as long as it lives."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def get(self, tensor: Tensor) -> Any:
        """What was set for ``tensor``, or None."""
        found = self.kept.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def set(self, tensor: Tensor, value: Kept) -> Kept:
        """Keep ``value``, and return it."""
        key = id(tensor)
        self.kept[key] = weakref.ref(tensor, partial(_forget, self.kept, key)), value
        return value


def _forget(kept: dict[int, Any], key: int, _: Any) -> None:
    kept.pop(key, None)


_hosts = PerTensor()  # of ``parts``


def on_host(*integers: Tensor) -> Host:
    """What is known of a layout; waits for the GPU the first time."""
    parts = integers[1]
    found: Host | None = _hosts.get(parts)
    if found is None:
        found = _hosts.set(parts, _read(*integers))
    return found


def _read(*integers: Tensor) -> Host:
    device, mapped = integers[1].device, integers[2].shape[0]
    slots, parts, spans = (integers[i].cpu() for i in (0, 1, 3))
    number = torch.arange(len(slots), device="cpu")  # whatever torch's default device
    first = spans[slots[:, layout.FEATURE], 0] == number
    table = torch.cat([slots.T, first[None], parts.flatten(1).T])
    rows = parts[..., layout.BASE] + parts[..., layout.SIZE] * parts[..., layout.PITCH]
    if max(int(table.max()), int(rows.max()), mapped) < 2**31:
        table = table.int()
    used = parts[..., layout.BASE] != layout.UNUSED
    operations = slots[used.sum(1) > 1, layout.OPERATION].unique().tolist()
    kinds = {
        "PLAIN": bool((slots[:, layout.FEATURE] == number).all()),
        "PADDED": bool((slots[:, layout.PADDING] != layout.NO_PADDING).any()),
        "PERMUTED": bool(((slots[:, layout.MULTIPLIER] != 1) | (slots[:, layout.SHIFT] != 0)).any()),
        "PITCHED": bool((parts[..., layout.PITCH] != 1).any()),
        "MAPPED": bool((parts[..., layout.MAP] != layout.CLOSED_FORM).any()),
        "MULT": -1 if len(operations) > 1 else int(operations == [layout.MULT]),
    }
    return Host(slots, parts, spans, table.contiguous().to(device), kinds)
