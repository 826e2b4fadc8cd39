"""Path networks with at most one hidden layer: one launch lists the ids of each network, one runs the networks.

A program runs one network over a block of its ids, so each id is computed once and a weight matrix stays in registers.
The ids of a feature fill at most ``ids / T + networks + 1`` blocks, whichever networks they use: the grid is fixed.
Ids that use none (padding, out of range) have a list of their own, after those of the J networks. Further programs of
the same launch copy the vectors that are not path-based. The backward pass uses the lists of the forward pass.

A program that lists ids ranks them in a one-hot matrix ``[JP, T]`` of lists by ids (JP: J + 1 as a power of 2) and
reserves space in all lists of its feature at once. If one program handles all ids of a feature, as with small batches,
it needs neither atomics nor counts that start at zero.

``slots`` and ``parts`` are as in ``ops.layout``: a slot is a feature, a partition is a level, and a row is a network.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, launch, power_of_2
from .rows import BASE, FEATURE, RowFlags, is_valid, number_of, part_at, row_of, slot_at

MOST_NETWORKS, WIDEST, WIDEST_HIDDEN = 64, 64, 128  # networks of a feature; columns of a vector; hidden units
SMALL_BATCH = 4096  # up to this batch size blocks are smaller, to fill the GPU
LARGEST_TILE = 4096  # the most elements of the one-hot matrix


class Layers(NamedTuple):
    """Weights and biases of the networks, or their gradients, as kernels take them."""

    w1: Tensor | None  # None without a hidden layer
    b1: Tensor | None
    w2: Tensor
    b2: Tensor

    @staticmethod
    def of(layers: list[Tensor]) -> "Layers":
        """One layer or two."""
        return Layers(*layers) if len(layers) == 4 else Layers(None, None, *layers)


class NetworkLists(NamedTuple):
    """The ids of each network."""

    counts: Tensor  # int32 [M * (J + 1)]
    ids: Tensor  # int32 [M * (J + 1), B]


@triton.jit
def matrix(weights, network, rows, columns, R: tl.constexpr, C: tl.constexpr):
    """One network's weights ``[R, C]``, zero-padded."""
    mask = (rows < R)[:, None] & (columns < C)[None, :]
    return tl.load(weights + network * R * C + rows[:, None] * C + columns[None, :], mask=mask, other=0).to(tl.float32)


@triton.jit
def activated(z, SIGMOID: tl.constexpr):
    """The hidden layer's units."""
    return tl.sigmoid(z) if SIGMOID else tl.maximum(z, 0)


@triton.jit
def product(a, b):
    """Matrix product in float32's precision, on the tensor cores."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def list_kernel(
    ids, lists, slots, parts, B, id_stride, M, J,
    JP: tl.constexpr, T: tl.constexpr, ALONE: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """T ids of one feature, all of them if ALONE: enter each into its network's list."""
    m = tl.program_id(0) % M
    n = (tl.program_id(0) // M).to(tl.int64) * T + tl.arange(0, T)
    slot, part = slot_at(slots, m), part_at(parts, m)
    i = tl.load(ids + n * id_stride + tl.load(slot + FEATURE), mask=n < B, other=-1)
    valid = is_valid(i, slot)
    number, is_own = number_of(tl.where(valid, i, 0), slot, parts, FLAGS)
    network, _ = row_of(number, is_own, slot, part, 0, parts, FLAGS)
    listed = tl.where(valid, (network - tl.load(part + BASE)).to(tl.int32), J)
    j = tl.arange(0, JP)
    one_hot = ((j[:, None] == listed[None, :]) & (n < B)[None, :]).to(tl.int32)
    total = tl.sum(one_hot, 1)
    place = tl.cumsum(one_hot, 1) - 1
    if ALONE:
        tl.store(lists.counts + m * (J + 1) + j, total, mask=j <= J)
    else:
        place += tl.atomic_add(lists.counts + m * (J + 1) + j, total, mask=total > 0, sem="relaxed")[:, None]
    place = tl.sum(one_hot * place, 0)
    tl.store(lists.ids + (m * (J + 1) + listed).to(tl.int64) * B + place, n.to(tl.int32), mask=n < B)


@triton.jit
def block_of(c, lists, m, J, JP: tl.constexpr, T: tl.constexpr):
    """The c-th block of a feature's ids: its list, -1 past the last; its first place in the list; the list's length."""
    j = tl.arange(0, JP)
    count = tl.load(lists.counts + m * (J + 1) + j, mask=j <= J, other=0)
    blocks = tl.cdiv(count, T)
    before = tl.cumsum(blocks, 0) - blocks
    inside = (c >= before) & (c < before + blocks)
    return tl.sum(tl.where(inside, j + 1, 0)) - 1, tl.sum(tl.where(inside, c - before, 0)) * T, tl.sum(inside * count)


@triton.jit
def vectors_of(m, j, start, count, d, lists, columns, B, S, J, D: tl.constexpr, T: tl.constexpr):
    """Which of T places of a list hold an id, and where column d of their vectors lies."""
    place = start + tl.arange(0, T)
    taken = place < count
    n = tl.load(lists.ids + (m * (J + 1) + j).to(tl.int64) * B + place, mask=taken, other=0).to(tl.int64)
    return taken, (n * S + tl.load(columns + m))[:, None] * D + d[None, :]


@triton.jit
def copy_vectors(k, source, target, columns, B, S, M, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr):
    """Copy T vectors of one column that is not path-based: the k-th such block of all."""
    n = (k // (S - M)).to(tl.int64) * T + tl.arange(0, T)
    d = tl.arange(0, DP)
    elements = (n * S + tl.load(columns + M + k % (S - M)))[:, None] * D + d[None, :]
    mask = (n < B)[:, None] & (d < D)[None, :]
    tl.store(target + elements, tl.load(source + elements, mask=mask), mask=mask)


@triton.jit
def path_kernel(
    x, layers, out, lists, parts, columns, B, S, M, J, D: tl.constexpr, H: tl.constexpr, DP: tl.constexpr,
    HP: tl.constexpr, JP: tl.constexpr, T: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """T ids of one network, or T vectors to copy."""
    k = tl.program_id(0) - M * (tl.cdiv(B, T) + J + 1)
    if k >= 0:
        copy_vectors(k, x, out, columns, B, S, M, D, DP, T)
        return
    m = tl.program_id(0) % M
    j, start, count = block_of(tl.program_id(0) // M, lists, m, J, JP, T)
    if j >= 0:
        network = tl.load(part_at(parts, m) + BASE) + j
        d, h = tl.arange(0, DP), tl.arange(0, HP)
        taken, elements = vectors_of(m, j, start, count, d, lists, columns, B, S, J, D, T)
        mask = taken[:, None] & (d < D)[None, :]
        if j == J:
            tl.store(out + elements, tl.zeros((T, DP), out.dtype.element_ty), mask=mask)
        else:
            y = tl.load(x + elements, mask=mask, other=0).to(tl.float32)
            if layers.w1 is not None:
                z = product(y, matrix(layers.w1, network, d, h, D, H))
                z += tl.load(layers.b1 + network * H + h, mask=h < H, other=0).to(tl.float32)[None, :]
                y = product(activated(z, SIGMOID), matrix(layers.w2, network, h, d, H, D))
            else:
                y = product(y, matrix(layers.w2, network, d, d, D, D))
            y += tl.load(layers.b2 + network * D + d, mask=d < D, other=0).to(tl.float32)[None, :]
            tl.store(out + elements, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def path_backward_kernel(
    grad, x, layers, dx, gradients, lists, parts, columns, B, S, M, J, D: tl.constexpr, H: tl.constexpr,
    DP: tl.constexpr, HP: tl.constexpr, JP: tl.constexpr, T: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """T ids of one network: their share of its gradients, and the gradients of their vectors; or T vectors to copy."""
    k = tl.program_id(0) - M * (tl.cdiv(B, T) + J + 1)
    if k >= 0:
        copy_vectors(k, grad, dx, columns, B, S, M, D, DP, T)
        return
    m = tl.program_id(0) % M
    j, start, count = block_of(tl.program_id(0) // M, lists, m, J, JP, T)
    if j >= 0:
        network = tl.load(part_at(parts, m) + BASE) + j
        d, h = tl.arange(0, DP), tl.arange(0, HP)
        taken, elements = vectors_of(m, j, start, count, d, lists, columns, B, S, J, D, T)
        mask = taken[:, None] & (d < D)[None, :]
        if j == J:
            tl.store(dx + elements, tl.zeros((T, DP), dx.dtype.element_ty), mask=mask)
        else:
            v = tl.load(x + elements, mask=mask, other=0).to(tl.float32)
            g = tl.load(grad + elements, mask=mask, other=0).to(tl.float32)
            tl.atomic_add(gradients.b2 + network * D + d, tl.sum(g, 0), mask=d < D, sem="relaxed")
            back = product(g, tl.trans(matrix(layers.w2, network, h, d, H, D)))
            square = (h < H)[:, None] & (d < D)[None, :]
            target = gradients.w2 + network * H * D + h[:, None] * D + d[None, :]
            if layers.w1 is not None:
                weight1 = matrix(layers.w1, network, d, h, D, H)
                bias1 = tl.load(layers.b1 + network * H + h, mask=h < H, other=0).to(tl.float32)
                z = product(v, weight1) + bias1[None, :]
                a = tl.where(taken[:, None], activated(z, SIGMOID), 0)
                tl.atomic_add(target, product(tl.trans(a), g), mask=square, sem="relaxed")
                back = back * a * (1 - a) if SIGMOID else tl.where(z > 0, back, 0)
                target = gradients.w1 + network * D * H + d[:, None] * H + h[None, :]
                square = (d < D)[:, None] & (h < H)[None, :]
                tl.atomic_add(target, product(tl.trans(v), back), mask=square, sem="relaxed")
                tl.atomic_add(gradients.b1 + network * H + h, tl.sum(back, 0), mask=h < H, sem="relaxed")
                back = product(back, tl.trans(weight1))
            else:
                tl.atomic_add(target, product(tl.trans(v), g), mask=square, sem="relaxed")
            tl.store(dx + elements, back.to(dx.dtype.element_ty), mask=mask)


def can_fuse(vectors: Tensor, layers: list[Tensor], networks: int) -> bool:
    """Whether the kernels support such networks; not in deterministic mode, since they sum gradients in any order."""
    if torch.are_deterministic_algorithms_enabled() or len(layers) not in (2, 4) or vectors.dtype == torch.float64:
        return False
    hidden = layers[0].shape[2] if len(layers) == 4 else 0
    width = vectors.shape[2]
    return layers[-1].shape[1] == width <= WIDEST and hidden <= WIDEST_HIDDEN and networks <= MOST_NETWORKS


def _sizes(layers: list[Tensor], networks: int) -> dict[str, int]:
    d = layers[-1].shape[1]
    h = layers[0].shape[2] if len(layers) == 4 else d
    return {"D": d, "H": h, "DP": max(16, power_of_2(d)), "HP": max(16, power_of_2(h)), "JP": power_of_2(networks + 1)}


def _grid(vectors: Tensor, num_members: int, networks: int, tile: int) -> tuple[int]:
    """The grid: blocks of ids of path-based features, then blocks of vectors to copy."""
    return (cdiv(vectors.shape[0], tile) * vectors.shape[1] + num_members * (networks + 1),)


def path(
    vectors: Tensor,
    ids: Tensor,
    layers: list[Tensor],
    slots: Tensor,
    parts: Tensor,
    columns: Tensor,
    *,
    networks: int,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``ops.path.path`` in two launches, and a memset if a feature has more ids than one program lists.

    Returns:
        The vectors; the lengths of the lists ``[M * (J + 1)]``; and the ids in the lists ``[M * (J + 1), B]``.
    """
    out, ids = torch.empty_like(vectors), ids.contiguous()
    (b, _), members, sizes = ids.shape, slots.shape[0], _sizes(layers, networks)
    tile = power_of_2(max(b, 32))
    alone = tile * sizes["JP"] <= LARGEST_TILE
    tile = tile if alone else min(128, max(32, LARGEST_TILE // sizes["JP"]))
    counts = (torch.empty if alone else torch.zeros)(members * (networks + 1), dtype=torch.int32, device=ids.device)
    lists = torch.empty(members * (networks + 1), b, dtype=torch.int32, device=ids.device)
    if vectors.numel():
        launch(
            list_kernel, (cdiv(b, tile) * members,),
            ids, NetworkLists(counts, lists), slots, parts, b, ids.stride(0), members, networks,
            JP=sizes["JP"], T=tile, ALONE=alone, FLAGS=RowFlags(owned=False, levels=0),
            num_warps=4 if tile <= 128 else 8,
        )  # fmt: skip
        block, warps = (32, 2) if b <= SMALL_BATCH else (64, 4)
        launch(
            path_kernel, _grid(vectors, members, networks, block),
            vectors, Layers.of(layers), out, NetworkLists(counts, lists), parts, columns, b, vectors.shape[1], members,
            networks, **sizes, T=block, SIGMOID=activation == "sigmoid", num_warps=warps,
        )  # fmt: skip
    return out, counts, lists


def path_backward(
    grad: Tensor,
    vectors: Tensor,
    ids: Tensor,
    layers: list[Tensor],
    slots: Tensor,
    parts: Tensor,
    columns: Tensor,
    counts: Tensor,
    lists: Tensor,
    *,
    networks: int,
    activation: str,
) -> list[Tensor]:
    """``ops.path.path_backward`` in one launch and a memset."""
    grad, dx, members, sizes = grad.contiguous(), torch.empty_like(vectors), slots.shape[0], _sizes(layers, networks)
    flat = torch.zeros(sum(t.numel() for t in layers), dtype=torch.float32, device=grad.device)
    gradients = [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in layers]), layers, strict=True)]
    if vectors.numel():
        launch(
            path_backward_kernel, _grid(vectors, members, networks, 32),
            grad, vectors, Layers.of(layers), dx, Layers.of(gradients), NetworkLists(counts, lists), parts, columns,
            ids.shape[0], vectors.shape[1], members, networks, **sizes, T=32,
            SIGMOID=activation == "sigmoid", num_warps=min(8, max(2, sizes["DP"] * sizes["HP"] // 512)),
        )  # fmt: skip
    return [dx, *(g.to(t.dtype) for g, t in zip(gradients, layers, strict=True))]
