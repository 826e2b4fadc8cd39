"""Path-based embeddings (section 4.1): a row of one table, then a network chosen by each other partition."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import gpu, rows
from ..ops.declare import is_eager
from ..ops.layout import BASE, CLOSED_FORM, Layout
from ..paper import init
from ..paper.partitions import Partition
from ..paper.schemes import Path, TableSpec


class PathNetworks(nn.Module):
    """The networks of one or more features whose paths have the same shape, run as batched matrix products.

    Ids are sorted by network into blocks of one network each, so that a weight matrix is read once per block. There is
    no loop over networks and no copy of a matrix per id. Features of one table share its networks.
    """

    member: Tensor  # [F]: position of each feature among the members, or -1
    features: Tensor  # [members]
    columns: Tensor  # slots of the members
    network_slots: Tensor  # like ``layout.slots``: one slot per member
    network_parts: Tensor  # like ``layout.parts``: one partition per level, whose base is the member's first network

    def __init__(
        self,
        members: Sequence[int],
        specs: Sequence[TableSpec],
        table_of: Sequence[int],
        layout: Layout,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        tables = list(dict.fromkeys(table_of[f] for f in members))
        scheme = path_scheme(specs[tables[0]])
        assert scheme is not None
        self.members, self.activation, self.width = tuple(members), scheme.activation, specs[tables[0]].width
        self.has_own_rows = any(specs[t].num_own for t in tables)
        sizes = list(zip(*(specs[t].path_sizes for t in tables), strict=True))  # of each level, by table
        self.counts = tuple(map(sum, sizes))  # number of networks per level
        self.most = tuple(map(max, sizes))  # largest number of networks of one table, per level
        widths = (self.width, *scheme.hidden, self.width)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for count in self.counts:
            for d_in, d_out in pairwise(widths):
                self.weights.append(nn.Parameter(torch.empty(count, d_in, d_out, device=device, dtype=dtype)))
                self.biases.append(nn.Parameter(torch.empty(count, d_out, device=device, dtype=dtype)))
        levels, base = {}, [0] * len(self.counts)
        for t in tables:
            parts = [p for p in specs[t].partitions[1:] if isinstance(p, Partition)]
            levels[t] = [[p.stride, p.size, base[j], 1, CLOSED_FORM] for j, p in enumerate(parts)]
            base = [b + p.size for b, p in zip(base, parts, strict=True)]
        self.levels = [levels[table_of[f]] for f in members]  # ``network_parts`` as Python integers
        spans = layout.spans.tolist()
        integers: dict[str, Any] = {
            "member": [members.index(f) if f in members else -1 for f in range(len(spans))],
            "features": list(members),
            "columns": [spans[f][0] + slot for f in members for slot in range(spans[f][1])],
            "network_parts": self.levels,
        }
        self.integers = {name: torch.tensor(v, dtype=torch.int64, device="cpu") for name, v in integers.items()}
        self.register_integers(self.weights[0].device, layout)
        self.reset_parameters()

    def register_integers(self, device: torch.device, layout: Layout | None = None) -> None:
        """(Re)build the buffers from which an id's networks are computed; they hold no learned state.

        ``layout`` is that of all features, where it may have changed since.
        """
        if layout is not None:
            self.integers["network_slots"] = layout.slots[layout.spans[list(self.members), 0]].long()
        for name, values in self.integers.items():
            self.register_buffer(name, values.to(device, copy=True), persistent=False)

    def reset_parameters(self) -> None:
        """Draw every network near the identity (see ``init.path_``)."""
        for level in range(len(self.counts)):
            layers = self.layers_of(level)
            init.path_([self.weights[i] for i in layers], [self.biases[i] for i in layers], self.activation)

    def layers_of(self, level: int) -> range:
        """Positions of the layers of one level in ``weights`` and ``biases``."""
        count = len(self.weights) // len(self.counts)
        return range(level * count, (level + 1) * count)

    def transform(self, vectors: Tensor, ids: Tensor, ranks: Tensor) -> Tensor:
        """Transform the members' vectors in ``vectors`` ``[B, S, W]`` of ``ids`` ``[B, F]``; keep the others."""
        selected = vectors[:, self.columns]
        fused = self._fused(selected, ids) if selected.is_cuda and is_eager() else None
        if fused is not None:
            return vectors.index_copy(1, self.columns, fused)
        member = torch.arange(len(self.features), device=ids.device).repeat(ids.shape[0])
        composed = self(selected.reshape(-1, self.width), ids[:, self.features].flatten(), member, ranks)
        return vectors.index_copy(1, self.columns, composed.view_as(selected))

    def _fused(self, vectors: Tensor, ids: Tensor) -> Tensor | None:
        """The members' vectors ``[B, members, W]``, transformed by the GPU's kernels; None where these do not fit."""
        if self.has_own_rows or not gpu.HAS_TRITON:
            return None
        from ..ops.gpu import path

        levels = map(self.layers_of, range(len(self.counts)))
        layers = [[tensor for i in level for tensor in (self.weights[i], self.biases[i])] for level in levels]
        if not all(path.can_fuse(vectors, *level) for level in zip(layers, self.most, strict=True)):
            return None
        for level, (tensors, most) in enumerate(zip(layers, self.most, strict=True)):
            parts = self.network_parts[:, level : level + 1].contiguous()
            vectors = path.transformed(vectors, ids, tensors, self.network_slots, parts, most, self.activation)
        return vectors

    def forward(self, vectors: Tensor, ids: Tensor, member: Tensor, ranks: Tensor) -> Tensor:
        """Transform the row vectors ``[N, D]`` of ``ids`` ``[N]``; ``member`` ``[N]`` is the feature of each.

        The vectors of ids with rows of their own are not transformed; padding and out-of-range ids give zeros.
        """
        slots, parts = self.network_slots[member][:, None], self.network_parts[member][:, None]
        located = rows.locate(ids[:, None], slots, ranks)  # [N, 1]
        networks = parts[..., BASE] + rows.buckets_of(located.number, parts, ids.new_empty(0))  # [N, 1, levels]
        act = {"relu": torch.relu, "sigmoid": torch.sigmoid}[self.activation]
        hidden, d = vectors, vectors.shape[1]
        for level, count in enumerate(self.counts):
            position, network, size = sorted_blocks(networks[:, 0, level], count)
            padded = hidden.new_zeros(network.shape[0] * size, d).index_copy(0, position, hidden)
            hidden = padded.view(network.shape[0], size, d)
            layers = self.layers_of(level)
            for i in layers:
                hidden = torch.baddbmm(self.biases[i][network][:, None], hidden, self.weights[i][network])
                hidden = hidden if i == layers[-1] else act(hidden)
            hidden = hidden.flatten(0, 1)[position]
        return torch.where(located.valid, torch.where(located.composed, hidden, vectors), 0)


def path_scheme(spec: TableSpec) -> Path | None:
    """The path scheme of a table, or of its cold ids; None if there is none."""
    scheme = getattr(spec.scheme, "cold", spec.scheme)
    return scheme if isinstance(scheme, Path) and spec.hidden is not None else None


def sorted_blocks(group: Tensor, num_groups: int) -> tuple[Tensor, Tensor, int]:
    """Sort N items into blocks: the position ``[N]`` of each, the group of each block, and the size of a block.

    So ``group_of_block[position // size]`` is ``group``. The number of blocks depends only on N and ``num_groups``:
    shapes are static for the compiler.
    """
    n = group.shape[0]
    smaller = min if isinstance(n, int) else torch.sym_min  # which torch 2.11 cannot compile for a known n
    size = smaller(8 * (n // num_groups // 8 + 1), 1024)
    num_blocks = n // size + num_groups
    counts = group.new_zeros(num_groups).index_add(0, group, torch.ones_like(group))
    needed = (counts + size - 1) // size
    ends = needed.cumsum(0)
    order = torch.argsort(group, stable=True)
    in_order = group[order]
    rank = torch.arange(n, device=group.device) - (counts.cumsum(0) - counts)[in_order]
    position = torch.empty_like(group).index_copy(0, order, (ends - needed)[in_order] * size + rank)
    group_of_block = group.new_zeros(num_blocks + 1).index_add(0, ends, torch.ones_like(ends)).cumsum(0)[:num_blocks]
    return position, group_of_block.clamp(max=num_groups - 1), size


def path_groups(specs: Sequence[TableSpec], table_of: Sequence[int]) -> list[list[int]]:
    """Group the features whose path networks have the same shape, and so can run together."""
    groups: dict[Any, list[int]] = {}
    for f, t in enumerate(table_of):
        scheme = path_scheme(specs[t])
        if scheme is not None:
            shape = (specs[t].width, scheme.hidden, scheme.activation, len(specs[t].partitions))
            groups.setdefault(shape, []).append(f)
    return list(groups.values())
