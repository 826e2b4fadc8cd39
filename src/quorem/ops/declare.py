"""Every op, declared once: its arguments, the shapes that it gives the compiler, and its kernels by device.

Kernels take an ``IdBatch``, a ``Layout`` and a ``State`` whole; torch's dispatcher takes flat tensors. So ``call``
flattens and ``_entry`` packs again, here and nowhere else. A kernel of ``cpu`` or ``gpu`` that cannot take its
arguments returns NotImplemented; the truth then runs.

``call`` does not go through the dispatcher where nothing has to see the op: a CPU lookup of 128 entries of 26 features
would take 23 us, not 17.
"""

import threading
from collections.abc import Callable
from itertools import islice
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

_SCHEMAS = {  # of arguments that are not one tensor, or are written into
    "batch": "Tensor ids, Tensor? offsets, Tensor? sample_weights",
    "layout": ", ".join(f"Tensor {name}" for name in Layout._fields),
    "state": "Tensor(b!)[] state",
    "moved": "Tensor(a!) stored",
    "count": "Tensor(a!) count",
    "layers": "Tensor[] layers",
    "some_rows": "Tensor? rows",
}
_CODES = "str names, int? width=None, int? bits=None, ScalarType? dtype=None"
_RULE = "str rule, float[] constants, int? rounding_seed=None"
_UPDATE = f"{_RULE}, float? clip_value=None, Tensor? loss_scale=None"
_PATH = "vectors ids layers slots parts columns"
_NETWORKS = "int networks, str activation"


class Op(NamedTuple):
    """An op as it is declared."""

    arguments: str  # names: of tensors, or of ``_SCHEMAS``
    options: str  # the schema of what is given by name
    returns: str
    truth: Kernel  # has the name of the op, as the kernels of the devices have
    shapes: Kernel  # empty tensors as the op would return them

    @property
    def schema(self) -> str:
        """As torch takes it."""
        arguments = [_SCHEMAS.get(name, f"Tensor {name}") for name in self.arguments.split()]
        options = [self.options] if self.options else []
        options += ["bool mean"] if "batch" in self.arguments.split() else []
        named = ["*", *options] if options else []
        return f"{self.truth.__name__}({', '.join([*arguments, *named])}) -> {self.returns}"


def _vectors(batch: IdBatch, stored: Tensor, layout: Layout, **options: Any) -> Tensor:
    offsets, width = batch.offsets, options.get("width", stored.shape[1])
    size = batch.ids.shape[0] if offsets is None else (offsets.shape[0] - 1) // layout.spans.shape[0]
    return stored.new_empty(size, layout.slots.shape[0], width, dtype=options.get("dtype"))


def _like_stored(grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout) -> Tensor:
    return torch.empty_like(stored)


def _row_grads(grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    values = stored.new_empty(count, stored.shape[1], dtype=accumulator(stored))
    return layout.spans.new_empty(count, dtype=torch.int64), values


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


_DECLARED = (
    Op("batch stored layout", _CODES, "Tensor", lookup.lookup, _vectors),
    Op("batch count layout", "", "()", lookup.count_invalid_, _nothing),
    Op("grad batch stored layout", "", "Tensor", gradients.backward, _like_stored),
    Op("grad batch stored layout", "", "(Tensor, Tensor)", gradients.row_grads, _row_grads),
    Op("grad batch stored layout", "", "Tensor", gradients.sample_weights_backward, _sample_weights),
    Op("grad batch moved lr state layout", _UPDATE, "()", rules.update_, _nothing),
    Op("rows values moved lr state", f"{_UPDATE}, Tensor? extents=None", "()", rules.rows_update_, _nothing),
    Op("batch moved state layout", _RULE, "()", replay.catch_up_, _nothing),
    Op("some_rows moved state", _RULE, "()", replay.rows_catch_up_, _nothing),
    Op(_PATH, _NETWORKS, "(Tensor, Tensor, Tensor)", path.path, _path),
    Op(f"grad {_PATH} counts lists", _NETWORKS, "Tensor[]", path.path_backward, _path_backward),
)
OPS = {op.truth.__name__: op for op in _DECLARED}
_MAPPED = ("lookup", "backward", "sample_weights_backward")  # by torch.vmap
_library = torch.library.Library("quorem", "DEF")
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
    invalid = options.pop("invalid", None)
    if invalid is not None:  # the op ``lookup`` writes into no argument, so that transforms take it
        call("count_invalid_", args[0], invalid, args[2])
    flat: list[Any] = []
    for arg in args:
        if isinstance(arg, IdBatch):
            flat.extend([arg.ids, arg.offsets, arg.sample_weights])
            options["mean"] = arg.mean
        elif isinstance(arg, Layout):
            flat.extend(arg)  # torch 2.11 compiles no += here
        elif isinstance(arg, tuple):  # a State
            flat.append(list(present(arg)))
        else:
            flat.append(arg)
    if "constants" in options:
        options["constants"] = list(options["constants"])
    return getattr(torch.ops.quorem, name)(*flat, **options)


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


def _entry(op: Op, plain: Kernel, device: Any = None) -> Kernel:
    """What the dispatcher calls: packs flat tensors, and runs the kernel of ``cpu`` or ``gpu``, or else ``plain``."""
    name, names = op.truth.__name__, op.arguments.split()

    def run(*args: Any, **options: Any) -> Any:
        flat, packed = iter(args), list[Any]()
        for argument in names:
            if argument == "batch":
                packed.append(IdBatch(next(flat), next(flat), next(flat), options.pop("mean")))
            elif argument == "layout":
                packed.append(Layout(*islice(flat, len(Layout._fields))))
            elif argument == "state":
                rule = RULES[options["rule"]]
                packed.append(rule.state(*next(flat)))
                options["constants"] = rule.constants(*options["constants"])
            else:
                packed.append(next(flat))
        kernel = None if device is None else device.kernels().get(name)
        result = NotImplemented if kernel is None else kernel(*packed, **options)
        return plain(*packed, **options) if result is NotImplemented else result

    def run_alone(*args: Any, **options: Any) -> Any:
        with moving:
            return run(*args, **options)

    return run_alone if device is cpu and "moved" in names else run


def _map(name: str) -> None:
    """Let ``torch.vmap`` run an op: ids of a lookup as one longer batch, anything else sample by sample."""

    def mapped(info: Any, in_dims: tuple[Any, ...], *args: Any, **options: Any) -> tuple[Tensor, int]:
        op = getattr(torch.ops.quorem, name)
        if name == "lookup" and args[1] is None and not any(d is not None for d in in_dims[1:]):  # no offsets
            ids = args[0].movedim(in_dims[0], 0)
            return op(ids.flatten(0, 1), *args[1:], **options).unflatten(0, ids.shape[:2]), 0

        def sample(i: int) -> list[Any]:
            return [a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)]

        return torch.stack([op(*sample(i), **options) for i in range(info.batch_size)]), 0

    torch.library.register_vmap(f"quorem::{name}", mapped, lib=_library)


for _name, _op in OPS.items():
    _library.define(_op.schema)
    _library.impl(_name, _entry(_op, _op.truth), "CompositeExplicitAutograd")
    _library.impl(_name, _entry(_op, _op.truth, cpu), "CPU")
    _library.impl(_name, _entry(_op, _op.truth, gpu), "CUDA")
    torch.library.register_fake(f"quorem::{_name}", _entry(_op, _op.shapes), lib=_library)
for _name in _MAPPED:
    _map(_name)
