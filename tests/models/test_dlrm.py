"""DLRM against a version that writes out every pair of vectors."""

from itertools import combinations

import pytest
import torch
from torch import nn

from quorem.models import DLRM


def layers(sequence):
    return [layer for layer in sequence if isinstance(layer, nn.Linear)]


def reference(model, dense, vectors):
    low, every = dense, list(vectors.unbind(1))
    for layer in layers(model.bottom):
        low = (torch.einsum("bi,oi->bo", low, layer.weight) + layer.bias).clamp(min=0)
    if model.num_dense:
        every.insert(0, low)
    pairs = sorted(combinations(range(len(every)), 2), key=lambda pair: pair[::-1])  # by the later vector
    dots = [torch.einsum("bd,bd->b", every[i], every[j]) for i, j in pairs]
    h = torch.cat([dense if model.raw_dense else low, torch.stack(dots, 1)], 1)
    for layer in layers(model.top):
        h = (torch.einsum("bi,oi->bo", h, layer.weight) + layer.bias).clamp(min=0)
    return torch.einsum("bi,i->b", h, model.output.weight[0]) + model.output.bias


@pytest.mark.parametrize("num_vectors", [2, 5, 26])
@pytest.mark.parametrize(("num_dense", "raw_dense"), [(0, False), (13, False), (13, True)])
def test_equals_the_equations(num_dense, raw_dense, num_vectors):
    torch.manual_seed(0)
    dims = (3,) * num_vectors
    model = DLRM(nn.Identity(), num_dense=num_dense, raw_dense=raw_dense, embedding_dims=dims, dtype=torch.float64)
    dense = torch.randn(33, num_dense, dtype=torch.float64)
    vectors = torch.randn(33, num_vectors, 3, dtype=torch.float64, requires_grad=True)
    inputs = [vectors, *model.parameters()]
    expected, got = reference(model, dense, vectors), model.logits(dense, vectors)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(model.logits(dense, vectors.flatten(1)), expected)
    want, have = (torch.autograd.grad(y.square().sum(), inputs) for y in (expected, got))
    for name, w, h in zip(("vectors", *dict(model.named_parameters())), want, have, strict=True):
        torch.testing.assert_close(h, w, msg=lambda m, name=name: f"{name}: {m}")


def test_default_is_the_text_of_section_5_1():
    model = DLRM(nn.Identity(), embedding_dims=(16,) * 26, device="meta")
    sizes = [[(layer.in_features, layer.out_features) for layer in layers(part)] for part in (model.bottom, model.top)]
    assert sizes == [[(13, 512), (512, 256), (256, 64), (64, 16)], [(27 * 26 // 2 + 16, 512), (512, 256)]]
    assert model.output.weight.shape == (1, 256)
