"""Which rows of ``stored`` an id reads: the truth, in plain PyTorch. ``layout`` explains the shapes."""

from typing import NamedTuple

import torch
from torch import Tensor

from .layout import BASE, FEATURE, LIMIT, MAP, MULT, MULTIPLIER, OPERATION, PADDING, PITCH, SHIFT, SIZE, STRIDE, Layout


class Reads(NamedTuple):
    """The rows that N ids read, in S slots of up to K rows."""

    rows: Tensor  # [N, S, K]
    valid: Tensor  # [N, S]: the id is neither padding nor out of range
    used: Tensor  # [N, S, K] or [S, K]: the slot has a k-th row
    product: Tensor  # [N, S] or [S]: the slot multiplies its rows; else it adds them


class Bags(NamedTuple):
    """Where V jagged ids belong. P is the most slots of any feature."""

    bag: Tensor  # [V]
    slot: Tensor  # [V, P]: the slots of the id's feature
    valid: Tensor  # [V, P]: the slot is one of the feature's, and the id lies before the last offset


def lookup_reads(ids: Tensor, layout: Layout) -> Reads:
    """What ids ``[B, F]`` read."""
    slots, parts = layout.slots, layout.parts
    rows, valid = rows_of(ids[:, slots[:, FEATURE]], slots, parts, layout.maps)
    return Reads(rows, valid, parts[..., BASE] >= 0, slots[..., OPERATION] == MULT)


def bag_reads(ids: Tensor, offsets: Tensor, layout: Layout) -> tuple[Reads, Bags]:
    """What jagged ids ``[V]`` read, with S = P slots each, and where they belong."""
    bags = bags_of(ids, offsets, layout)
    slots, parts = layout.slots[bags.slot], layout.parts[bags.slot]
    rows, valid = rows_of(ids[:, None], slots, parts, layout.maps)
    return Reads(rows, valid & bags.valid, parts[..., BASE] >= 0, slots[..., OPERATION] == MULT), bags


def rows_of(ids: Tensor, slots: Tensor, parts: Tensor, maps: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[N, S, K]`` of ``stored`` that ``ids`` ``[N, S]`` read, and which ids ``[N, S]`` are valid."""
    limit = slots[..., LIMIT]
    i = ids.long()
    valid = ~out_of_range(i, limit) & (i != slots[..., PADDING])
    i = torch.where(valid, i, 0)
    i = ((slots[..., MULTIPLIER] * i + slots[..., SHIFT]) % limit)[..., None]
    bucket = (i // parts[..., STRIDE]) % parts[..., SIZE]
    if len(maps):
        mapped = parts[..., MAP] >= 0
        bucket = torch.where(mapped, maps[torch.where(mapped, parts[..., MAP] + i, 0)], bucket)
    return parts[..., BASE] + bucket * parts[..., PITCH], valid


def bag_and_feature(ids: Tensor, offsets: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
    """Bag ``[V]`` and feature ``[V]`` of each jagged id."""
    positions = torch.arange(ids.shape[0], device=ids.device, dtype=offsets.dtype)
    bag = torch.searchsorted(offsets, positions, right=True) - 1
    bag = bag.clamp(0, larger(offsets.shape[0] - 2, 0))  # ids past the last offset count for nothing
    return bag, bag // larger((offsets.shape[0] - 1) // spans.shape[0], 1)


def bags_of(ids: Tensor, offsets: Tensor, layout: Layout) -> Bags:
    """Where each jagged id belongs."""
    bag, feature = bag_and_feature(ids, offsets, layout.spans)
    inside = (torch.arange(len(ids), device=ids.device) < offsets[-1])[:, None]
    first, count = layout.spans[feature].unbind(1)
    steps = torch.arange(int(layout.spans[:, 1].max()), device=ids.device)
    slot = (first[:, None] + steps).clamp(max=len(layout.slots) - 1)
    return Bags(bag, slot, inside & (steps < count[:, None]))


def out_of_range(ids: Tensor, limits: Tensor) -> Tensor:
    """Which of ``ids`` lie outside ``[0, limits)``."""
    return (ids < 0) | (ids >= limits)


def invalid_ids(ids: Tensor, offsets: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Which ids are out of range; the limit of each; the feature of each. Shaped as ``ids``.

    ``ids`` are ``[B, F]``, or jagged ``[V]`` where there are ``offsets``.
    """
    limits = layout.slots[layout.spans[:, 0], LIMIT]
    if offsets is None:
        feature = torch.arange(len(layout.spans), device=ids.device).expand(ids.shape)
        return out_of_range(ids, limits), limits[feature], feature
    feature = bag_and_feature(ids, offsets, layout.spans)[1]
    inside = torch.arange(len(ids), device=ids.device) < offsets[-1]  # ids past the last offset count for nothing
    return out_of_range(ids, limits[feature]) & inside, limits[feature], feature


def raise_out_of_range(ids: Tensor, offsets: Tensor | None, layout: Layout, names: str) -> None:
    """Raise IndexError for the first id on the CPU that is outside its table, if there is one."""
    if ids.device.type != "cpu":
        return
    invalid, limit, feature = invalid_ids(ids, offsets, layout)
    if invalid.any():
        raise_id(int(ids[invalid][0]), int(limit[invalid][0]), names, int(feature[invalid][0]))


def raise_id(value: int, limit: int, names: str, feature: int) -> None:
    """Raise IndexError for an id of a feature; ``names`` has the name of each feature's table, one a line."""
    table = names.split("\n")[feature] if names else "the table"
    raise IndexError(f"id {value} is outside [0, {limit}) of {table}")


def accumulator(stored: Tensor) -> torch.dtype:
    """The dtype in which rows of ``stored`` are summed and multiplied."""
    return torch.float32 if stored.dtype in (torch.bfloat16, torch.float16) else stored.dtype


def subtract_(stored: Tensor, rows: Tensor, change: Tensor) -> None:
    """Subtract ``change`` ``[N, W]`` from ``rows`` ``[N]``, all different, in the accumulator's dtype."""
    stored[rows] = (stored[rows].to(accumulator(stored)) - change).to(stored.dtype)


def larger(a: int | torch.SymInt, b: int) -> int:
    """``max`` of sizes, which stays symbolic: the compiler traces Python's, ``torch.export`` would guard on it."""
    return torch.sym_max(a, b) if isinstance(a, torch.SymInt) else max(a, b)


def smaller(a: int | torch.SymInt, b: int) -> int:
    """``min`` of sizes, which stays symbolic."""
    return torch.sym_min(a, b) if isinstance(a, torch.SymInt) else min(a, b)
