"""DCN against the equations of Wang et al. 2017, written out layer by layer."""

import pytest
import torch
from torch import nn

from quorem.models import DCN


def reference(model, dense, vectors):
    x0 = torch.cat([dense, vectors.flatten(1)], 1)
    x = x0
    for w, b in zip(model.cross_weight, model.cross_bias, strict=True):
        x = torch.einsum("bi,bj,j->bi", x0, x, w) + b + x
    h = x0
    for layer in (m for m in model.deep if isinstance(m, nn.Linear)):
        h = (torch.einsum("bi,oi->bo", h, layer.weight) + layer.bias).clamp(min=0)
    return torch.einsum("bi,i->b", torch.cat([x, h], 1), model.output.weight[0]) + model.output.bias


@pytest.mark.parametrize("num_cross", [1, 2, 6])
@pytest.mark.parametrize("num_dense", [0, 13])
def test_equals_the_equations(num_dense, num_cross):
    torch.manual_seed(0)
    model = DCN(nn.Identity(), num_dense=num_dense, num_cross=num_cross, embedding_dims=(7, 9), dtype=torch.float64)
    with torch.no_grad():
        model.cross_bias.normal_()
    dense, vectors = torch.randn(33, num_dense, dtype=torch.float64), torch.randn(33, 16, dtype=torch.float64)
    inputs = [vectors.requires_grad_(), *model.parameters()]
    expected, got = reference(model, dense, vectors), model.logits(dense, vectors)
    torch.testing.assert_close(got, expected)
    want, have = (torch.autograd.grad(y.square().sum(), inputs) for y in (expected, got))
    for name, w, h in zip(("vectors", *dict(model.named_parameters())), want, have, strict=True):
        torch.testing.assert_close(h, w, msg=lambda m, name=name: f"{name}: {m}")


def test_default_is_the_text_of_section_5_1():
    model = DCN(nn.Identity(), embedding_dims=(16,) * 26, device="meta")
    width = 13 + 26 * 16
    deep = [(layer.in_features, layer.out_features) for layer in model.deep if isinstance(layer, nn.Linear)]
    assert deep == [(width, 512), (512, 256), (256, 64)]
    assert model.cross_weight.shape == model.cross_bias.shape == (6, width)
    assert model.output.weight.shape == (1, width + 64)
