"""The path networks of a whole collection (section 4.1): the truth, in plain PyTorch.

    path(vectors, ids, layers, slots, parts, columns, *, networks, activation) -> (out, counts, lists)

``vectors`` ``[B, S, D]`` holds the rows of the first partition. ``columns`` ``[S]`` names each column once: the vectors
of the first M are transformed, each by the network that its id in ``ids`` ``[B, F]`` selects; the others are copied.
``layers`` are weight ``[G, in, out]`` and bias ``[G, out]`` of one or two layers. ``slots`` ``[M, 14]`` and ``parts``
``[M, 1, 5]`` find the networks as ``layout`` finds rows; ``networks`` is the most that a feature has. Padding and
out-of-range ids give zeros. ``counts`` and ``lists`` are the ids of each network, how many and which; a fused version
needs them again in the backward pass.
"""

import torch
from torch import Tensor

from .layout import BASE, FEATURE
from .rows import accumulator, buckets_of, numbers_of


def path(
    vectors: Tensor,
    ids: Tensor,
    layers: list[Tensor],
    slots: Tensor,
    parts: Tensor,
    columns: Tensor,
    *,
    networks: int,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Transform the vectors of path-based features."""
    columns = columns[: slots.shape[0]]
    none = slots.new_empty(0)
    numbers = numbers_of(ids[:, slots[:, FEATURE]], slots, none)
    network = (parts[..., BASE] + buckets_of(numbers, parts, none))[..., 0]
    hidden = vectors[:, columns].to(accumulator(vectors))
    for i in range(0, len(layers), 2):
        weight, bias = (layer[network].to(hidden.dtype) for layer in layers[i : i + 2])
        hidden = torch.einsum("bmi,bmio->bmo", hidden, weight) + bias
        if i + 2 < len(layers):
            hidden = torch.relu(hidden) if activation == "relu" else torch.sigmoid(hidden)
    out = vectors.index_copy(1, columns, torch.where(numbers.valid[..., None], hidden, 0).to(vectors.dtype))
    return out, out.new_empty(0, dtype=torch.int32), out.new_empty(0, dtype=torch.int32)


def path_backward(
    grad: Tensor,
    vectors: Tensor,
    ids: Tensor,
    layers: list[Tensor],
    slots: Tensor,
    parts: Tensor,
    columns: Tensor,
    counts: Tensor,
    lists: Tensor,
    *,
    networks: int,
    activation: str,
) -> list[Tensor]:
    """Gradients of ``vectors`` and of each of ``layers``."""
    inputs = [t.detach().requires_grad_() for t in (vectors, *layers)]
    with torch.enable_grad():
        out, *_ = path(inputs[0], ids, inputs[1:], slots, parts, columns, networks=networks, activation=activation)
    return list(torch.autograd.grad(out, inputs, grad))
