"""Every op once: its truth, and the kernels of each device; the ones that a compiler has to see are ops of torch too.

Kernels take an ``IdBatch``, a ``Layout`` and a ``State`` whole. A kernel of ``cpu`` or ``gpu`` that cannot take its
arguments returns NotImplemented; the truth then runs. torch's dispatcher takes flat tensors, so ``call`` flattens and
``_entry`` packs again. ``call`` does not go through the dispatcher where nothing has to see the op: a CPU lookup of 128
entries of 26 features would take 23 us, not 17.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..checks import is_exporting
from . import cpu, gpu, gradients, lookup, projection, replay, rules
from .lagging import LaggingParameter
from .layout import Layout
from .pieces import SplitGradient, whole
from .rows import IdBatch
from .words import with_words

Kernel = Callable[..., Any]
_BATCH = "Tensor ids, Tensor? offsets, Tensor? sample_weights"
_LAYOUT = ", ".join(f"Tensor {name}" for name in Layout._fields)
_CODES = "str names, int? width=None, int? bits=None, ScalarType? dtype=None"


def _vectors(batch: IdBatch, stored: Tensor, layout: Layout, **options: Any) -> Tensor:
    offsets, width = batch.offsets, options.get("width", stored.shape[1])
    size = batch.ids.shape[0] if offsets is None else (offsets.shape[0] - 1) // layout.spans.shape[0]
    return stored.new_empty(size, layout.slots.shape[0], width, dtype=options.get("dtype"))


_GRADIENT = f"(Tensor grad, {_BATCH}, Tensor stored, {_LAYOUT}, *, bool mean) -> Tensor"
TORCH_OPS: dict[str, tuple[str, Kernel]] = {  # the schema, and what has the shape and dtype of the result
    "lookup": (f"({_BATCH}, Tensor stored, {_LAYOUT}, *, bool mean, {_CODES}) -> Tensor", _vectors),
    "count_invalid_": (f"({_BATCH}, Tensor(a!) count, {_LAYOUT}, *, bool mean) -> ()", lambda *args: None),
    "backward": (_GRADIENT, lambda grad, batch, stored, layout: torch.empty_like(stored)),
    "sample_weights_backward": (_GRADIENT, lambda grad, batch, stored, layout: grad.new_empty(batch.ids.shape)),
}
_IN_PLAIN_TORCH: tuple[Kernel, ...] = (
    *(lookup.lookup, lookup.count_invalid_),
    *(gradients.backward, gradients.row_grads, gradients.sample_weights_backward),
    *(rules.update_, rules.rows_update_, replay.catch_up_, replay.rows_catch_up_),
    *(projection.project, projection.project_backward),
)
TRUTHS = {truth.__name__: truth for truth in _IN_PLAIN_TORCH}
_library = torch.library.Library("quorem", "DEF")
_are_functorch_transforms_active = torch._C._are_functorch_transforms_active
_len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
_profiler_enabled = torch._C._autograd._profiler_enabled
_is_tracing = torch._C._is_tracing


def call(name: str, *args: Any, eager: bool | None = None, **options: Any) -> Any:
    """Run the op ``name``, with an ``IdBatch``, ``Layout``, ``State`` and ``Constants`` whole.

    It goes through torch's dispatcher only where a compiler, a mode, a tracer or a profiler has to see the op, or for
    tensors of other kinds and devices. ``eager`` is ``is_eager()``, if known.
    """
    seen = name in TORCH_OPS and not (is_eager() if eager is None else eager)
    device = None if seen else device_of(args)
    if device is None and name in TORCH_OPS:
        flat: list[Any] = []
        if (invalid := options.pop("invalid", None)) is not None:  # ``lookup`` writes into no argument of torch's op
            batch, _, layout = args
            call("count_invalid_", batch, invalid, layout)
        for arg in args:
            if isinstance(arg, IdBatch):
                flat.extend([arg.ids, arg.offsets, arg.sample_weights])
                options["mean"] = arg.mean
            elif isinstance(arg, Layout):
                flat.extend(arg)  # torch 2.11 compiles no += here
            else:
                flat.append(whole(arg, args[2].shape[1]) if isinstance(arg, SplitGradient) else arg)
        return getattr(torch.ops.quorem, name)(*flat, **options)
    return _run(name, device, args, options)


def is_eager() -> bool:
    """Whether ops run one by one, and nothing has to see them: no compiler, transform, mode, profiler or tracer.

    Then nothing is traced either (``is_traced``).
    """
    if torch.compiler.is_compiling() or _are_functorch_transforms_active() or _len_torch_dispatch_stack():
        return False
    return not _profiler_enabled() and not _is_tracing() and forward_ad._current_level < 0


def is_traced() -> bool:
    """Whether torch captures or transforms what runs, by torch.export, torch.jit.trace, torch.func or forward mode.

    Lookups then run in torch's own operators, on rows that are up to date.
    """
    if torch.compiler.is_compiling():
        return is_exporting()
    traces = torch._C._get_tracing_state() is not None
    return traces or _are_functorch_transforms_active() or forward_ad._current_level >= 0


def _run(name: str, device: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run the kernel of ``cpu`` or ``gpu``, or else the truth.

    ``lookup_split``, a lookup and a product in one, has none: it is NotImplemented where no kernel does it.
    """
    kernel = None if device is None else device.kernels().get(name)
    result = NotImplemented if kernel is None else kernel(*args, **options)
    return TRUTHS[name](*args, **options) if result is NotImplemented and name in TRUTHS else result


def device_of(args: tuple[Any, ...]) -> Any:
    """``cpu`` or ``gpu``, if all tensors are plain ones of it. It runs for every op, so it is written for speed."""
    device = None
    for arg in args:
        kind = type(arg)
        if kind is IdBatch:
            arg, kind = arg.ids, type(arg.ids)
        elif kind is Layout:
            arg, kind = arg.slots, Tensor
        if kind is Tensor or kind is Parameter or kind is LaggingParameter:
            of_tensor = cpu if arg.is_cpu else gpu if arg.is_cuda else None
            if of_tensor is None or device not in (None, of_tensor):
                return None
            device = of_tensor
        elif kind is not list and not isinstance(arg, tuple) and isinstance(arg, Tensor):  # the last takes longest
            return None
    return device


def word_bytes(layout: Layout) -> int:
    """Bytes of the words in which the kernels of a device find ids of lists; 0 where there are no kernels."""
    device = device_of((layout,))
    words = with_words(layout, layout.slots.cpu()) if device is not None and device.kernels() else layout
    return words.maps.nbytes - layout.maps.nbytes


def _entry(run: Kernel) -> Kernel:
    """What the dispatcher calls: packs flat tensors for ``run``."""

    def packed(*flat: Any, mean: bool, **options: Any) -> Any:
        *grad, ids, offsets, sample_weights, tensor = flat[: -len(Layout._fields)]
        batch, layout = IdBatch(ids, offsets, sample_weights, mean), Layout(*flat[-len(Layout._fields) :])
        return run(*grad, batch, tensor, layout, **options)

    return packed


def _on(device: Any, name: str) -> Kernel:
    return _entry(lambda *args, **options: _run(name, device, args, options))


for _name, (_schema, _shapes) in TORCH_OPS.items():
    _library.define(_name + _schema)
    _library.impl(_name, _on(None, _name), "CompositeExplicitAutograd")
    _library.impl(_name, _on(cpu, _name), "CPU")
    _library.impl(_name, _on(gpu, _name), "CUDA")
    torch.library.register_fake(f"quorem::{_name}", _entry(_shapes), lib=_library)
