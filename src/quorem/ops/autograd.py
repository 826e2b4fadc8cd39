"""The lookup with gradients: dense ones, sparse ones, or ones that go to an optimizer within the backward pass."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Required

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from . import projection
from .codes import dequantize
from .declare import call, is_eager
from .in_backward import collector_of
from .lagging import unwatched
from .layout import Layout
from .lookup import CodeOptions
from .lookup import lookup as plain_lookup
from .narrow import project, split_gradient
from .pieces import Pieces
from .rows import IdBatch
from .updates import Lookup, Updates, uncompiled


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
    eager: bool | None = None,
) -> Tensor:
    """Composed vectors ``[B, S, W]`` of a batch; those of a bag are pooled.

    The gradient of ``stored`` goes where ``updates`` says, or is ``sparse`` or dense; rows that are bytes get none.
    ``invalid`` is a count to which the number of ids out of range is added, if these do not raise. ``eager`` is
    ``is_eager()``, if known.
    """
    weights, has_gradients = batch.sample_weights, torch.is_grad_enabled()
    to_weights = has_gradients and weights is not None and weights.requires_grad
    if "bits" in options and to_weights:
        raise ValueError("per_sample_weights must not require a gradient if rows are quantized: detach them")
    if updates.lagging is not None:
        updates.catch_up_(batch, stored, layout)
    eager, collector = is_eager() if eager is None else eager, collector_of(updates, stored)
    if invalid is not None and (batch.offsets is not None or not eager):  # kernels that pool do not count
        call("count_invalid_", batch, invalid, layout)
        invalid = None
    counted = {} if invalid is None else {"invalid": invalid}
    plain = partial(call, "lookup", batch, stored, layout, eager=eager, **options, **counted)
    if collector is not None and has_gradients:
        if to_weights:
            vectors = _Lookup.apply(*batch, stored.detach(), *layout, None, options["names"], False, None, ())
        return collector.read(vectors if to_weights else plain, Lookup(batch, layout))
    if "bits" in options or not (to_weights or (has_gradients and stored.requires_grad)):
        return plain()
    is_sparse = sparse and _may_be_sparse()
    inputs = (*batch, stored, *layout, invalid, options["names"], is_sparse, None, ())
    if is_sparse and torch.compiler.is_dynamo_compiling():
        return uncompiled(_Lookup.apply, *inputs)
    return _Lookup.apply(*inputs)


def lookup_projected(
    batch: IdBatch,
    stored: Tensor,
    layout: Layout,
    updates: Updates,
    options: ReadOptions,
    pieces: Pieces,
    matrices: Sequence[Tensor],
    *,
    sparse: bool = False,
    invalid: Tensor | None = None,
) -> Tensor:
    """The vectors ``[B, sum of D]`` of single ids, outside of any tracer: composed rows times the matrices."""
    if updates.lagging is not None:
        updates.catch_up_(batch, stored, layout)
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (stored, *matrices))
    counted: dict[str, Any] = {} if invalid is None else {"invalid": invalid}
    split = call("lookup_split", batch, stored, layout, pieces, matrices, keep=keep, **options, **counted)
    if split is NotImplemented:
        composed = lookup(batch, stored, layout, updates, options, sparse=sparse, invalid=invalid)
        return project(composed.flatten(1), pieces, matrices)
    if not keep:
        vectors: Tensor = split[1]
        return vectors
    if (collector := collector_of(updates, stored)) is not None:
        vectors = collector.read(split, Lookup(batch, layout, pieces), *matrices)
    else:
        rest = (None, options["names"], sparse and _may_be_sparse(), split, pieces, *matrices)
        vectors = _Lookup.apply(*batch, stored, *layout, *rest)
    return vectors


def gather_rows(rows: Tensor, stored: Tensor, updates: Updates, options: ReadOptions, sparse: bool = False) -> Tensor:
    """``rows`` of ``stored`` as they are, ``[..., W]``; float32 where they are bytes."""
    if "bits" in options:
        return dequantize(stored, rows, options["width"], options["bits"])
    collector = collector_of(updates, stored)
    if collector is None:
        return F.embedding(rows, stored, sparse=sparse and _may_be_sparse())
    return collector.read(F.embedding(rows, stored.detach()), rows)


def _may_be_sparse() -> bool:
    """``DistributedDataParallel`` takes sparse gradients only from ``nn.Embedding`` and ``nn.EmbeddingBag``."""
    return DistributedDataParallel._active_ddp_module is None


_FIELDS = len(Layout._fields)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        ids, offsets, sample_weights, ctx.mean, stored, *rest = inputs
        layout, (invalid, names, ctx.sparse, split, ctx.pieces, *matrices) = rest[:_FIELDS], rest[_FIELDS:]
        narrow, vectors = (None, None) if split is None else split
        ctx.save_for_backward(ids, offsets, sample_weights, stored, *layout, narrow, *matrices)
        if vectors is not None:
            return vectors
        counted = {} if invalid is None else {"invalid": invalid}
        batch = IdBatch(ids, offsets, sample_weights, ctx.mean)
        return call("lookup", batch, stored, Layout(*layout), names=names, **counted)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, ...]:
        ids, offsets, sample_weights, stored, *rest = ctx.saved_tensors
        layout, (narrow, *matrices) = Layout(*rest[:_FIELDS]), rest[_FIELDS:]
        batch, nothing = IdBatch(ids, offsets, sample_weights, ctx.mean), [None] * (_FIELDS + 5)
        to_weights = to_stored = None
        with unwatched():
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
                found = _differentiable_gradients(grad, batch, stored, layout, ctx.pieces, matrices)
                to_weights, to_stored, *of_matrices = found
                return None, None, to_weights, None, to_stored, *nothing, *of_matrices
            of_rows, of_matrices = grad, []
            if matrices:
                of_rows, of_matrices = split_gradient(grad, narrow, ctx.pieces, matrices, stored.shape[1])
            inputs = (of_rows, batch, stored, layout)
            if ctx.needs_input_grad[2]:
                to_weights = call("sample_weights_backward", *inputs).to(sample_weights.dtype)
            if ctx.needs_input_grad[4] and ctx.sparse:
                rows, values = call("row_grads", *inputs)
                values = values.to(stored.dtype)
                to_stored = torch.sparse_coo_tensor(rows[None], values, stored.shape, check_invariants=False)
            elif ctx.needs_input_grad[4]:
                to_stored = call("backward", *inputs)
        return None, None, to_weights, None, to_stored, *nothing, *of_matrices


def _differentiable_gradients(
    grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout, pieces: Pieces, matrices: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of sample weights, ``stored`` and matrices by torch's operators, for a gradient of these."""
    inputs = [batch.sample_weights, stored, *matrices]
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    vectors = plain_lookup(batch, stored, layout)
    if matrices:
        vectors = projection.project(vectors.flatten(1), pieces, matrices)
    found = iter(torch.autograd.grad(vectors, wanted, grad, create_graph=True))
    return [None if tensor is None or not tensor.requires_grad else next(found) for tensor in inputs]
