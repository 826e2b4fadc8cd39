"""Groups of tables in plain torch operators: from ids to composed vectors.

Shapes: N ids, G features of a group, W output columns of a table. ``member`` is the position in the group of the
feature that an id belongs to; it has the shape of the ids or broadcasts to it.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..hashing import mixed_ids
from ..ops.codes import code_bytes
from ..renumbering import MIXING_FACTORS
from ..tables import Tables
from .groups import Buckets, FeatureGroup, JoinedTables, OwnRows
from .signature import compute_dtype


class ComposedVectors(NamedTuple):
    """Composed vectors ``[..., W]``, and masks ``[...]`` of the ids in range and of padding."""

    vectors: Tensor
    in_range: Tensor
    is_padding: Tensor


class PlainRows(nn.Module):
    """Concatenated tables."""

    starts: Tensor | None

    def __init__(self, rows: JoinedTables, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        constant(self, "starts", rows.starts)
        # Copied, since an exported program keeps whole storages, and the tables are views of one shared storage.
        values = torch.cat(rows.tables).to(dtype or rows.tables[0].dtype)
        self.values = nn.Parameter(values, requires_grad=False)

    def forward(self, row: Tensor, member: Tensor) -> Tensor:
        """The rows at ``row``, counted from the start of the table of each ``member``."""
        return self.values[row if self.starts is None else row + self.starts[member]]


class QuantizedRows(nn.Module):
    """Concatenated tables of quantized rows: codes, scales and zero points of their pieces (``ops.codes``)."""

    starts: Tensor | None

    def __init__(self, rows: JoinedTables, width: int, bits: int, dtype: torch.dtype) -> None:
        super().__init__()
        constant(self, "starts", rows.starts)
        self.width, self.bits, size = width, bits, code_bytes(width, bits)
        pieces = torch.cat(rows.tables).unflatten(1, (rows.pitch, size + 4))
        scales = pieces[..., size : size + 2].contiguous().view(torch.float16).to(dtype)
        zeros = pieces[..., size + 2 :].contiguous().view(torch.int16).to(dtype)
        self.codes = nn.Parameter(pieces[..., :size].contiguous(), requires_grad=False)
        self.scales, self.zeros = nn.Parameter(scales, requires_grad=False), nn.Parameter(zeros, requires_grad=False)

    def forward(self, row: Tensor, member: Tensor) -> Tensor:
        """The dequantized rows at ``row``, counted from the start of the table of each ``member``."""
        row = row if self.starts is None else row + self.starts[member]
        codes = self.codes[row]
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        numbers = (codes[..., : self.width].to(self.scales.dtype) - self.zeros[row]) * self.scales[row]
        return numbers.flatten(-2)


class PlainBuckets(nn.Module):
    """The row or network of a number under one partition."""

    strides: Tensor | None
    sizes: Tensor | None

    def __init__(self, buckets: Buckets) -> None:
        super().__init__()
        constant(self, "strides", buckets.strides)
        constant(self, "sizes", buckets.sizes)
        self.maps = None if buckets.maps is None else PlainRows(buckets.maps)

    def forward(self, number: Tensor, member: Tensor) -> Tensor:
        """Rows, counted from the start of the table of each ``member``."""
        if self.maps is not None:
            number = self.maps(number, member)
        if self.strides is not None:
            number = number // self.strides[member]
        return number if self.sizes is None else number % self.sizes[member]


class PlainPlaces(nn.Module):
    """The place of an id in a ``HotCold`` table: own rows come first, then composed ids."""

    num_hot: Tensor
    has_rest: Tensor
    rest_from: Tensor
    num_listed: Tensor

    def __init__(self, own: OwnRows) -> None:
        super().__init__()
        for name in ("num_hot", "has_rest", "rest_from", "num_listed"):
            constant(self, name, getattr(own, name))
        self.steps = (max(own.num_hot).bit_length(), max(own.num_listed).bit_length())
        self.hot, self.cold = (None if lists is None else PlainRows(lists) for lists in (own.hot, own.cold))

    def forward(self, ids: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
        """The place of each id, and the number of own rows of its table."""
        hot, rest = self.num_hot[member], self.has_rest[member]
        if self.hot is None or self.cold is None:
            place = torch.where(ids < hot, ids, ids + rest)
            return torch.where(ids >= self.rest_from[member], hot, place), hot + rest
        below_hot, is_hot = _search(ids, self.hot, hot, member, self.steps[0])
        below_cold, is_cold = _search(ids, self.cold, self.num_listed[member], member, self.steps[1])
        listed = torch.where(is_cold, below_cold + hot + rest, hot)
        cold = torch.where(rest > 0, listed, ids - below_hot + hot + rest)
        return torch.where(is_hot, below_hot, cold), hot + rest


def _search(ids: Tensor, lists: PlainRows, length: Tensor, member: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """For each id, how many entries of its sorted list are below it, and whether the list has it; by bisection."""
    below = torch.zeros_like(ids)
    if not len(lists.values):
        return below, below > 0
    last = len(lists.values) - 1
    start = below if lists.starts is None else lists.starts[member]
    for step in reversed(range(steps)):
        further = below + 2**step
        is_below = lists.values[(start + further - 1).clamp(max=last)] < ids
        below = torch.where((further <= length) & is_below, further, below)
    return below, (below < length) & (lists.values[(start + below).clamp(max=last)] == ids)


class PlainGroup(nn.Module):
    """The lookup of one group of features.

    Args:
        group: the group.
        tables: the module that it belongs to.
        shared_rows: rows of the groups made so far, by name; groups whose tables share a pool share its rows.
    """

    features: Tensor
    members: Tensor  # for each feature of the module, its position in the group, or -1
    limits: Tensor
    num_composed: Tensor | None
    padding: Tensor | None
    multipliers: Tensor | None
    shifts: Tensor
    moduli: Tensor
    offsets: Tensor | None

    def __init__(self, group: FeatureGroup, tables: Tables, shared_rows: dict[str, nn.Module]) -> None:
        super().__init__()
        self.operation, self.width, self.raw = group.operation, group.width, group.raw
        self.unknown_ids = group.unknown_ids
        self.compute = compute_dtype(tables)

        def stored(rows: JoinedTables) -> nn.Module:
            return QuantizedRows(rows, tables.width, tables.bits, self.compute) if tables.bits else PlainRows(rows)

        features = range(len(tables.features))
        constant(self, "features", group.features)
        constant(self, "members", [group.features.index(f) if f in group.features else -1 for f in features])
        constant(self, "limits", group.limits)
        constant(self, "num_composed", group.num_composed if group.unknown_ids == "hash" else None)
        constant(self, "padding", group.padding)
        for name, values in zip(("multipliers", "shifts", "moduli"), group.permutation or [None] * 3, strict=True):
            constant(self, name, values)
        constant(self, "offsets", None if group.mixing is None else group.mixing[0])
        self.mixing = None if group.mixing is None else group.mixing[1]
        self.places = self.own = None
        if group.own is not None:
            self.places, self.own = PlainPlaces(group.own), stored(group.own.rows)
        self.buckets = nn.ModuleList([PlainBuckets(buckets) for buckets in group.buckets])
        for rows in group.rows:
            if rows.name not in shared_rows:
                shared_rows[rows.name] = stored(rows)
        self.rows = nn.ModuleList([shared_rows[rows.name] for rows in group.rows])
        self.networks = nn.ModuleList([PlainBuckets(level.buckets) for level in group.levels])
        self.weights, self.biases = (
            nn.ModuleList([PlainRows(rows, self.compute) for level in group.levels for rows in getattr(level, kind)])
            for kind in ("weights", "biases")
        )
        self.activation = torch.sigmoid if group.activation == "sigmoid" else torch.relu

    def forward(self, ids: Tensor, member: Tensor) -> ComposedVectors:
        """Vectors of ``ids``; ids out of range give the vector of id 0, unless the table has a policy for them."""
        ids = mixed_ids(ids, self.limits[member]) if self.raw else ids
        in_range = (ids >= 0) & (ids < self.limits[member])
        number = torch.where(in_range, ids, 0)
        is_padding = torch.zeros_like(in_range) if self.padding is None else in_range & (ids == self.padding[member])
        known = in_range if self.unknown_ids == "error" else torch.ones_like(in_range)
        hashed = None if self.num_composed is None else mixed_ids(ids, self.num_composed[member])
        if self.places is None or self.own is None:
            number = number if hashed is None else torch.where(in_range, number, hashed)
            return ComposedVectors(self._composed(number, member), known, is_padding)
        place, num_own = self.places(number, member)
        if self.unknown_ids != "error":  # the row of the rest comes after those of the hot ids
            other = self.places.num_hot[member] if hashed is None else hashed + num_own
            place = torch.where(in_range, place, other)
        is_composed = place >= num_own
        vectors = self.own(torch.where(is_composed, 0, place), member).to(self.compute)
        if len(self.rows):
            composed = self._composed(torch.where(is_composed, place - num_own, 0), member)
            vectors = torch.where(is_composed[..., None], composed, vectors)
        return ComposedVectors(vectors, known, is_padding)

    def _composed(self, number: Tensor, member: Tensor) -> Tensor:
        """Composed vectors of numbers, the arguments of the partitions."""
        if self.multipliers is not None:
            number = (number * self.multipliers[member] + self.shifts[member]) % self.moduli[member]
        if self.offsets is not None and self.mixing is not None:
            number = _mixed(number + self.offsets[member], self.mixing)
        pairs = zip(self.rows, self.buckets, strict=True)
        rows = [rows(buckets(number, member), member).to(self.compute) for rows, buckets in pairs]
        if self.operation in ("concat", "feature"):
            return torch.cat(rows, -1)
        total = rows[0]
        for row in rows[1:]:
            total = total * row if self.operation == "mult" else total + row
        return self._paths(total, number, member)

    def _paths(self, vectors: Tensor, number: Tensor, member: Tensor) -> Tensor:
        """Vectors after the path networks (section 4.1); the weights are gathered for each id."""
        layers = len(self.weights) // max(len(self.networks), 1)
        for level, buckets in enumerate(self.networks):
            network = buckets(number, member)
            for i in range(level * layers, (level + 1) * layers):
                weight, bias = self.weights[i](network, member), self.biases[i](network, member)
                vectors = (vectors[..., None, :] @ weight)[..., 0, :] + bias
                vectors = vectors if i == (level + 1) * layers - 1 else self.activation(vectors)
        return vectors


def _mixed(numbers: Tensor, bits: int) -> Tensor:
    """``renumbering.mixed_numbers`` with the same ``bits`` for all numbers."""
    shift, mask = bits // 2 + 1, 2**bits - 1
    for factor in MIXING_FACTORS:
        numbers = ((numbers ^ (numbers >> shift)) * factor) & mask
    return numbers ^ (numbers >> shift)


def constant(module: nn.Module, name: str, values: list[int] | None) -> None:
    """Register integers as a buffer of a module, or None."""
    module.register_buffer(name, None if values is None else torch.tensor(values, device="cpu"), persistent=True)
