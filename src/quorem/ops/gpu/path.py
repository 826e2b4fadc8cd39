"""Path networks with at most one hidden layer: one launch lists the ids of each network, one runs the networks.

A program runs one network over a block of its ids, so each id is computed once and a weight matrix stays in registers.
The ids of a feature fill at most ``ids / T + networks + 1`` blocks, whichever networks they use: the grid is fixed.
Ids that use none (padding, out of range) have a list of their own, after those of the J networks. The backward pass
uses the lists of the forward pass. ``PathNetworks.forward`` is the plain version, ten times slower on an H200.

A program that lists ids ranks them in a one-hot matrix ``[JP, T]`` of lists by ids (JP: J + 1 as a power of 2) and
reserves space in all lists of its feature at once. If one program handles all ids of a feature, as with small batches,
it needs neither atomics nor counts that start at zero.

``slots`` and ``parts`` are as in ``ops.layout``: a slot is a feature, a partition is a level, and a row is a network.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, launch, power_of_2
from .projection import product
from .rows import BASE, FEATURE, SLOT_COLUMNS, bucket_at, elements_of, is_valid, part_at

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
    def of(layers: Sequence[Tensor]) -> "Layers":
        """One layer or two."""
        return Layers(*layers) if len(layers) == 4 else Layers(None, None, *layers)


class NetworkLists(NamedTuple):
    """The ids of each network."""

    counts: Tensor  # int32 [M * (J + 1)]
    ids: Tensor  # int32 [M * (J + 1), B]


@triton.jit
def matrix(weights, network, rows, columns, R: tl.constexpr, C: tl.constexpr):
    """One network's weights ``[R, C]``, zero-padded."""
    elements, mask = elements_of(rows, rows < R, columns, C)
    return tl.load(weights + network * R * C + elements, mask=mask, other=0).to(tl.float32)


@triton.jit
def activated(z, SIGMOID: tl.constexpr):
    """The hidden layer's units."""
    return tl.sigmoid(z) if SIGMOID else tl.maximum(z, 0)


@triton.jit
def list_kernel(
    ids, lists, slots, parts, B, id_stride, M, J,
    JP: tl.constexpr, T: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """T ids of one feature, all of them if ALONE: enter each into its network's list."""
    m = tl.program_id(0) % M
    n = (tl.program_id(0) // M).to(tl.int64) * T + tl.arange(0, T)
    slot, part = slots + m * SLOT_COLUMNS, part_at(parts, m)
    i = tl.load(ids + n * id_stride + tl.load(slot + FEATURE), mask=n < B, other=-1)
    valid = is_valid(i, slot, 1)
    network = bucket_at(tl.where(valid, i, 0).to(tl.int64), part, 1)
    listed = tl.where(valid, network.to(tl.int32), J)
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
def block_of(program, lists, parts, B, M, J, D: tl.constexpr, DP: tl.constexpr, JP: tl.constexpr, T: tl.constexpr):
    """The block of T ids of one feature that a program has: its list, -1 past the last, J for ids without a network;
    its network; and where the vectors of the ids lie, and which numbers of these exist."""
    m, c, j = program % M, program // M, tl.arange(0, JP)
    counts = tl.load(lists.counts + m * (J + 1) + j, mask=j <= J, other=0)
    blocks = tl.cdiv(counts, T)
    before = tl.cumsum(blocks, 0) - blocks
    inside = (c >= before) & (c < before + blocks)
    listed = tl.sum(tl.where(inside, j + 1, 0)) - 1
    place = tl.sum(tl.where(inside, c - before, 0)) * T + tl.arange(0, T)
    taken = place < tl.sum(inside * counts)
    n = tl.load(lists.ids + (m * (J + 1) + listed).to(tl.int64) * B + place, mask=taken, other=0).to(tl.int64)
    elements, mask = elements_of(n * M + m, taken, tl.arange(0, DP), D)
    return listed, tl.load(part_at(parts, m) + BASE) + listed, elements, mask


@triton.jit
def hidden_of(x, layers, network, D: tl.constexpr, H: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr):
    """What goes into the activation ``[T, HP]``, and the weights of the first layer."""
    d, h = tl.arange(0, DP), tl.arange(0, HP)
    weights = matrix(layers.w1, network, d, h, D, H)
    z = product(x, weights)
    return z + tl.load(layers.b1 + network * H + h, mask=h < H, other=0).to(tl.float32)[None, :], weights


@triton.jit
def path_kernel(
    x, layers, out, lists, parts, B, M, J, D: tl.constexpr, H: tl.constexpr, DP: tl.constexpr,
    HP: tl.constexpr, JP: tl.constexpr, T: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """T ids of one network."""
    listed, network, elements, mask = block_of(tl.program_id(0), lists, parts, B, M, J, D, DP, JP, T)
    d, h = tl.arange(0, DP), tl.arange(0, HP)
    if listed == J:
        tl.store(out + elements, tl.zeros((T, DP), out.dtype.element_ty), mask=mask)
    elif listed >= 0:
        y = tl.load(x + elements, mask=mask, other=0).to(tl.float32)
        if layers.w1 is not None:
            z, _ = hidden_of(y, layers, network, D, H, DP, HP)
            y = activated(z, SIGMOID)
        y = product(y, matrix(layers.w2, network, h, d, H, D))
        y += tl.load(layers.b2 + network * D + d, mask=d < D, other=0).to(tl.float32)[None, :]
        tl.store(out + elements, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def path_backward_kernel(
    grad, x, layers, dx, gradients, lists, parts, B, M, J, D: tl.constexpr, H: tl.constexpr,
    DP: tl.constexpr, HP: tl.constexpr, JP: tl.constexpr, T: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """T ids of one network: their share of its gradients, and the gradients of their vectors."""
    listed, network, elements, mask = block_of(tl.program_id(0), lists, parts, B, M, J, D, DP, JP, T)
    d, h = tl.arange(0, DP), tl.arange(0, HP)
    if listed == J:
        tl.store(dx + elements, tl.zeros((T, DP), dx.dtype.element_ty), mask=mask)
    elif listed >= 0:
        v = tl.load(x + elements, mask=mask, other=0).to(tl.float32)
        g = tl.load(grad + elements, mask=mask, other=0).to(tl.float32)
        tl.atomic_add(gradients.b2 + network * D + d, tl.sum(g, 0), mask=d < D, sem="relaxed")
        back = product(g, tl.trans(matrix(layers.w2, network, h, d, H, D)))
        a = v
        if layers.w1 is not None:
            z, weights = hidden_of(v, layers, network, D, H, DP, HP)
            a = activated(z, SIGMOID)
        target, square = elements_of(h, h < H, d, D)
        target += network * H * D
        tl.atomic_add(gradients.w2 + target, product(tl.trans(a), g), mask=square, sem="relaxed")
        if layers.w1 is not None:
            back = back * a * (1 - a) if SIGMOID else tl.where(z > 0, back, 0)
            target, square = elements_of(d, d < D, h, H)
            target += network * D * H
            tl.atomic_add(gradients.w1 + target, product(tl.trans(v), back), mask=square, sem="relaxed")
            tl.atomic_add(gradients.b1 + network * H + h, tl.sum(back, 0), mask=h < H, sem="relaxed")
            back = product(back, tl.trans(weights))
        tl.store(dx + elements, back.to(dx.dtype.element_ty), mask=mask)


def can_fuse(vectors: Tensor, layers: list[Tensor], networks: int) -> bool:
    """Whether the kernels support such networks; not in deterministic mode, since they sum gradients in any order."""
    if torch.are_deterministic_algorithms_enabled() or len(layers) not in (2, 4) or vectors.dtype == torch.float64:
        return False
    hidden = layers[0].shape[2] if len(layers) == 4 else 0
    return vectors.shape[2] <= WIDEST and hidden <= WIDEST_HIDDEN and networks <= MOST_NETWORKS


def transformed(
    vectors: Tensor, ids: Tensor, layers: list[Tensor], slots: Tensor, parts: Tensor, networks: int, activation: str
) -> Tensor:
    """The vectors ``[B, M, D]`` of M features, each through the network that its id in ``ids`` ``[B, F]`` selects.

    ``layers`` are weight ``[G, in, out]`` and bias ``[G, out]`` of one or two; no feature has more than ``networks``.
    """
    out: Tensor = _Path.apply(vectors, ids, slots, parts, networks, activation == "sigmoid", *layers)
    return out


class _Path(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Two launches, and a memset if a feature has more ids than one program lists."""
        vectors, ids, slots, parts, networks, sigmoid, *layers = inputs
        vectors, ids = vectors.contiguous(), ids.contiguous()
        out, b, members, sizes = torch.empty_like(vectors), len(ids), len(slots), _sizes(layers, networks)
        tile = power_of_2(max(b, 32))
        alone = tile * sizes["JP"] <= LARGEST_TILE
        tile = tile if alone else min(128, max(32, LARGEST_TILE // sizes["JP"]))
        counts = (torch.empty if alone else torch.zeros)(members * (networks + 1), dtype=torch.int32, device=ids.device)
        lists = NetworkLists(counts, torch.empty(members * (networks + 1), b, dtype=torch.int32, device=ids.device))
        if vectors.numel():
            launch(
                list_kernel, (cdiv(b, tile) * members,),
                ids, lists, slots, parts, b, ids.stride(0), members, networks,
                JP=sizes["JP"], T=tile, ALONE=alone, num_warps=4 if tile <= 128 else 8,
            )  # fmt: skip
            block, warps = (32, 2) if b <= SMALL_BATCH else (64, 4)
            launch(
                path_kernel, ((cdiv(b, block) + networks + 1) * members,),
                vectors, Layers.of(layers), out, lists, parts, b, members, networks,
                **sizes, T=block, SIGMOID=sigmoid, num_warps=warps,
            )  # fmt: skip
        ctx.networks, ctx.sigmoid = networks, sigmoid
        ctx.save_for_backward(vectors, parts, *lists, *layers)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """One launch and a memset."""
        vectors, parts, counts, ids, *layers = ctx.saved_tensors
        grad, sizes = grad.contiguous(), _sizes(layers, ctx.networks)
        (b, members, _), of_vectors = vectors.shape, torch.empty_like(vectors)
        flat = torch.zeros(sum(t.numel() for t in layers), dtype=torch.float32, device=grad.device)
        gradients = [part.view_as(t) for part, t in zip(flat.split([t.numel() for t in layers]), layers, strict=True)]
        if vectors.numel():
            launch(
                path_backward_kernel, ((cdiv(b, 32) + ctx.networks + 1) * members,),
                grad, vectors, Layers.of(layers), of_vectors, Layers.of(gradients), NetworkLists(counts, ids), parts, b,
                members, ctx.networks, **sizes, T=32, SIGMOID=ctx.sigmoid,
                num_warps=min(8, max(2, sizes["DP"] * sizes["HP"] // 512)),
            )  # fmt: skip
        return of_vectors, *[None] * 5, *(g.to(t.dtype) for g, t in zip(gradients, layers, strict=True))


def _sizes(layers: Sequence[Tensor], networks: int) -> dict[str, int]:
    d = layers[-1].shape[1]
    h = layers[0].shape[2] if len(layers) == 4 else d
    return {"D": d, "H": h, "DP": max(16, power_of_2(d)), "HP": max(16, power_of_2(h)), "JP": power_of_2(networks + 1)}
