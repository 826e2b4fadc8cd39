"""The path networks of a whole collection as one op (section 4.1), for the devices that have it fused.

    path(Tensor vectors, Tensor ids, Tensor[] layers, Tensor slots, Tensor parts, Tensor columns, *, int networks,
         str activation) -> (Tensor, Tensor, Tensor)

``vectors`` ``[B, S, D]`` holds the rows of the first partition. ``columns`` ``[S]`` names each column once: the vectors
of the first M are transformed, each by the network that its id ``ids`` ``[B, F]`` selects, the others pass. ``layers``
are weight ``[G, in, out]`` and bias ``[G, out]`` of one or two layers. ``slots`` ``[M, 6]`` and ``parts`` ``[M, 1, 5]``
find the networks as ``layout`` finds rows; ``networks`` is the most that a feature has. Padding and out-of-range ids
give zeros. The other two results are the ids of each network, how many and which, if a fused version wants them again
in the backward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import gpu, reference
from .layout import FEATURE

_INPUTS = "Tensor vectors, Tensor ids, Tensor[] layers, Tensor slots, Tensor parts, Tensor columns"
_library = torch.library.Library("quorem", "FRAGMENT")
_library.define(f"path({_INPUTS}, *, int networks, str activation) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"path_backward(Tensor grad, {_INPUTS}, Tensor counts, Tensor lists, *, int networks, str activation) -> Tensor[]"
)


def path(
    vectors: Tensor, ids: Tensor, layers: list[Tensor], *integers: Tensor, networks: int, activation: str
) -> Tensor:
    """The op, with gradients of ``vectors`` and ``layers``."""
    return _Path.apply(vectors, ids, *integers, networks, activation, *layers)[0]


def is_fused(vectors: Tensor, layers: list[Tensor], networks: int) -> bool:
    """Whether the device has the op fused for such networks."""
    if not vectors.is_cuda or len(layers) not in (2, 4) or torch.are_deterministic_algorithms_enabled():
        return False
    if vectors.dtype == torch.float64 or layers[-1].shape[1] != vectors.shape[2] or "path" not in gpu.kernels():
        return False
    from .gpu import path as fused

    widest = layers[0].shape[2] if len(layers) == 4 else 1
    return networks <= fused.MOST_NETWORKS and vectors.shape[2] <= fused.WIDEST and widest <= fused.WIDEST_HIDDEN


def _plain(vectors: Tensor, ids: Tensor, layers: list[Tensor], *integers: Tensor, activation: str) -> Tensor:
    slots, parts, columns = integers
    columns = columns[: slots.shape[0]]
    rows, valid = reference.rows_of(ids[:, slots[:, FEATURE]], slots, parts, slots.new_empty(0))
    network, x = rows[..., 0], vectors[:, columns].to(reference.accumulator(vectors))
    for i in range(0, len(layers), 2):
        x = torch.einsum("bmi,bmio->bmo", x, layers[i][network].to(x.dtype)) + layers[i + 1][network].to(x.dtype)
        if i + 2 < len(layers):
            x = torch.relu(x) if activation == "relu" else torch.sigmoid(x)
    return vectors.index_copy(1, columns, torch.where(valid[..., None], x, 0).to(vectors.dtype))


def _path(
    vectors: Tensor, ids: Tensor, layers: list[Tensor], *integers: Tensor, networks: int, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    out = _plain(vectors, ids, layers, *integers, activation=activation)
    return out, out.new_empty(0, dtype=torch.int32), out.new_empty(0, dtype=torch.int32)


def _path_backward(
    grad: Tensor,
    vectors: Tensor,
    ids: Tensor,
    layers: list[Tensor],
    *rest: Tensor,
    networks: int,
    activation: str,
) -> list[Tensor]:
    integers = rest[:3]
    inputs = [t.detach().requires_grad_() for t in (vectors, *layers)]
    with torch.enable_grad():
        out = _plain(inputs[0], ids, inputs[1:], *integers, activation=activation)
    return list(torch.autograd.grad(out, inputs, grad))


_BODIES: dict[str, Callable[..., Any]] = {"path": _path, "path_backward": _path_backward}
for _name, _body in _BODIES.items():
    _library.impl(_name, _body, "CompositeExplicitAutograd")
    _library.impl(_name, gpu.fused(_name, _body), "CUDA")


@torch.library.register_fake("quorem::path", lib=_library)
def _(
    vectors: Tensor, ids: Tensor, layers: list[Tensor], slots: Tensor, parts: Tensor, columns: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    lists = slots.shape[0] * (options["networks"] + 1) if vectors.is_cuda else 0
    counts = vectors.new_empty(lists, dtype=torch.int32)
    places = (lists, ids.shape[0]) if vectors.is_cuda else (0,)
    return torch.empty_like(vectors), counts, vectors.new_empty(places, dtype=torch.int32)


@torch.library.register_fake("quorem::path_backward", lib=_library)
def _(grad: Tensor, vectors: Tensor, ids: Tensor, layers: list[Tensor], *rest: Any, **options: Any) -> list[Tensor]:
    return [torch.empty_like(t) for t in (vectors, *layers)]


class _Path(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        vectors, ids, slots, parts, columns, networks, activation, *layers = inputs
        return torch.ops.quorem.path(
            vectors, ids, layers, slots, parts, columns, networks=networks, activation=activation
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.options = {"networks": inputs[5], "activation": inputs[6]}
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:5], *output[1:], *inputs[7:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        vectors, ids, slots, parts, columns, counts, lists, *layers = ctx.saved_tensors
        inputs = (vectors, ids, layers, slots, parts, columns, counts, lists)
        dvectors, *dlayers = torch.ops.quorem.path_backward(grad, *inputs, **ctx.options)
        return dvectors, *[None] * 6, *dlayers
