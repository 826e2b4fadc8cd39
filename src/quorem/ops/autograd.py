"""The ops with gradients: dense ones, sparse ones, or ones that go to an optimizer within the backward pass."""

from functools import partial
from typing import Any, Required

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel

from . import gpu, gradients
from .codes import dequantize
from .declare import call, is_eager
from .lagging import unwatched
from .layout import Layout
from .lookup import CodeOptions
from .rows import IdBatch
from .updates import Lookup, Updates, is_captured


class ReadOptions(CodeOptions):
    """How rows are read, and the name of each feature's table, one per line, for error messages."""

    names: Required[str]


def lookup(
    batch: IdBatch,
    stored: Tensor,
    layout: Layout,
    updates: Updates,
    options: ReadOptions,
    *,
    sparse: bool = False,
    invalid: Tensor | None = None,
) -> Tensor:
    """Composed vectors ``[B, S, W]`` of a batch; those of a bag are pooled.

    Args:
        batch: the ids.
        stored: every row, ``[R, W]``.
        layout: where the rows of an id are.
        updates: the work that an optimizer has left for ``stored``, and where its gradients go.
        options: names of the tables; and how rows are read if they are bytes, which are not trained.
        sparse: whether the gradient of ``stored`` is sparse.
        invalid: a count to which the number of ids out of range is added, if these do not raise.

    Raises:
        ValueError: if rows are bytes and the sample weights want a gradient.
    """
    weights = batch.sample_weights
    if "bits" in options and weights is not None and weights.requires_grad and torch.is_grad_enabled():
        raise ValueError("per_sample_weights must not require a gradient if rows are quantized: detach them")
    if updates.lagging is not None:
        updates.catch_up_(batch, stored, layout)
    eager, collector = is_eager(), updates.collector
    if invalid is not None and (batch.offsets is not None or not eager):  # no kernel counts and pools
        call("count_invalid_", batch, invalid, layout)
        invalid = None
    if collector is not None and not (eager and stored is updates.stored):
        collector = updates.collector_of(stored)
    args = (batch, stored, layout)
    counted = {} if invalid is None else {"invalid": invalid}
    if collector is not None:
        read = Lookup(batch, layout)
        if weights is None or not _differentiated(weights, eager=eager):
            return collector.read(partial(call, "lookup", *args, eager=eager, **options, **counted), read)
        return collector.read(_Lookup.apply(*batch, stored.detach(), *layout, None, options["names"], False), read)
    if "bits" in options or not _differentiated(stored, weights, eager=eager):
        return call("lookup", *args, eager=eager, **options, **counted)
    is_sparse = sparse and _may_be_sparse()
    function = _Lookup.apply
    if is_sparse and torch.compiler.is_dynamo_compiling() and _enters_graph():
        function = _sparse_lookup
    return function(*batch, stored, *layout, invalid, options["names"], is_sparse)


def gather_rows(rows: Tensor, stored: Tensor, updates: Updates, options: ReadOptions, sparse: bool = False) -> Tensor:
    """``rows`` of ``stored`` as they are, ``[..., W]``; float32 where they are bytes."""
    if "bits" in options:
        return dequantize(stored[rows], options["width"], options["bits"])
    collector = updates.collector_of(stored)
    if collector is None:
        return F.embedding(rows, stored, sparse=sparse and _may_be_sparse())
    return collector.read(F.embedding(rows, stored.detach()), rows)


def path(
    vectors: Tensor, ids: Tensor, layers: list[Tensor], *integers: Tensor, networks: int, activation: str
) -> Tensor:
    """The op ``path`` with gradients of ``vectors`` and ``layers``; ``integers`` are its slots, parts and columns."""
    return _Path.apply(vectors, ids, *integers, networks, activation, *layers)[0]


def path_is_fused(vectors: Tensor, layers: list[Tensor], networks: int) -> bool:
    """Whether the device has the op ``path`` fused for such networks."""
    if not vectors.is_cuda or "path" not in gpu.kernels():
        return False
    from .gpu import path as fused

    return fused.can_fuse(vectors, layers, networks)


def _differentiated(*inputs: Tensor | None, eager: bool = False) -> bool:
    """Whether a derivative may be taken. If not, the op is called directly: that is cheaper, and the compiler needs it.

    ``torch.jit.trace`` takes none, since it cannot save a Python function. ``eager`` is ``is_eager()``, if known.
    """
    compiling = not eager and torch.compiler.is_compiling()
    if not eager and not compiling and is_captured():
        return False
    if torch.is_grad_enabled():
        for tensor in inputs:
            if tensor is not None and tensor.requires_grad:
                return True
    return not compiling and (forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active())


def _may_be_sparse() -> bool:
    """Whether a gradient may be sparse: not in a graph that is captured to be saved, and not under a transform.

    ``DistributedDataParallel`` takes sparse gradients only from ``nn.Embedding`` and ``nn.EmbeddingBag``.
    """
    if is_captured() or torch._C._are_functorch_transforms_active():
        return False
    return DistributedDataParallel._active_ddp_module is None


class _Lookup(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        ids, offsets, sample_weights, mean, stored, *layout, invalid, names, _ = inputs
        counted = {} if invalid is None else {"invalid": invalid}
        batch = IdBatch(ids, offsets, sample_weights, mean)
        return call("lookup", batch, stored, Layout(*layout), names=names, **counted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ids, offsets, sample_weights, ctx.mean, *tensors, _, _, ctx.sparse = inputs
        ctx.save_for_backward(ids, offsets, sample_weights, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with unwatched():
            return _Lookup._backward(ctx, grad)

    @staticmethod
    def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, offsets, sample_weights, stored, *layout = ctx.saved_tensors
        inputs = (grad, IdBatch(ids, offsets, sample_weights, ctx.mean), stored, Layout(*layout))
        dsample = dstored = None
        if ctx.needs_input_grad[2]:
            dsample = _gradient("sample_weights_backward", *inputs).to(sample_weights.dtype)
        if ctx.needs_input_grad[4]:
            dstored = _sparse(_gradient("row_grads", *inputs), stored) if ctx.sparse else _gradient("backward", *inputs)
        return None, None, dsample, None, dstored, *[None] * (len(Layout._fields) + 3)


def _sparse_lookup(*inputs: Any) -> Tensor:
    return _Lookup.apply(*inputs)


def _enters_graph() -> bool:
    """Whether the compiler's graph may contain a lookup with a sparse gradient; if not, the graph breaks there.

    The number of rows in a sparse gradient depends on the ids, so the graph must allow outputs of unknown size: it does
    with ``fullgraph=True``, or if torch is configured so. The function above is then called from the graph
    without being traced, since the compiler cannot trace a function that makes a sparse tensor.
    """
    torch.compiler.allow_in_graph(_sparse_lookup)
    mode = torch._guards.TracingContext.get().fake_mode
    return mode is not None and mode.shape_env is not None and mode.shape_env.allow_dynamic_output_shape_ops


_enters_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called while a graph is traced


class _Path(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        vectors, ids, slots, parts, columns, networks, activation, *layers = inputs
        return call("path", vectors, ids, layers, slots, parts, columns, networks=networks, activation=activation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        vectors, ids, slots, parts, columns, networks, activation, *layers = inputs
        _, counts, lists = output
        ctx.options = {"networks": networks, "activation": activation}
        ctx.mark_non_differentiable(counts, lists)
        ctx.save_for_backward(vectors, ids, slots, parts, columns, counts, lists, *layers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        vectors, ids, slots, parts, columns, counts, lists, *layers = ctx.saved_tensors
        inputs = (vectors, ids, layers, slots, parts, columns, counts, lists)
        dvectors, *dlayers = call("path_backward", grad, *inputs, **ctx.options)
        return dvectors, *[None] * 6, *dlayers


def _gradient(name: str, *args: Any) -> Any:
    """A gradient, computed by its op; with create_graph by the truth in plain torch, which can be differentiated."""
    return getattr(gradients, name)(*args) if torch.is_grad_enabled() else call(name, *args)


def _sparse(row_grads: tuple[Tensor, Tensor], stored: Tensor) -> Tensor:
    rows, values = row_grads
    if torch.compiler.is_compiling():  # the only way to make one in a compiled graph
        return torch.ops.aten._sparse_coo_tensor_unsafe(rows[None], values.to(stored.dtype), stored.shape)
    return torch.sparse_coo_tensor(rows[None], values.to(stored.dtype), stored.shape, check_invariants=False)
