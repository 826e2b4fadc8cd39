"""Path networks of one hidden layer or none, in one launch; the gradient in another.

A program runs one network of one feature over a block of ids and keeps the ids that are that network's: no sorting, and
every weight matrix stays in registers. Work grows with the networks of a feature, so it serves few of them.

``slots`` and ``parts`` are as in ``ops.layout``, a slot per feature and a partition per level; a row is a network.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .index import base_of, feature_of, is_valid, part_at, row_of, size_of, slot_at

MOST_NETWORKS, WIDEST, WIDEST_HIDDEN = 16, 64, 128  # of a feature; columns of a vector; units of the hidden layer


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
def members_of(ids, n, slot, part, B, id_stride, network):
    """Which of the ids are valid, and which of those take this network."""
    i = tl.load(ids + n * id_stride + feature_of(slot), mask=n < B, other=-1)
    valid = is_valid(i, slot)
    row, _ = row_of(tl.where(valid, i, 0), slot, part, part)
    return valid, valid & (row == network)


@triton.jit
def path_kernel(
    x, ids, w1, b1, w2, b2, out, slots, parts, columns, B, id_stride, S, M, J,
    D: tl.constexpr, H: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr, T: tl.constexpr,
    HIDDEN: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """T ids of one feature through its j-th network; other networks' ids are left to them, invalid ids to the first."""
    j = tl.program_id(0) % J
    m = (tl.program_id(0) // J) % M
    n = (tl.program_id(0) // (J * M)).to(tl.int64) * T + tl.arange(0, T)
    slot, part = slot_at(slots, m), part_at(parts, m)
    if j < size_of(part):
        network = base_of(part) + j
        valid, mine = members_of(ids, n, slot, part, B, id_stride, network)
        d, h = tl.arange(0, DP), tl.arange(0, HP)
        here = (n * S + tl.load(columns + m))[:, None] * D + d[None, :]
        y = tl.load(x + here, mask=mine[:, None] & (d < D)[None, :], other=0).to(tl.float32)
        if HIDDEN:
            z = product(y, matrix(w1, network, d, h, D, H))
            z += tl.load(b1 + network * H + h, mask=h < H, other=0).to(tl.float32)[None, :]
            y = product(activated(z, SIGMOID), matrix(w2, network, h, d, H, D))
        else:
            y = product(y, matrix(w2, network, d, d, D, D))
        y += tl.load(b2 + network * D + d, mask=d < D, other=0).to(tl.float32)[None, :]
        written = mine | ((j == 0) & (n < B) & (valid == 0))
        y = tl.where(mine[:, None], y, 0)
        tl.store(out + here, y.to(out.dtype.element_ty), mask=written[:, None] & (d < D)[None, :])


@triton.jit
def path_backward_kernel(
    grad, x, ids, w1, b1, w2, dx, dw1, db1, dw2, db2, slots, parts, columns, B, id_stride, S, M, J, splits,
    D: tl.constexpr, H: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr, T: tl.constexpr,
    HIDDEN: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """One network of one feature over every ``splits``-th block: its gradients, and those of its ids' vectors."""
    j = tl.program_id(0) % J
    m = (tl.program_id(0) // J) % M
    split = tl.program_id(0) // (J * M)
    slot, part = slot_at(slots, m), part_at(parts, m)
    if j < size_of(part):
        network = base_of(part) + j
        d, h = tl.arange(0, DP), tl.arange(0, HP)
        weight2 = matrix(w2, network, h, d, H, D)
        grad2, bias2 = tl.zeros((HP, DP), tl.float32), tl.zeros((DP,), tl.float32)
        grad1, bias1 = tl.zeros((DP, HP), tl.float32), tl.zeros((HP,), tl.float32)
        if HIDDEN:
            weight1 = matrix(w1, network, d, h, D, H)
            start1 = tl.load(b1 + network * H + h, mask=h < H, other=0).to(tl.float32)
        for block in range(split, tl.cdiv(B, T), splits):
            n = block.to(tl.int64) * T + tl.arange(0, T)
            valid, mine = members_of(ids, n, slot, part, B, id_stride, network)
            here = (n * S + tl.load(columns + m))[:, None] * D + d[None, :]
            mask = mine[:, None] & (d < D)[None, :]
            v = tl.load(x + here, mask=mask, other=0).to(tl.float32)
            g = tl.load(grad + here, mask=mask, other=0).to(tl.float32)
            bias2 += tl.sum(g, 0)
            back = product(g, tl.trans(weight2))
            if HIDDEN:
                z = product(v, weight1) + start1[None, :]
                a = tl.where(mine[:, None], activated(z, SIGMOID), 0)
                grad2 += product(tl.trans(a), g)
                back = back * a * (1 - a) if SIGMOID else tl.where(z > 0, back, 0)
                grad1 += product(tl.trans(v), back)
                bias1 += tl.sum(back, 0)
                back = product(back, tl.trans(weight1))
            else:
                grad2 += product(tl.trans(v), g)
            written = mine | ((j == 0) & (n < B) & (valid == 0))
            back = tl.where(mine[:, None], back, 0)
            tl.store(dx + here, back.to(dx.dtype.element_ty), mask=written[:, None] & (d < D)[None, :])
        mask = (h < H)[:, None] & (d < D)[None, :]
        tl.atomic_add(dw2 + network * H * D + h[:, None] * D + d[None, :], grad2, mask=mask, sem="relaxed")
        tl.atomic_add(db2 + network * D + d, bias2, mask=d < D, sem="relaxed")
        if HIDDEN:
            mask = (d < D)[:, None] & (h < H)[None, :]
            tl.atomic_add(dw1 + network * D * H + d[:, None] * H + h[None, :], grad1, mask=mask, sem="relaxed")
            tl.atomic_add(db1 + network * H + h, bias1, mask=h < H, sem="relaxed")


def _sizes(layers: list[Tensor]) -> dict[str, int | bool]:
    hidden = len(layers) == 4
    d = layers[-1].shape[1]
    h = layers[0].shape[2] if hidden else d
    padded = {"DP": max(16, triton.next_power_of_2(d)), "HP": max(16, triton.next_power_of_2(h))}
    return {"D": d, "H": h, "HIDDEN": hidden} | padded


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
) -> Tensor:
    """``ops.path.path`` in one launch, and a copy of the vectors where some of them are not path-based."""
    ids = ids.contiguous()
    out = torch.empty_like(vectors) if len(columns) == vectors.shape[1] else vectors.clone()
    if vectors.numel():
        w1, b1, w2, b2 = layers if len(layers) == 4 else (None, None, *layers)
        block = 64
        path_kernel[(triton.cdiv(len(ids), block) * len(columns) * networks,)](
            vectors, ids, w1, b1, w2, b2, out, slots, parts, columns, len(ids), ids.stride(0), vectors.shape[1],
            len(columns), networks, T=block, SIGMOID=activation == "sigmoid", num_warps=4, **_sizes(layers),
        )  # fmt: skip
    return out


def path_backward(
    grad: Tensor,
    vectors: Tensor,
    ids: Tensor,
    layers: list[Tensor],
    slots: Tensor,
    parts: Tensor,
    columns: Tensor,
    *,
    networks: int,
    activation: str,
) -> list[Tensor]:
    """``ops.path.path_backward`` in one launch and a memset."""
    ids, grad = ids.contiguous(), grad.contiguous()
    dx = torch.empty_like(vectors) if len(columns) == vectors.shape[1] else grad.clone()
    flat = torch.zeros(sum(t.numel() for t in layers), dtype=torch.float32, device=grad.device)
    gradients = [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in layers]), layers, strict=True)]
    if vectors.numel():
        w1, b1, w2, _ = layers if len(layers) == 4 else (None, None, *layers)
        dw1, db1, dw2, db2 = gradients if len(layers) == 4 else (None, None, *gradients)
        block = 64
        splits = max(1, min(triton.cdiv(len(ids), block), 8))
        path_backward_kernel[(len(columns) * networks * splits,)](
            grad, vectors, ids, w1, b1, w2, dx, dw1, db1, dw2, db2, slots, parts, columns, len(ids), ids.stride(0),
            vectors.shape[1], len(columns), networks, splits,
            T=block, SIGMOID=activation == "sigmoid", num_warps=4, **_sizes(layers),
        )  # fmt: skip
    return [dx, *(g.to(t.dtype) for g, t in zip(gradients, layers, strict=True))]
