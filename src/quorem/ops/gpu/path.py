"""Path networks of one hidden layer or none: one launch lists the ids of each network, one runs the networks.

A program runs one network over a block of its ids, so each id is computed once and a weight matrix stays in registers.
The ids of a feature fill at most ``ids / T + networks + 1`` blocks, whatever the network they take: the grid is fixed.
Ids that take none (padding, out of range) have a list of their own, after those of the J networks. The backward pass
uses the lists of the forward pass.

``slots`` and ``parts`` are as in ``ops.layout``, a slot per feature and a partition per level; a row is a network.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .index import base_of, feature_of, is_valid, part_at, row_of, slot_at
from .launch import launch

MOST_NETWORKS, WIDEST, WIDEST_HIDDEN = 64, 64, 128  # of a feature; columns of a vector; units of the hidden layer


@triton.jit
def matrix(weight, network, rows, columns, R: tl.constexpr, C: tl.constexpr):
    """One network's weights ``[R, C]``, zero-padded."""
    mask = (rows < R)[:, None] & (columns < C)[None, :]
    return tl.load(weight + network * R * C + rows[:, None] * C + columns[None, :], mask=mask, other=0).to(tl.float32)


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
    ids, counts, lists, slots, parts, B, id_stride, M, J, T: tl.constexpr
):  # fmt: skip
    """T ids of one feature: enter each into its network's list."""
    m = tl.program_id(0) % M
    n = (tl.program_id(0) // M).to(tl.int64) * T + tl.arange(0, T)
    slot, part = slot_at(slots, m), part_at(parts, m)
    i = tl.load(ids + n * id_stride + feature_of(slot), mask=n < B, other=-1)
    valid = is_valid(i, slot)
    network, _ = row_of(tl.where(valid, i, 0), slot, part, parts)
    own = tl.where(valid, (network - base_of(part)).to(tl.int32), J)
    for j in range(0, J + 1):
        mine = ((n < B) & (own == j)).to(tl.int32)
        first = tl.atomic_add(counts + m * (J + 1) + j, tl.sum(mine), sem="relaxed")
        place = (m * (J + 1) + j).to(tl.int64) * B + first + tl.cumsum(mine) - 1
        tl.store(lists + place, n.to(tl.int32), mask=mine == 1)


@triton.jit
def block_of(c, counts, m, J, T: tl.constexpr):
    """The c-th block of a feature's ids: its list, -1 past the last, and the place of its first id in the list."""
    own = tl.full((), -1, tl.int32)
    start = tl.full((), 0, tl.int32)
    before = tl.full((), 0, tl.int32)
    for j in range(0, J + 1):
        blocks = tl.cdiv(tl.load(counts + m * (J + 1) + j), T)
        here = (c >= before) & (c < before + blocks)
        own = tl.where(here, j, own)
        start = tl.where(here, (c - before) * T, start)
        before += blocks
    return own, start


@triton.jit
def vectors_of(m, j, start, d, counts, lists, columns, B, S, J, D: tl.constexpr, T: tl.constexpr):
    """Which of T places of a list hold an id, and where column d of their vectors lies."""
    place = start + tl.arange(0, T)
    mine = place < tl.load(counts + m * (J + 1) + j)
    n = tl.load(lists + (m * (J + 1) + j).to(tl.int64) * B + place, mask=mine, other=0).to(tl.int64)
    return mine, (n * S + tl.load(columns + m))[:, None] * D + d[None, :]


@triton.jit
def path_kernel(
    x, w1, b1, w2, b2, out, counts, lists, parts, columns, B, S, M, J,
    D: tl.constexpr, H: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr, T: tl.constexpr,
    HIDDEN: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """T ids of one network."""
    m = tl.program_id(0) % M
    j, start = block_of(tl.program_id(0) // M, counts, m, J, T)
    if j >= 0:
        network = base_of(part_at(parts, m)) + j
        d, h = tl.arange(0, DP), tl.arange(0, HP)
        mine, here = vectors_of(m, j, start, d, counts, lists, columns, B, S, J, D, T)
        mask = mine[:, None] & (d < D)[None, :]
        if j == J:
            tl.store(out + here, tl.zeros((T, DP), out.dtype.element_ty), mask=mask)
        else:
            y = tl.load(x + here, mask=mask, other=0).to(tl.float32)
            if HIDDEN:
                z = product(y, matrix(w1, network, d, h, D, H))
                z += tl.load(b1 + network * H + h, mask=h < H, other=0).to(tl.float32)[None, :]
                y = product(activated(z, SIGMOID), matrix(w2, network, h, d, H, D))
            else:
                y = product(y, matrix(w2, network, d, d, D, D))
            y += tl.load(b2 + network * D + d, mask=d < D, other=0).to(tl.float32)[None, :]
            tl.store(out + here, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def path_backward_kernel(
    grad, x, w1, b1, w2, dx, dw1, db1, dw2, db2, counts, lists, parts, columns, B, S, M, J,
    D: tl.constexpr, H: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr, T: tl.constexpr,
    HIDDEN: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """T ids of one network: their share of its gradients, and the gradients of their vectors."""
    m = tl.program_id(0) % M
    j, start = block_of(tl.program_id(0) // M, counts, m, J, T)
    if j >= 0:
        network = base_of(part_at(parts, m)) + j
        d, h = tl.arange(0, DP), tl.arange(0, HP)
        mine, here = vectors_of(m, j, start, d, counts, lists, columns, B, S, J, D, T)
        mask = mine[:, None] & (d < D)[None, :]
        if j == J:
            tl.store(dx + here, tl.zeros((T, DP), dx.dtype.element_ty), mask=mask)
        else:
            v = tl.load(x + here, mask=mask, other=0).to(tl.float32)
            g = tl.load(grad + here, mask=mask, other=0).to(tl.float32)
            tl.atomic_add(db2 + network * D + d, tl.sum(g, 0), mask=d < D, sem="relaxed")
            back = product(g, tl.trans(matrix(w2, network, h, d, H, D)))
            square = (h < H)[:, None] & (d < D)[None, :]
            there = dw2 + network * H * D + h[:, None] * D + d[None, :]
            if HIDDEN:
                weight1 = matrix(w1, network, d, h, D, H)
                z = product(v, weight1) + tl.load(b1 + network * H + h, mask=h < H, other=0).to(tl.float32)[None, :]
                a = tl.where(mine[:, None], activated(z, SIGMOID), 0)
                tl.atomic_add(there, product(tl.trans(a), g), mask=square, sem="relaxed")
                back = back * a * (1 - a) if SIGMOID else tl.where(z > 0, back, 0)
                there = dw1 + network * D * H + d[:, None] * H + h[None, :]
                square = (d < D)[:, None] & (h < H)[None, :]
                tl.atomic_add(there, product(tl.trans(v), back), mask=square, sem="relaxed")
                tl.atomic_add(db1 + network * H + h, tl.sum(back, 0), mask=h < H, sem="relaxed")
                back = product(back, tl.trans(weight1))
            else:
                tl.atomic_add(there, product(tl.trans(v), g), mask=square, sem="relaxed")
            tl.store(dx + here, back.to(dx.dtype.element_ty), mask=mask)


def _sizes(layers: list[Tensor]) -> dict[str, int]:
    d = layers[-1].shape[1]
    h = layers[0].shape[2] if len(layers) == 4 else d
    return {"D": d, "H": h, "DP": max(16, triton.next_power_of_2(d)), "HP": max(16, triton.next_power_of_2(h))}


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
    """``ops.path.path`` in two launches and a memset, and a copy of the vectors where some of them are not path-based.

    Returns:
        The vectors; how many ids each list has ``[M * (J + 1)]``, and which ``[M * (J + 1), B]``.
    """
    out = torch.empty_like(vectors) if len(columns) == vectors.shape[1] else vectors.clone()
    ids, num_lists = ids.contiguous(), len(columns) * (networks + 1)
    counts = torch.zeros(num_lists, dtype=torch.int32, device=ids.device)
    lists = torch.empty(num_lists, len(ids), dtype=torch.int32, device=ids.device)
    if vectors.numel():
        launch(
            list_kernel, (triton.cdiv(len(ids), 128) * len(columns),),
            ids, counts, lists, slots, parts, len(ids), ids.stride(0), len(columns), networks, T=128,
        )  # fmt: skip
        w1, b1, w2, b2 = layers if len(layers) == 4 else (None, None, *layers)
        launch(
            path_kernel, (len(columns) * (triton.cdiv(len(ids), 64) + networks + 1),),
            vectors, w1, b1, w2, b2, out, counts, lists, parts, columns, len(ids), vectors.shape[1], len(columns),
            networks, **_sizes(layers), T=64, HIDDEN=len(layers) == 4, SIGMOID=activation == "sigmoid",
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
    grad = grad.contiguous()
    dx = torch.empty_like(vectors) if len(columns) == vectors.shape[1] else grad.clone()
    flat = torch.zeros(sum(t.numel() for t in layers), dtype=torch.float32, device=grad.device)
    gradients = [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in layers]), layers, strict=True)]
    if vectors.numel():
        w1, b1, w2, _ = layers if len(layers) == 4 else (None, None, *layers)
        dw1, db1, dw2, db2 = gradients if len(layers) == 4 else (None, None, *gradients)
        launch(
            path_backward_kernel, (len(columns) * (triton.cdiv(len(ids), 32) + networks + 1),),
            grad, vectors, w1, b1, w2, dx, dw1, db1, dw2, db2, counts, lists, parts, columns, len(ids),
            vectors.shape[1], len(columns), networks, **_sizes(layers), T=32, HIDDEN=len(layers) == 4,
            SIGMOID=activation == "sigmoid", num_warps=2,
        )  # fmt: skip
    return [dx, *(g.to(t.dtype) for g, t in zip(gradients, layers, strict=True))]
