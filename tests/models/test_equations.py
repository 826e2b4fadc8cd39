"""DCN against the equations of Wang et al. 2017, DLRM against every pair of vectors, both written out."""

from itertools import combinations

import pytest
import torch
from torch import nn

from quorem.models import DCN, DLRM


def layers(sequence):
    return [layer for layer in sequence if isinstance(layer, nn.Linear)]


def sizes(sequence):
    return [(layer.in_features, layer.out_features) for layer in layers(sequence)]


def through(sequence, x):
    for layer in layers(sequence):
        x = (torch.einsum("bi,oi->bo", x, layer.weight) + layer.bias).clamp(min=0)
    return x


def dcn(model, dense, vectors):
    x = x0 = torch.cat([dense, vectors.flatten(1)], 1)
    for w, b in zip(model.cross_weight, model.cross_bias, strict=True):
        x = torch.einsum("bi,bj,j->bi", x0, x, w) + b + x
    return torch.cat([x, through(model.deep, x0)], 1) @ model.output.weight[0] + model.output.bias


def dlrm(model, dense, vectors):
    low, every = through(model.bottom, dense), list(vectors.unbind(1))
    if model.num_dense:
        every.insert(0, low)
    pairs = sorted(combinations(range(len(every)), 2), key=lambda pair: pair[::-1])  # by the later vector
    dots = [torch.einsum("bd,bd->b", every[i], every[j]) for i, j in pairs]
    h = through(model.top, torch.cat([dense if model.raw_dense else low, torch.stack(dots, 1)], 1))
    return h @ model.output.weight[0] + model.output.bias


def check(model, reference, num_dense, shape):
    """Logits, and the gradients of vectors and parameters by name."""
    dense = torch.randn(33, num_dense, dtype=torch.float64)
    vectors = torch.randn(33, *shape, dtype=torch.float64, requires_grad=True)
    inputs = [vectors, *model.parameters()]
    expected, got = reference(model, dense, vectors), model.logits(dense, vectors)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(model.logits(dense, vectors.flatten(1)), expected)
    want, have = (torch.autograd.grad(y.square().sum(), inputs) for y in (expected, got))
    for name, w, h in zip(("vectors", *dict(model.named_parameters())), want, have, strict=True):
        torch.testing.assert_close(h, w, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("num_cross", [1, 2, 6])
@pytest.mark.parametrize("num_dense", [0, 13])
def test_dcn_equals_the_equations(num_dense, num_cross):
    torch.manual_seed(0)
    model = DCN(nn.Identity(), num_dense=num_dense, num_cross=num_cross, embedding_dims=(7, 9), dtype=torch.float64)
    nn.init.normal_(model.cross_bias)
    check(model, dcn, num_dense, (16,))


@pytest.mark.parametrize("num_vectors", [2, 5, 26])
@pytest.mark.parametrize(("num_dense", "raw_dense"), [(0, False), (13, False), (13, True)])
def test_dlrm_equals_the_equations(num_dense, raw_dense, num_vectors):
    torch.manual_seed(0)
    dims = (3,) * num_vectors
    model = DLRM(nn.Identity(), num_dense=num_dense, raw_dense=raw_dense, embedding_dims=dims, dtype=torch.float64)
    check(model, dlrm, num_dense, (num_vectors, 3))


def test_dcns_default_is_the_text_of_section_5_1():
    model = DCN(nn.Identity(), embedding_dims=(16,) * 26, device="meta")
    width = 13 + 26 * 16
    assert sizes(model.deep) == [(width, 512), (512, 256), (256, 64)]
    assert model.cross_weight.shape == model.cross_bias.shape == (6, width)
    assert model.output.weight.shape == (1, width + 64)


def test_dlrms_default_is_the_text_of_section_5_1():
    model = DLRM(nn.Identity(), embedding_dims=(16,) * 26, device="meta")
    assert sizes(model.bottom) == [(13, 512), (512, 256), (256, 64), (64, 16)]
    assert sizes(model.top) == [(27 * 26 // 2 + 16, 512), (512, 256)]
    assert model.output.weight.shape == (1, 256)
