"""Every op, declared once: its schema, the shapes that it gives the compiler, and its kernels by device.

Kernels take an ``IdBatch``, a ``Layout`` and a ``State`` whole, and one kernel reads single ids and bags, numbers and
codes. torch's dispatcher takes flat tensors, and has an op for each of these, since saved programs name them. So
``call`` unpacks and ``_entry`` packs again, here and nowhere else. A kernel of ``cpu`` or ``gpu`` that cannot take its
arguments returns NotImplemented; the truth then runs.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from . import cpu, gpu, gradients, lookup, path, replay, rules
from .lagging import LaggingParameter
from .layout import Layout
from .rows import IdBatch, accumulator
from .state import RULES, present

Kernel = Callable[..., Any]

_LAYOUT = ", ".join(f"Tensor {name}" for name in Layout._fields)
_LOOKUP = f"Tensor ids, Tensor stored, {_LAYOUT}"
_BAGS = "Tensor ids, Tensor offsets, Tensor? sample_weights"
_BAG = f"{_BAGS}, Tensor stored, {_LAYOUT}"
_STEP = "Tensor(a!) stored, Tensor lr, Tensor(b!)[] state"
_LAGGING = "Tensor(a!) stored, Tensor(b!)[] state"
_CODES = "int width, int bits, ScalarType dtype, str names"
_RULE = "str rule, float[] constants, int? rounding_seed=None"
_UPDATE = f"{_RULE}, float? clip_value=None, Tensor? loss_scale=None"
_PATH = "Tensor vectors, Tensor ids, Tensor[] layers, Tensor slots, Tensor parts, Tensor columns"
_NETWORKS = "int networks, str activation"


class Op(NamedTuple):
    """An op as it is declared."""

    arguments: str
    returns: str
    truth: Kernel  # the kernels of the devices have the same name
    shapes: Kernel  # empty tensors as the op would return them


def _vectors(batch: IdBatch, stored: Tensor, layout: Layout, *_: Any, **options: Any) -> Tensor:
    offsets, width = batch.offsets, options.get("width", stored.shape[1])
    size = batch.ids.shape[0] if offsets is None else (offsets.shape[0] - 1) // layout.spans.shape[0]
    return stored.new_empty(size, layout.slots.shape[0], width, dtype=options.get("dtype"))


def _like_stored(grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout) -> Tensor:
    return torch.empty_like(stored)


def _row_grads(grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    values = stored.new_empty(count, stored.shape[1], dtype=accumulator(stored))
    return layout.spans.new_empty(count), values


def _sample_weights(grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout) -> Tensor:
    return grad.new_empty(batch.ids.shape)


def _nothing(*args: Any, **options: Any) -> None:
    """An op in place returns nothing."""


def _path(vectors: Tensor, ids: Tensor, _: Any, slots: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
    lists = slots.shape[0] * (options["networks"] + 1) if vectors.is_cuda else 0
    counts = vectors.new_empty(lists, dtype=torch.int32)
    size = (lists, ids.shape[0]) if vectors.is_cuda else (0,)
    return torch.empty_like(vectors), counts, vectors.new_empty(size, dtype=torch.int32)


def _path_backward(
    grad: Tensor, vectors: Tensor, ids: Tensor, layers: list[Tensor], *_: Any, **__: Any
) -> list[Tensor]:
    return [torch.empty_like(t) for t in (vectors, *layers)]


OPS = {
    "lookup": Op(f"{_LOOKUP}, *, str names", "Tensor", lookup.lookup, _vectors),
    "lookup_counting": Op(f"{_LOOKUP}, Tensor(a!) invalid, *, str names", "Tensor", lookup.lookup, _vectors),
    "lookup_quantized": Op(f"{_LOOKUP}, *, {_CODES}", "Tensor", lookup.lookup, _vectors),
    "lookup_quantized_counting": Op(f"{_LOOKUP}, Tensor(a!) invalid, *, {_CODES}", "Tensor", lookup.lookup, _vectors),
    "bag": Op(f"{_BAG}, *, bool mean, str names", "Tensor", lookup.lookup, _vectors),
    "bag_quantized": Op(f"{_BAG}, *, bool mean, {_CODES}", "Tensor", lookup.lookup, _vectors),
    "count_invalid_": Op(
        f"Tensor ids, Tensor? offsets, Tensor(a!) count, {_LAYOUT}", "()", lookup.count_invalid_, _nothing
    ),
    "lookup_backward": Op(f"Tensor grad, {_LOOKUP}", "Tensor", gradients.backward, _like_stored),
    "bag_backward": Op(f"Tensor grad, {_BAG}, *, bool mean", "Tensor", gradients.backward, _like_stored),
    "lookup_row_grads": Op(f"Tensor grad, {_LOOKUP}", "(Tensor, Tensor)", gradients.row_grads, _row_grads),
    "bag_row_grads": Op(f"Tensor grad, {_BAG}, *, bool mean", "(Tensor, Tensor)", gradients.row_grads, _row_grads),
    "bag_sample_weights_backward": Op(
        f"Tensor grad, Tensor ids, Tensor offsets, Tensor stored, {_LAYOUT}, *, bool mean",
        "Tensor",
        gradients.sample_weights_backward,
        _sample_weights,
    ),
    "lookup_update_": Op(f"Tensor grad, Tensor ids, {_STEP}, {_LAYOUT}, *, {_UPDATE}", "()", rules.update_, _nothing),
    "bag_update_": Op(
        f"Tensor grad, {_BAGS}, {_STEP}, {_LAYOUT}, *, bool mean, {_UPDATE}", "()", rules.update_, _nothing
    ),
    "rows_update_": Op(
        f"Tensor rows, Tensor values, {_STEP}, *, {_UPDATE}, Tensor? extents=None", "()", rules.rows_update_, _nothing
    ),
    "lookup_catch_up_": Op(f"Tensor ids, {_LAGGING}, {_LAYOUT}, *, {_RULE}", "()", replay.catch_up_, _nothing),
    "bag_catch_up_": Op(
        f"Tensor ids, Tensor offsets, {_LAGGING}, {_LAYOUT}, *, {_RULE}", "()", replay.catch_up_, _nothing
    ),
    "rows_catch_up_": Op(f"Tensor? rows, {_LAGGING}, *, {_RULE}", "()", replay.rows_catch_up_, _nothing),
    "path": Op(f"{_PATH}, *, {_NETWORKS}", "(Tensor, Tensor, Tensor)", path.path, _path),
    "path_backward": Op(
        f"Tensor grad, {_PATH}, Tensor counts, Tensor lists, *, {_NETWORKS}",
        "Tensor[]",
        path.path_backward,
        _path_backward,
    ),
}
_MAPPED = ("lookup", "lookup_backward", "bag", "bag_backward", "bag_sample_weights_backward")  # by torch.vmap
_library = torch.library.Library("quorem", "DEF")
_MOVING = ("update_", "rows_update_", "catch_up_", "rows_catch_up_")  # kernels that move rows
_are_functorch_transforms_active = torch._C._are_functorch_transforms_active
_len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
_profiler_enabled = torch._C._autograd._profiler_enabled
_is_tracing, _has_storage = torch._C._is_tracing, torch._C._has_storage
moving = threading.RLock()  # one thread at a time moves rows: two would take the missed steps of a row twice


def call(name: str, *args: Any, eager: bool | None = None, **options: Any) -> Any:
    """Run the kernel ``name``, with an ``IdBatch``, ``Layout``, ``State`` and ``Constants`` whole.

    The device's kernel is called at once, since the dispatcher takes time; but not where a compiler, a transform, a
    mode, a tracer or a profiler has to see the op. ``eager`` is ``is_eager()``, if known.
    """
    device = _direct_device(args) if (is_eager() if eager is None else eager) else None
    kernel = None if device is None else device.kernels().get(name)
    if kernel is not None:
        result = kernel(*args, **options)
        if result is not NotImplemented:
            return result
    op = _op_of(name, args, options)
    flat: list[Any] = []
    for arg in args:
        if isinstance(arg, IdBatch):
            flat.extend([arg.ids, arg.offsets, arg.sample_weights][: _PACKINGS[op].batch_tensors])
            if _PACKINGS[op].mean:
                options["mean"] = arg.mean
        elif isinstance(arg, Layout):
            flat.extend(arg)  # torch 2.11 compiles no += here
        elif isinstance(arg, tuple):  # a State
            flat.append(list(present(arg)))
        else:
            flat.append(arg)
    if "constants" in options:
        options["constants"] = list(options["constants"])
    return getattr(torch.ops.quorem, op)(*flat, **options)


def _op_of(kernel: str, args: tuple[Any, ...], options: dict[str, Any]) -> str:
    """The op of ``OPS`` for a call of a kernel."""
    batch = args[0] if isinstance(args[0], IdBatch) else args[1]
    if not isinstance(batch, IdBatch) or kernel == "count_invalid_":
        return kernel
    kind = "lookup" if batch.offsets is None else "bag"
    if kernel != "lookup":
        return f"{kind}_{kernel}"
    quantized, counting = "_quantized" if "bits" in options else "", "_counting" if len(args) > 3 else ""
    return f"{kind}{quantized}{counting}"


def is_eager() -> bool:
    """Whether ops run one by one, and nothing has to see them: no compiler, transform, mode, profiler or tracer."""
    if torch.compiler.is_compiling() or _are_functorch_transforms_active() or _len_torch_dispatch_stack():
        return False
    return not _profiler_enabled() and not _is_tracing()


def _direct_device(args: tuple[Any, ...]) -> Any:
    """``cpu`` or ``gpu``, if its kernels can take the tensors without the dispatcher: all are plain ones of it.

    It runs for every op, so it is written for speed. Only the first tensor may be a batched one, which
    has no storage: a gradient in ``torch.autograd.grad(is_grads_batched=True)``.
    """
    if type(args[0]) is Tensor and not _has_storage(args[0]):
        return None
    device = None
    for arg in args:
        kind = type(arg)
        if kind is IdBatch:
            if arg.offsets is not None and not _are_beside(arg.ids, arg.offsets, arg.sample_weights):
                return None
            arg = arg.ids
            kind = type(arg)
        elif kind is Layout:
            arg, kind = arg.slots, Tensor
        if kind is Tensor or kind is Parameter or kind is LaggingParameter:
            if arg.is_cuda:
                if device is cpu:
                    return None
                device = gpu
            elif device is gpu or not arg.is_cpu:
                return None
            else:
                device = cpu
        elif not isinstance(arg, tuple) and isinstance(arg, Tensor):  # the first test is much faster
            return None
    return device


def _are_beside(ids: Tensor, *others: Tensor | None) -> bool:
    """Whether the others, where there are any, are plain tensors on the device of ``ids``."""
    return all(t is None or (type(t) in (Tensor, Parameter) and t.device == ids.device) for t in others)


class Packing(NamedTuple):
    """Where an op's arguments have the tensors of an ``IdBatch``, a ``Layout`` and a ``State``; None where they have
    none."""

    batch: int | None
    batch_tensors: int  # of ids, offsets and sample weights, how many it takes
    mean: bool  # whether it takes ``mean`` by name
    state: int | None
    layout: int | None


def _packing(op: Op) -> Packing:
    tensors, _, named = op.arguments.partition(", *")
    names = [argument.split()[-1] for argument in tensors.split(", ")]
    layout = names.index("slots") if "spans" in names else None
    state, batch = names.index("state") if "state" in names else None, None if layout is None else names.index("ids")
    batch_tensors = len({"ids", "offsets", "sample_weights"} & {*names})
    return Packing(batch, batch_tensors, "bool mean" in named, state, layout)


_PACKINGS = {name: _packing(op) for name, op in OPS.items()}


def _entry(name: str, plain: Kernel, device: Any = None) -> Kernel:
    """What the dispatcher calls: packs flat tensors, and runs the kernel of ``cpu`` or ``gpu``, or else ``plain``."""
    kernel_name, (batch, batch_tensors, mean, state, layout) = OPS[name].truth.__name__, _PACKINGS[name]

    def run(*args: Any, **options: Any) -> Any:
        packed = list(args)
        if layout is not None:  # from the last to the first: a packed one takes fewer places
            end = layout + len(Layout._fields)
            packed[layout:end] = [Layout(*args[layout:end])]
        if state is not None:
            rule = RULES[options["rule"]]
            packed[state], options["constants"] = rule.state(*args[state]), rule.constants(*options["constants"])
        if batch is not None:
            end = batch + batch_tensors
            packed[batch:end] = [IdBatch(*args[batch:end])._replace(mean=mean and options.pop("mean"))]
        kernel = None if device is None else device.kernels().get(kernel_name)
        result = NotImplemented if kernel is None else kernel(*packed, **options)
        return plain(*packed, **options) if result is NotImplemented else result

    def run_alone(*args: Any, **options: Any) -> Any:
        with moving:
            return run(*args, **options)

    return run_alone if device is cpu and kernel_name in _MOVING else run


def _map(name: str) -> None:
    """Let ``torch.vmap`` run an op: ids of a lookup as one longer batch, anything else sample by sample."""

    def mapped(info: Any, in_dims: tuple[Any, ...], *args: Any, **options: Any) -> tuple[Tensor, int]:
        op = getattr(torch.ops.quorem, name)
        if name == "lookup" and not any(d is not None for d in in_dims[1:]):
            ids = args[0].movedim(in_dims[0], 0)
            return op(ids.flatten(0, 1), *args[1:], **options).unflatten(0, ids.shape[:2]), 0

        def sample(i: int) -> list[Any]:
            return [a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)]

        return torch.stack([op(*sample(i), **options) for i in range(info.batch_size)]), 0

    torch.library.register_vmap(f"quorem::{name}", mapped, lib=_library)


for _name, _op in OPS.items():
    _library.define(f"{_name}({_op.arguments}) -> {_op.returns}")
    _library.impl(_name, _entry(_name, _op.truth), "CompositeExplicitAutograd")
    _library.impl(_name, _entry(_name, _op.truth, cpu), "CPU")
    _library.impl(_name, _entry(_name, _op.truth, gpu), "CUDA")
    torch.library.register_fake(f"quorem::{_name}", _entry(_name, _op.shapes), lib=_library)
for _name in _MAPPED:
    _map(_name)
