"""A network's dense layers at a small batch, where launches cost more than products.

A layer is ``relu(x weight^T + bias)``. Forward it is one launch. In the backward pass a launch computes the gradient of
one layer's input and, in other programs, the gradients of weight and bias of the layer above it (a ``LayerUpdate``).
The gradient of that layer's input was computed by an earlier launch, so no weight changes while a program still reads
it. A weight's gradient is either stored or, tile by tile as it is complete, used by the optimizer's rule at once.

No sum is split between programs and there are no atomics: equal inputs give equal bits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..ops.gpu.rows import mask_if
from ..ops.gpu.rules import move, pace


@dataclass
class Tile:
    """A program's tile: rows and columns of its product, depth of one step of a warp, warps, and pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int = 8
    stages: int = 3


# With 128 samples and layers of 256 to 512 units, a launch has about as many tiles as a large GPU has multiprocessors.
FORWARD, INPUT, WEIGHT = Tile(16, 32, 32, 4), Tile(16, 32, 32, 4), Tile(16, 32, 16, 8, 2)
PRECISION = "tf32x3"  # three products of TF32 parts on the tensor cores; "ieee" would use the slower float32 units
OUTPUT_ROWS = 2  # samples for each program of output_kernel


@triton.jit
def positive(x):
    """ReLU, which lets NaN through."""
    return tl.where(x < 0, 0, x)


@triton.jit
def part(start, P: tl.constexpr, BK: tl.constexpr):
    """From ``start``, places ``[P, BK]`` along the depth, a row for each warp."""
    return start + tl.arange(0, P)[:, None] * BK + tl.arange(0, BK)[None, :]


@triton.jit(do_not_specialize=["B"])
def layer_kernel(
    x, weight, bias, out, B, K, N, x_stride, weight_stride, out_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BM samples of BN units; P warps share the depth, since a chain of small products waits for each."""
    blocks = tl.cdiv(N, BN)
    b = tl.program_id(0) // blocks * BM + tl.arange(0, BM)
    n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    row, unit = b[None, :, None], n[None, :, None]
    acc = tl.zeros((P, BM, BN), tl.float32)
    for start in range(0, K, P * BK):
        k = part(start, P, BK)[:, None, :]
        a = tl.load(x + row * x_stride + k, mask=(row < B) & (k < K), other=0)
        w = tl.load(weight + unit * weight_stride + k, mask=(unit < N) & (k < K), other=0)
        acc += tl.dot(a, tl.permute(w, (0, 2, 1)), input_precision=PRECISION)
    y = positive(tl.sum(acc, 0) + tl.load(bias + n, mask=n < N, other=0)[None, :])
    tl.store(out + b[:, None] * out_stride + n[None, :], y, mask=(b < B)[:, None] & (n < N)[None, :])


@triton.jit
def input_tile(
    pid, grad, weight, below, out, cross, B, N, K, grad_stride, weight_stride, below_stride, out_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr, CROSS: tl.constexpr,
):  # fmt: skip
    """``grad weight`` for BM samples and BN columns, zero where the ReLU ``below`` was closed."""
    blocks = tl.cdiv(K, BN)
    b = pid // blocks * BM + tl.arange(0, BM)
    k = pid % blocks * BN + tl.arange(0, BN)
    row, column = b[None, :, None], k[None, None, :]
    parts = tl.zeros((P, BM, BN), tl.float32)
    for start in range(0, N, P * BK):
        n = part(start, P, BK)
        g = tl.load(grad + row * grad_stride + n[:, None, :], mask=(row < B) & (n < N)[:, None, :], other=0)
        mask = (n < N)[:, :, None] & (column < K)
        w = tl.load(weight + n[:, :, None] * weight_stride + column, mask=mask, other=0)
        parts += tl.dot(g, w, input_precision=PRECISION)
    acc = tl.sum(parts, 0)
    if CROSS > 0:  # the cross layers have read the same input: CROSS weights and the output unit's
        shares, cross_weight, output, width = cross
        for layer in tl.static_range(CROSS + 1):
            weights = output if layer == CROSS else cross_weight + layer * width
            share = tl.load(shares + b * (CROSS + 1) + layer, mask=b < B, other=0)
            acc += share[:, None] * tl.load(weights + k, mask=k < K, other=0)[None, :]
    mask = (b < B)[:, None] & (k < K)[None, :]
    if MASKED:
        acc = tl.where(tl.load(below + b[:, None] * below_stride + k[None, :], mask=mask, other=0) <= 0, 0, acc)
    tl.store(out + b[:, None] * out_stride + k[None, :], acc, mask=mask)


@triton.jit
def weight_tile(
    pid, update, paces, constants, B,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr,
    RULE: tl.constexpr,
):  # fmt: skip
    """BM rows and BN columns of a weight: their gradient, stored or used by the rule; and of the bias's."""
    grad, x, weight, w0, w1, w2, bias, b0, b1, b2, N, K, grad_stride, x_stride, weight_stride = update
    blocks = tl.cdiv(K, BN)
    n = pid // blocks * BM + tl.arange(0, BM)
    k = pid % blocks * BN + tl.arange(0, BN)
    unit, column = n[None, None, :], k[None, None, :]
    parts = tl.zeros((P, BM, BN), tl.float32)
    totals = tl.zeros((P, BM), tl.float32)
    for start in range(0, B, P * BK):
        b = part(start, P, BK)[:, :, None]
        g = tl.load(grad + b * grad_stride + unit, mask=(b < B) & (unit < N), other=0)
        a = tl.load(x + b * x_stride + column, mask=(b < B) & (column < K), other=0)
        parts += tl.dot(tl.permute(g, (0, 2, 1)), a, input_precision=PRECISION)
        totals += tl.sum(g, 1)
    use_gradient(weight, w0, w1, w2, n[:, None] * weight_stride + k[None, :], (n < N)[:, None] & (k < K)[None, :],
                 tl.sum(parts, 0), paces, constants, RULE)  # fmt: skip
    use_gradient(bias, b0, b1, b2, n, mask_if(pid % blocks == 0, n < N), tl.sum(totals, 0), paces, constants, RULE)


@triton.jit
def use_gradient(parameter, state0, state1, state2, elements, mask, g, paces, constants, RULE: tl.constexpr):
    """Store a gradient, into ``state0``, or take the rule's step."""
    if RULE == "none":
        tl.store(state0 + elements, g, mask=mask)
    else:
        rate, root = tl.load(paces), tl.load(paces + 1)
        move(parameter, state0, state1, state2, elements, mask, g, rate, root, constants, RULE, tl.float32)


@triton.jit(do_not_specialize=["B", "inputs"])
def backward_kernel(
    grad, weight, below, out, cross, update, paces, constants, inputs,
    B, N, K, grad_stride, weight_stride, below_stride, out_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WM: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr,
    P: tl.constexpr, PRECISION: tl.constexpr, RULE: tl.constexpr, MASKED: tl.constexpr, CROSS: tl.constexpr,
):  # fmt: skip
    """The first ``inputs`` programs: the gradient of a layer's input. The others: a ``LayerUpdate``."""
    pid = tl.program_id(0)
    if pid < inputs:
        input_tile(
            pid, grad, weight, below, out, cross, B, N, K, grad_stride, weight_stride, below_stride, out_stride,
            BM, BN, BK, P, PRECISION, MASKED, CROSS,
        )  # fmt: skip
    else:
        weight_tile(pid - inputs, update, paces, constants, B, WM, WN, WK, P, PRECISION, RULE)


@triton.jit(do_not_specialize=["B", "split"])
def last_kernel(
    first, second, losses, loss_sum, step, paces, constants, split, B,
    WM: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr,
    RULE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The last one or two ``LayerUpdate``; and one program adds the mean loss to ``loss_sum`` and counts the step."""
    pid = tl.program_id(0)
    if pid == 0:
        total = tl.zeros((T,), tl.float64)
        for start in range(0, B, T):
            b = start + tl.arange(0, T)
            total += tl.load(losses + b, mask=b < B, other=0).to(tl.float64)
        tl.store(loss_sum, tl.load(loss_sum) + tl.sum(total) / B)
        tl.store(step, tl.load(step) + 1)
    if pid < split:
        weight_tile(pid, first, paces, constants, B, WM, WN, WK, P, PRECISION, RULE)
    else:
        weight_tile(pid - split, second, paces, constants, B, WM, WN, WK, P, PRECISION, RULE)


@triton.jit(do_not_specialize=["B"])
def output_kernel(
    x, weight, bias, labels, out, dlogits, losses, cross, lr, step, paces, constants, B, K, x_stride, out_stride,
    ROWS: tl.constexpr, C: tl.constexpr, RULE: tl.constexpr, CROSS: tl.constexpr,
):  # fmt: skip
    """ROWS samples: the output unit, its log loss, and the gradients of the mean loss; and the pace of this step."""
    if RULE != "none" and tl.program_id(0) == 0:
        rate, root = pace(lr, tl.load(step) + 1, constants, RULE)
        tl.store(paces, rate.to(tl.float32))
        tl.store(paces + 1, root.to(tl.float32))
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, C)
    mask = (b < B)[:, None] & (k < K)[None, :]
    h = tl.load(x + b[:, None] * x_stride + k[None, :], mask=mask, other=0)
    w = tl.load(weight + k, mask=k < K, other=0)
    z = tl.sum(h * w[None, :], 1) + tl.load(bias)
    if CROSS > 0:
        scales, dots, products, shares, shifts = cross
        z += tl.load(products + b, mask=b < B, other=0)
    y = tl.load(labels + b, mask=b < B, other=0).to(tl.float32)
    tl.store(losses + b, positive(z) - z * y + tl.log(1 + tl.exp(-tl.abs(z))), mask=b < B)
    g = (tl.sigmoid(z) - y) / B
    tl.store(dlogits + b, g, mask=b < B)
    tl.store(out + b[:, None] * out_stride + k[None, :], tl.where(h <= 0, 0, g[:, None] * w[None, :]), mask=mask)
    if CROSS > 0:  # backwards through a[l + 1] = a[l] (1 + dot[l]) + shift[l], from a[L] dot[L] + shift[L]
        for i in tl.static_range(CROSS + 1):
            layer = b * (CROSS + 1) + CROSS - i
            dot = tl.load(dots + layer, mask=b < B, other=0)
            tl.store(shares + layer, g * tl.load(scales + layer, mask=b < B, other=0), mask=b < B)
            tl.store(shifts + layer, g, mask=b < B)
            g = g * dot if i == 0 else g * (1 + dot)


class LayerUpdate(NamedTuple):
    """The arguments for the update of one layer's weight and bias, in the order in which a kernel takes them.

    Weight and bias each come with three tensors of the same shape: the averages of the rule, or the gradient to write.
    The parameter itself fills the unused places.
    """

    grad: Tensor  # [B, N], gradient of the layer's output
    x: Tensor  # [B, K], the layer's input
    weight: Tensor  # [N, K]
    weight_state0: Tensor
    weight_state1: Tensor
    weight_state2: Tensor
    bias: Tensor
    bias_state0: Tensor
    bias_state1: Tensor
    bias_state2: Tensor
    units: int
    columns: int
    grad_stride: int
    x_stride: int
    weight_stride: int

    @property
    def num_programs(self) -> int:
        """One for each tile of the weight."""
        return triton.cdiv(self.units, WEIGHT.rows) * triton.cdiv(self.columns, WEIGHT.columns)


def layer_update(grad: Tensor, x: Tensor, weight: list[Tensor], bias: list[Tensor]) -> LayerUpdate:
    """Make a ``LayerUpdate``; ``weight`` and ``bias`` are each a parameter and its three tensors."""
    strides = (grad.stride(0), x.stride(0), weight[0].stride(0))
    return LayerUpdate(grad, x, *weight, *bias, *weight[0].shape, *strides)


def rows_of(like: Tensor, columns: int) -> Tensor:
    """An uninitialized tensor ``[B, columns]``; rows start at multiples of 64 bytes, so that loads are vectorized."""
    return like.new_empty(len(like), triton.cdiv(columns, 16) * 16)[:, :columns]


def layer(x: Tensor, weight: Tensor, bias: Tensor, precision: str) -> Tensor:
    """``relu(x weight^T + bias)``."""
    (units, columns), t = weight.shape, FORWARD
    out = rows_of(x, units)
    layer_kernel[(triton.cdiv(len(x), t.rows) * triton.cdiv(units, t.columns),)](
        x, weight, bias, out, len(x), columns, units, x.stride(0), weight.stride(0), out.stride(0),
        BM=t.rows, BN=t.columns, BK=t.depth, P=t.warps, PRECISION=precision, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out


class Cross(NamedTuple):
    """DCN's cross layers for one batch, as named in ``models.dcn``; the output unit counts as the last of L + 1."""

    scales: Tensor  # [B, L + 1]: a[l]
    dots: Tensor  # [B, L + 1]: x0 . w[l]
    products: Tensor  # [B]: what they add to the logits
    shares: Tensor  # [B, L + 1]: the gradients of the dots
    shifts: Tensor  # [B, L + 1]: the gradients of c[l] . w[l]


@dataclass
class BackwardPass:
    """The arguments that all launches of one backward pass share."""

    rule: str  # the optimizer's rule; "none" stores gradients
    lr: Tensor  # float64
    constants: Tensor  # float64, constants of the rule
    step: Tensor  # int64, number of steps taken
    paces: Tensor  # float32 [2]: what ``ops.gpu.rules.pace`` gives for this step
    losses: Tensor  # [B]
    precision: str

    def through_layer(
        self,
        grad: Tensor,
        weight: Tensor,
        below: Tensor | None,
        update: LayerUpdate,
        cross: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Backward through one layer: ``grad weight``; the same launch performs ``update``, which is another layer's.

        Args:
            grad: gradient of the layer's output.
            weight: the layer's weight.
            below: the layer's input, if that is the output of a ReLU: the result is zero where it is zero.
            update: the update of another layer.
            cross: ``Cross.shares`` ``[B, L + 1]``, and the weights of the cross layers ``[L, K]`` and of the output
                unit ``[K]``: their product is added to the result.
        """
        (units, columns), t, w = weight.shape, INPUT, WEIGHT
        out = grad.new_empty(len(grad), columns) if below is None and cross else rows_of(grad, columns)
        inputs = triton.cdiv(len(grad), t.rows) * triton.cdiv(columns, t.columns)
        mask = out if below is None else below
        backward_kernel[(inputs + update.num_programs,)](
            grad, weight, mask, out, (*cross, cross[1].stride(0)) if cross else (), tuple(update), self.paces,
            self.constants, inputs, len(grad), units, columns, grad.stride(0), weight.stride(0), mask.stride(0),
            out.stride(0), BM=t.rows, BN=t.columns, BK=t.depth, WM=w.rows, WN=w.columns, WK=w.depth, P=t.warps,
            PRECISION=self.precision, RULE=self.rule, MASKED=below is not None, CROSS=len(cross[1]) if cross else 0,
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
        return out

    def finish(self, first: LayerUpdate, second: LayerUpdate | None, loss_sum: Tensor) -> None:
        """Perform the last updates, add the mean loss to ``loss_sum``, and count the step."""
        split, w = first.num_programs, WEIGHT
        last_kernel[(split + (0 if second is None else second.num_programs),)](
            tuple(first), tuple(second or first), self.losses, loss_sum, self.step, self.paces, self.constants, split,
            len(self.losses), WM=w.rows, WN=w.columns, WK=w.depth, P=w.warps, PRECISION=self.precision, RULE=self.rule,
            T=256, num_warps=w.warps, num_stages=w.stages,
        )  # fmt: skip

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, cross: Cross | None = None
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the logits ``[B, 1]`` and of the input of the ReLU that gave ``x``; fills ``losses``.

        If ``cross`` is given, its products are added to the logits, and its shares and shifts are filled.
        """
        out, dlogits = rows_of(x, x.shape[1]), x.new_empty(len(x), 1)
        output_kernel[(triton.cdiv(len(x), OUTPUT_ROWS),)](
            x, weight, bias, labels, out, dlogits, self.losses, tuple(cross or ()), self.lr, self.step, self.paces,
            self.constants, len(x), x.shape[1], x.stride(0), out.stride(0), ROWS=OUTPUT_ROWS,
            C=triton.next_power_of_2(x.shape[1]), RULE=self.rule, CROSS=cross.dots.shape[1] - 1 if cross else 0,
        )  # fmt: skip
        return dlogits, out
