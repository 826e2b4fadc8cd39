"""DLRM's dot products of all pairs and DCN's cross layers, each one launch forward and one launch backward.

``models.dlrm`` and ``models.dcn`` are the plain versions and explain the formulas.
"""

import triton
import triton.language as tl
from torch import Tensor

from .layers import BackwardPass, Cross, rows_of, use_gradient

CROSS_COLUMNS = 32  # columns of a program of cross_backward_kernel


@triton.jit
def stacked(low, vectors, b, v, d, low_stride, V, D, LOW: tl.constexpr):
    """The vectors of sample b, zero-padded; the bottom's output first, where there is one."""
    stored = (v >= LOW) & (v < V)
    x = tl.load(vectors + (b * (V - LOW) + v - LOW)[:, None] * D + d, mask=stored[:, None] & (d < D), other=0)
    if LOW:
        x += tl.load(low + b * low_stride + d + v[:, None] * 0, mask=(v == 0)[:, None] & (d < D), other=0)
    return x


@triton.jit
def interact_kernel(
    low, vectors, beside, out, V, D, E, low_stride, beside_stride, out_stride,
    VP: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """One sample: E columns of ``beside``, then the strict lower triangle of the vectors' Gram matrix, by rows."""
    b = tl.program_id(0).to(tl.int64)
    v, d = tl.arange(0, VP), tl.arange(0, DP)
    x = stacked(low, vectors, b, v, d[None, :], low_stride, V, D, LOW)
    dots = tl.dot(x, tl.trans(x), input_precision="ieee")
    out += b * out_stride
    if LOW:
        e = tl.arange(0, EP)
        tl.store(out + e, tl.load(beside + b * beside_stride + e, mask=e < E, other=0), mask=e < E)
    row, column = v[:, None], v[None, :]
    tl.store(out + E + row * (row - 1) // 2 + column, dots, mask=(row < V) & (column < row))


@triton.jit
def interact_backward_kernel(
    grad, low, vectors, dlow, dvectors, V, D, E, grad_stride, low_stride, dlow_stride,
    VP: tl.constexpr, DP: tl.constexpr, LOW: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """One sample: the gradients of its vectors; of the bottom's output, what goes into its ReLU."""
    b = tl.program_id(0).to(tl.int64)
    v, d = tl.arange(0, VP), tl.arange(0, DP)
    x = stacked(low, vectors, b, v, d[None, :], low_stride, V, D, LOW)
    row, column = v[:, None], v[None, :]
    later, earlier = tl.maximum(row, column), tl.minimum(row, column)
    grad += b * grad_stride
    g = tl.load(grad + E + later * (later - 1) // 2 + earlier, mask=(later < V) & (earlier < later), other=0)
    dx = tl.dot(g, x, input_precision="ieee")
    columns = d[None, :]
    if LOW:
        first = row == 0
        if not RAW:
            dx += tl.load(grad + columns + row * 0, mask=first & (columns < D), other=0)
        target = dlow + b * dlow_stride + columns + row * 0
        tl.store(target, tl.where(x <= 0, 0, dx), mask=first & (columns < D))
    mask = (row >= LOW) & (row < V) & (columns < D)
    tl.store(dvectors + (b * (V - LOW) + row - LOW) * D + columns, dx, mask=mask)


@triton.jit(do_not_specialize=["B"])
def cross_kernel(
    dense, vectors, weight, bias, output, x0, scales, dots, products, B, E, M, dense_stride, vectors_stride, x0_stride,
    ROWS: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """ROWS samples: E dense columns and M of the vectors into x0, and the cross layers' share of the logits."""
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, C)
    inside, row = (b < B)[:, None], b[:, None]
    x = tl.load(dense + row * dense_stride + c[None, :], mask=inside & (c < E)[None, :], other=0)
    late = (c >= E) & (c < E + M)
    x += tl.load(vectors + row * vectors_stride + (c - E)[None, :], mask=inside & late[None, :], other=0)
    tl.store(x0 + row * x0_stride + c[None, :], x, mask=inside & (c < E + M)[None, :])
    a = tl.full((ROWS,), 1, tl.float32)
    biases = tl.zeros((C,), tl.float32)
    for layer in tl.static_range(L + 1):
        weights = output if layer == L else weight + layer * (E + M)
        w = tl.load(weights + c, mask=c < E + M, other=0)
        dot = tl.sum(x * w[None, :], 1)
        tl.store(scales + b * (L + 1) + layer, a, mask=b < B)
        tl.store(dots + b * (L + 1) + layer, dot, mask=b < B)
        shift = tl.sum(biases * w)
        if layer == L:
            tl.store(products + b, a * dot + shift, mask=b < B)
        else:
            a = a * (1 + dot) + shift
            biases += tl.load(bias + layer * (E + M) + c, mask=c < E + M, other=0)


@triton.jit(do_not_specialize=["B"])
def cross_backward_kernel(
    x0, shares, shifts, weight, w0, w1, w2, bias, b0, b1, b2, output, o0, o1, o2, paces, constants, B, W, x0_stride,
    C: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, LP: tl.constexpr,
    PRECISION: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """C columns of the cross layers' weights and biases and of the output unit."""
    c, layer = tl.program_id(0) * C + tl.arange(0, C), tl.arange(0, LP)
    dw = tl.zeros((LP, C), tl.float32)
    dshift = tl.zeros((LP,), tl.float32)
    for start in range(0, B, BK):
        b = start + tl.arange(0, BK)
        mask = (b < B)[:, None] & (layer <= L)[None, :]
        share = tl.load(shares + b[:, None] * (L + 1) + layer[None, :], mask=mask, other=0)
        dshift += tl.sum(tl.load(shifts + b[:, None] * (L + 1) + layer[None, :], mask=mask, other=0), 0)
        x = tl.load(x0 + b[:, None] * x0_stride + c[None, :], mask=(b < B)[:, None] & (c < W)[None, :], other=0)
        dw += tl.dot(tl.trans(share), x, input_precision=PRECISION)
    cross, last = (layer < L)[:, None] & (c < W)[None, :], (layer == L)[:, None] & (c < W)[None, :]
    elements = layer[:, None] * W + c[None, :]
    of_output = c[None, :] + layer[:, None] * 0
    w = tl.load(weight + elements, mask=cross, other=0) + tl.load(output + of_output, mask=last, other=0)
    below = (layer[:, None] > layer[None, :]).to(tl.float32)  # shift[l] = w[l] . (sum of the biases below l)
    dw += dshift[:, None] * tl.dot(below, tl.load(bias + elements, mask=cross, other=0), input_precision="ieee")
    dbias = tl.dot(tl.trans(below), dshift[:, None] * w, input_precision="ieee")
    tl.debug_barrier()  # several threads may read what one changes
    use_gradient(weight, w0, w1, w2, elements, cross, dw, paces, constants, RULE)
    use_gradient(output, o0, o1, o2, of_output, last, dw, paces, constants, RULE)
    use_gradient(bias, b0, b1, b2, elements, cross, dbias, paces, constants, RULE)


def _padded(vectors: Tensor, low: Tensor | None) -> dict[str, int | bool]:
    count = vectors.shape[1] + (low is not None)
    sizes = {"VP": max(16, triton.next_power_of_2(count)), "DP": max(16, triton.next_power_of_2(vectors.shape[2]))}
    return sizes | {"LOW": int(low is not None), "num_warps": 4 if sizes["VP"] > 32 else 2}


def interact(low: Tensor | None, vectors: Tensor, beside: Tensor | None) -> Tensor:
    """``beside`` and the dot products of all pairs among ``low`` ``[B, D]`` and ``vectors`` ``[B, V, D]``."""
    count, width = vectors.shape[1] + (low is not None), vectors.shape[2]
    extra = 0 if beside is None else beside.shape[1]
    out = rows_of(vectors, extra + count * (count - 1) // 2)
    interact_kernel[(len(vectors),)](
        vectors if low is None else low, vectors, vectors if beside is None else beside, out, count, width, extra,
        0 if low is None else low.stride(0), 0 if beside is None else beside.stride(0), out.stride(0),
        EP=triton.next_power_of_2(max(extra, 1)), **_padded(vectors, low),
    )  # fmt: skip
    return out


def interact_backward(grad: Tensor, low: Tensor | None, vectors: Tensor, raw: bool) -> tuple[Tensor | None, Tensor]:
    """Backward of ``interact``: gradients of the input of the ReLU whose output is ``low``, and of ``vectors``.

    ``raw``: whether the raw dense features, not ``low``, were placed beside the dot products.
    """
    count, width = vectors.shape[1] + (low is not None), vectors.shape[2]
    dlow = None if low is None else rows_of(vectors, width)
    dvectors = vectors.new_empty(vectors.shape)
    interact_backward_kernel[(len(vectors),)](
        grad, vectors if low is None else low, vectors, dvectors if dlow is None else dlow, dvectors, count, width,
        grad.shape[1] - count * (count - 1) // 2, grad.stride(0), 0 if low is None else low.stride(0),
        0 if dlow is None else dlow.stride(0), RAW=raw, **_padded(vectors, low),
    )  # fmt: skip
    return dlow, dvectors


def cross(dense: Tensor, vectors: Tensor, weight: Tensor, bias: Tensor, output: Tensor) -> tuple[Tensor, Cross]:
    """Forward through the cross layers.

    Returns:
        x0, which is ``dense`` and ``vectors`` ``[B, M]`` side by side; and the results of the cross layers, with
        uninitialized tensors for their gradients.
    """
    layers, columns = weight.shape
    x0 = rows_of(vectors, columns)
    scales, dots, shares, shifts = (vectors.new_empty(len(vectors), layers + 1) for _ in range(4))
    products, rows = vectors.new_empty(len(vectors)), 1 if columns > 512 else 2
    cross_kernel[(triton.cdiv(len(vectors), rows),)](
        dense, vectors, weight, bias, output, x0, scales, dots, products, len(vectors), dense.shape[1],
        vectors.shape[1], dense.stride(0), vectors.stride(0), x0.stride(0),
        ROWS=rows, C=triton.next_power_of_2(columns), L=layers,
    )  # fmt: skip
    return x0, Cross(scales, dots, products, shares, shifts)


def cross_backward(
    backward: BackwardPass, x0: Tensor, cross: Cross, weight: list[Tensor], bias: list[Tensor], output: list[Tensor]
) -> None:
    """Update weights and biases of the cross layers, and the output unit's weights for them.

    ``weight``, ``bias`` and ``output`` are each a parameter and its three tensors, as in ``LayerUpdate``.
    """
    layers, columns = weight[0].shape
    cross_backward_kernel[(triton.cdiv(columns, CROSS_COLUMNS),)](
        x0, cross.shares, cross.shifts, *weight, *bias, *output, backward.paces, backward.constants, len(x0), columns,
        x0.stride(0), C=CROSS_COLUMNS, BK=32, L=layers, LP=max(16, triton.next_power_of_2(layers + 1)),
        PRECISION=backward.precision, RULE=backward.rule,
    )  # fmt: skip
