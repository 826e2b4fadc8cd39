"""The ops, each declared once: schema, shapes for the compiler, a kernel per device, gradients.

``torch.library`` dispatches by device. On the CPU an id outside its table raises IndexError; on a GPU it gives
zeros and no gradient, and ``Tables.on_invalid_id`` decides what is said about it.

``integers`` stands for the four tensors of a layout: slots, parts, maps, spans.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from . import cpu, gpu, in_backward, reference, update
from .layout import LIMIT

_INTEGERS = "Tensor slots, Tensor parts, Tensor maps, Tensor spans"
_JAGGED = "Tensor ids, Tensor offsets, Tensor? sample_weights, Tensor weight"
_library = torch.library.Library("quorem", "DEF")
_library.define(f"lookup(Tensor ids, Tensor weight, {_INTEGERS}, *, str names) -> Tensor")
_library.define(f"lookup_counting(Tensor ids, Tensor weight, {_INTEGERS}, Tensor(a!) invalid, *, str names) -> Tensor")
_library.define(f"lookup_backward(Tensor grad, Tensor ids, Tensor weight, {_INTEGERS}) -> Tensor")
_library.define(f"count_invalid_(Tensor ids, Tensor? offsets, Tensor(a!) count, {_INTEGERS}) -> ()")
_library.define(f"bag({_JAGGED}, {_INTEGERS}, *, bool mean, str names) -> Tensor")
_library.define(f"bag_backward(Tensor grad, {_JAGGED}, {_INTEGERS}, *, bool mean) -> Tensor")
_library.define(f"lookup_row_grads(Tensor grad, Tensor ids, Tensor weight, {_INTEGERS}) -> (Tensor, Tensor)")
_library.define(f"bag_row_grads(Tensor grad, {_JAGGED}, {_INTEGERS}, *, bool mean) -> (Tensor, Tensor)")
_library.define(
    f"bag_sample_weights_backward(Tensor grad, Tensor ids, Tensor offsets, Tensor weight, {_INTEGERS}, *, bool mean)"
    " -> Tensor"
)


def lookup(
    ids: Tensor,
    weight: Tensor,
    *integers: Tensor,
    names: str = "",
    sparse: bool = False,
    invalid: Tensor | None = None,
) -> Tensor:
    """Composed vectors ``[B, S, W]`` of ``ids`` ``[B, F]``.

    Args:
        ids: int32 or int64.
        weight: every table, ``[R, W]``.
        integers: the layout.
        names: what an error calls each feature's table, one a line.
        sparse: whether the gradient of ``weight`` is sparse.
        invalid: grows by the number of ids out of range, where these do not raise.
    """
    update.catch_up_(ids, None, weight, *integers)
    if invalid is not None and _transformed():  # a lookup that writes into its argument is not
        torch.ops.quorem.count_invalid_(ids, None, invalid, *integers)
        invalid = None
    if in_backward.collector(weight) is not None:
        read = partial(_read, ids, weight, *integers, names=names, invalid=invalid)
        return in_backward.collected(read, weight, "lookup", (ids,), integers)
    if not _differentiated(weight):
        return _read(ids, weight, *integers, names=names, invalid=invalid)
    return _Lookup.apply(ids, weight, *integers, names, sparse, invalid)


def _read(ids: Tensor, weight: Tensor, *integers: Tensor, names: str, invalid: Tensor | None) -> Tensor:
    kernel = gpu.straight("lookup_counting", weight)
    if kernel is not None:
        out: Tensor = kernel(ids, weight, *integers, invalid)
        return out
    if invalid is None:
        return torch.ops.quorem.lookup(ids, weight, *integers, names=names)
    return torch.ops.quorem.lookup_counting(ids, weight, *integers, invalid, names=names)


def bag(
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    weight: Tensor,
    *integers: Tensor,
    mean: bool,
    names: str = "",
    sparse: bool = False,
) -> Tensor:
    """Composed, then pooled vectors ``[B, S, W]`` of jagged ``ids`` ``[V]`` with ``offsets`` ``[F * B + 1]``."""
    update.catch_up_(ids, offsets, weight, *integers)
    if in_backward.collector(weight) is not None:
        return _bag_in_backward(ids, offsets, sample_weights, weight, *integers, mean=mean, names=names)
    if not _differentiated(weight, sample_weights):
        return torch.ops.quorem.bag(ids, offsets, sample_weights, weight, *integers, mean=mean, names=names)
    return _Bag.apply(ids, offsets, sample_weights, weight, *integers, mean, names, sparse)


def _differentiated(*inputs: Tensor | None) -> bool:
    """Whether a derivative may be taken. If not, the op alone will do: it is cheaper, and the compiler needs it so."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return True
    return not torch.compiler.is_compiling() and (_transformed() or forward_ad._current_level >= 0)


def _transformed() -> bool:
    """Whether the compiler or a transform such as ``torch.vmap`` is at work."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def gather(rows: Tensor, weight: Tensor, sparse: bool = False) -> Tensor:
    """``rows`` of ``weight`` as they are, ``[..., W]``."""
    if in_backward.collector(weight) is not None:
        return in_backward.collected(F.embedding(rows, weight.detach()), weight, "rows", (rows,))
    return F.embedding(rows, weight, sparse=sparse)


@in_backward.outside_the_graph
def _bag_in_backward(
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    weight: Tensor,
    *integers: Tensor,
    mean: bool,
    names: str,
) -> Tensor:
    out = _Bag.apply(ids, offsets, sample_weights, weight.detach(), *integers, mean, names, False)
    return in_backward.collected(out, weight, "bag", (ids, offsets, sample_weights), integers, mean=mean)


def raise_out_of_range(ids: Tensor, offsets: Tensor | None, slots: Tensor, spans: Tensor, names: str) -> None:
    """Raise IndexError for the first id on the CPU that is outside its table, if there is one.

    ``ids`` are ``[B, F]``, or jagged ``[V]`` where there are ``offsets``.
    """
    if ids.device.type != "cpu":
        return
    limits = slots[spans[:, 0], LIMIT]
    feature = (
        torch.arange(len(spans)).expand(ids.shape) if offsets is None else reference.bags_of(ids, offsets, spans)[1]
    )
    bad = reference.out_of_range(ids, limits[feature])
    if offsets is not None:
        bad &= torch.arange(len(ids)) < offsets[-1]  # ids past the last offset count for nothing
    if bad.any():
        column = int(feature[bad][0])
        raise_id(int(ids[bad][0]), int(limits[column]), names, column)


def raise_id(value: int, limit: int, names: str, feature: int) -> None:
    """Say which id of which feature's table is out of range."""
    table = names.split("\n")[feature] if names else "the table"
    raise IndexError(f"id {value} is outside [0, {limit}) of {table}")


def _count_invalid(ids: Tensor, offsets: Tensor | None, count: Tensor, *integers: Tensor) -> None:
    slots, _, _, spans = integers
    limits = slots[spans[:, 0], LIMIT]
    if offsets is None:
        count += reference.out_of_range(ids, limits).sum()
    else:
        bad = reference.out_of_range(ids, limits[reference.bags_of(ids, offsets, spans)[1]])
        count += (bad & (torch.arange(len(ids), device=ids.device) < offsets[-1])).sum()


def _lookup(ids: Tensor, weight: Tensor, *integers: Tensor, names: str) -> Tensor:
    raise_out_of_range(ids, None, integers[0], integers[3], names)
    return reference.lookup(ids, weight, *integers)


def _lookup_counting(ids: Tensor, weight: Tensor, *rest: Tensor, names: str) -> Tensor:
    *integers, invalid = rest
    _count_invalid(ids, None, invalid, *integers)
    return reference.lookup(ids, weight, *integers)


def _lookup_backward(grad: Tensor, ids: Tensor, weight: Tensor, *integers: Tensor) -> Tensor:
    return reference.accumulate(*reference.lookup_row_grads(grad, ids, weight, *integers), weight)


def _bag(ids: Tensor, offsets: Tensor, *rest: Any, mean: bool, names: str) -> Tensor:
    raise_out_of_range(ids, offsets, rest[2], rest[5], names)
    return reference.bag(ids, offsets, *rest, mean=mean)


def _bag_backward(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    weight: Tensor,
    *integers: Tensor,
    mean: bool,
) -> Tensor:
    row_grads = reference.bag_row_grads(grad, ids, offsets, sample_weights, weight, *integers, mean=mean)
    return reference.accumulate(*row_grads, weight)


def _row_grads(row_grads: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Rows ``[U]`` that were read, repeated or not, and their gradients ``[U, W]`` in the accumulator's dtype."""

    def body(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        rows, values = row_grads(*args, **options)
        read = rows >= 0
        return rows[read], values[read]

    return body


_bodies: dict[str, Callable[..., Any]] = {
    "lookup": _lookup,
    "lookup_backward": _lookup_backward,
    "bag": _bag,
    "bag_backward": _bag_backward,
    "lookup_row_grads": _row_grads(reference.lookup_row_grads),
    "bag_row_grads": _row_grads(reference.bag_row_grads),
    "bag_sample_weights_backward": reference.bag_sample_weights_grad,
}
for _name, _body in _bodies.items():
    _library.impl(_name, _body, "CompositeExplicitAutograd")
    _library.impl(_name, cpu.fused(_name, _body), "CPU")
    _library.impl(_name, gpu.fused(_name, _body), "CUDA")
_counting: dict[str, Callable[..., Any]] = {"count_invalid_": _count_invalid, "lookup_counting": _lookup_counting}
for _name, _body in _counting.items():
    _library.impl(_name, _body, "CompositeExplicitAutograd")
    _library.impl(_name, gpu.fused(_name, _body), "CUDA")
torch.library.register_fake("quorem::count_invalid_", lambda *inputs: None, lib=_library)


@torch.library.register_fake("quorem::lookup", lib=_library)
def _(ids: Tensor, weight: Tensor, slots: Tensor, *rest: Tensor, names: str) -> Tensor:
    return weight.new_empty(ids.shape[0], slots.shape[0], weight.shape[1])


@torch.library.register_fake("quorem::lookup_counting", lib=_library)
def _(ids: Tensor, weight: Tensor, slots: Tensor, *rest: Tensor, names: str) -> Tensor:
    return weight.new_empty(ids.shape[0], slots.shape[0], weight.shape[1])


@torch.library.register_fake("quorem::lookup_backward", lib=_library)
def _(grad: Tensor, ids: Tensor, weight: Tensor, *integers: Tensor) -> Tensor:
    return torch.empty_like(weight)


@torch.library.register_fake("quorem::bag", lib=_library)
def _(
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    weight: Tensor,
    *integers: Tensor,
    mean: bool,
    names: str,
) -> Tensor:
    slots, _, _, spans = integers
    return weight.new_empty((offsets.shape[0] - 1) // spans.shape[0], slots.shape[0], weight.shape[1])


@torch.library.register_fake("quorem::bag_backward", lib=_library)
def _(
    grad: Tensor, ids: Tensor, offsets: Tensor, sample_weights: Any, weight: Tensor, *rest: Tensor, mean: bool
) -> Tensor:
    return torch.empty_like(weight)


@torch.library.register_fake("quorem::bag_sample_weights_backward", lib=_library)
def _(grad: Tensor, ids: Tensor, offsets: Tensor, weight: Tensor, *integers: Tensor, mean: bool) -> Tensor:
    return grad.new_empty(ids.shape)


def _fake_row_grads(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    weight = tensors[-5]
    count = torch.library.get_ctx().new_dynamic_size()
    return tensors[-1].new_empty(count), weight.new_empty(count, weight.shape[1], dtype=reference.accumulator(weight))


for _name in ("lookup_row_grads", "bag_row_grads"):
    torch.library.register_fake(f"quorem::{_name}", _fake_row_grads, lib=_library)


def _batched(op: str) -> None:
    """Let ``torch.vmap`` run an op: ids of a lookup as one longer batch, anything else sample by sample."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any, **options: Any) -> tuple[Tensor, int]:
        if op == "lookup" and not any(d is not None for d in in_dims[1:]):
            ids = args[0].movedim(in_dims[0], 0)
            out = torch.ops.quorem.lookup(ids.flatten(0, 1), *args[1:], **options)
            return out.unflatten(0, ids.shape[:2]), 0

        def sample(i: int) -> list[Any]:
            return [a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)]

        return torch.stack([getattr(torch.ops.quorem, op)(*sample(i), **options) for i in range(info.batch_size)]), 0

    torch.library.register_vmap(f"quorem::{op}", rule, lib=_library)


for _op in ("lookup", "lookup_backward", "bag", "bag_backward", "bag_sample_weights_backward"):
    _batched(_op)


class _Lookup(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        *tensors, names, _, invalid = inputs
        return _read(*tensors, names=names, invalid=invalid)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, _, ctx.sparse, _ = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, weight, *integers = ctx.saved_tensors
        if ctx.sparse:
            op = _bodies["lookup_row_grads"] if torch.is_grad_enabled() else torch.ops.quorem.lookup_row_grads
            dweight = _sparse(op(grad, ids, weight, *integers), weight)
        elif torch.is_grad_enabled():  # create_graph: this gradient will be differentiated itself
            dweight = _lookup_backward(grad, ids, weight, *integers)
        else:
            dweight = torch.ops.quorem.lookup_backward(grad, ids, weight, *integers)
        return None, dweight, *[None] * 7


class _Bag(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        *tensors, mean, names, _ = inputs
        return torch.ops.quorem.bag(*tensors, mean=mean, names=names)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.mean, _, ctx.sparse = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, offsets, sample_weights, weight, *integers = ctx.saved_tensors
        twice = torch.is_grad_enabled()
        dsample = dweight = None
        if ctx.needs_input_grad[2]:
            op = reference.bag_sample_weights_grad if twice else torch.ops.quorem.bag_sample_weights_backward
            dsample = op(grad, ids, offsets, weight, *integers, mean=ctx.mean).to(sample_weights.dtype)
        if ctx.needs_input_grad[3]:
            inputs = (grad, ids, offsets, sample_weights, weight, *integers)
            if ctx.sparse:
                op = _bodies["bag_row_grads"] if twice else torch.ops.quorem.bag_row_grads
                dweight = _sparse(op(*inputs, mean=ctx.mean), weight)
            elif twice:
                dweight = _bag_backward(*inputs, mean=ctx.mean)
            else:
                dweight = torch.ops.quorem.bag_backward(*inputs, mean=ctx.mean)
        return None, None, dsample, dweight, *[None] * 7


def _sparse(row_grads: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
    rows, values = row_grads
    return torch.sparse_coo_tensor(rows[None], values.to(weight.dtype), weight.shape, check_invariants=False)
