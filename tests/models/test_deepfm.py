"""DeepFM against a version that writes out every pair of vectors."""

from itertools import combinations

import pytest
import torch
from torch import nn

from quorem.models import DeepFM


def reference(model, dense, vectors):
    """The logit as the paper writes it: linear part, sum over all pairs, and the MLP."""
    every = [*vectors.unbind(1), *(dense[:, j, None] * model.dense_vectors[j] for j in range(model.num_dense))]
    pairs = sum(torch.einsum("bd,bd->b", one, other) for one, other in combinations(every, 2))
    features = torch.cat([dense, *vectors.unbind(1)], 1)
    hidden = features
    for layer in model.deep:
        if isinstance(layer, nn.Linear):
            hidden = (torch.einsum("bi,oi->bo", hidden, layer.weight) + layer.bias).clamp(min=0)
    linear, deep = model.output.weight[0].split([features.shape[1], hidden.shape[1]])
    return features @ linear + hidden @ deep + model.output.bias + pairs


@pytest.mark.parametrize("num_vectors", [1, 2, 26])
@pytest.mark.parametrize("num_dense", [0, 1, 13])
def test_equals_the_equations(num_dense, num_vectors):
    if num_dense == 0 and num_vectors == 1:
        return  # one vector alone has no pair, which the reference cannot sum
    torch.manual_seed(0)
    dims = (3,) * num_vectors
    model = DeepFM(nn.Identity(), num_dense=num_dense, deep=(8, 5), embedding_dims=dims, dtype=torch.float64)
    dense = torch.randn(33, num_dense, dtype=torch.float64)
    vectors = torch.randn(33, num_vectors, 3, dtype=torch.float64, requires_grad=True)
    inputs = {"vectors": vectors, **dict(model.named_parameters())}
    expected, got = reference(model, dense, vectors), model.logits(dense, vectors)
    torch.testing.assert_close(got, expected)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, list(inputs.values()), grad, allow_unused=True)
    found = torch.autograd.grad(got, list(inputs.values()), grad, allow_unused=True)
    for name, one, other in zip(inputs, found, wanted, strict=True):
        zeros = torch.zeros_like(inputs[name])
        torch.testing.assert_close(zeros if one is None else one, zeros if other is None else other, msg=name)


def test_unequal_widths_are_refused():
    with pytest.raises(ValueError, match=r"embedding_dims \(\(3, 4\)\) must all be equal: DeepFM takes"):
        DeepFM(nn.Identity(), embedding_dims=(3, 4))
