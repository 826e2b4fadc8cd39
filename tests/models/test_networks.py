"""What each network must do, whatever embeddings they are handed."""

from functools import partial
from math import sqrt

import pytest
import torch
from refusals import Case, refused
from torch import nn
from torch.func import functional_call

import quorem
from quorem import models
from quorem.models.networks import init_layers_, mlp
from quorem.training.model import PAPER_METHODS, scheme_of, tables_of

CARDINALITIES = (4, 23, 90, 500)
SMALL = {
    "dcn": lambda e, **options: models.DCN(e, num_dense=3, deep=(16, 8), num_cross=3, **options),
    "dlrm": lambda e, **options: models.DLRM(e, num_dense=3, bottom=(16,), top=(16, 8), **options),
}
TINY = {
    "dcn": lambda e, **options: models.DCN(e, num_dense=2, deep=(4, 3), num_cross=3, **options),
    "dlrm": lambda e, **options: models.DLRM(e, num_dense=2, bottom=(4,), top=(4, 3), **options),
}
each = pytest.mark.parametrize("network", SMALL)


def batch(rows):
    return torch.randn(rows, 3), torch.stack([torch.randint(n, (rows,)) for n in CARDINALITIES], 1)


def tables(method, threshold=0, embedding_dim=4, **options):
    wanted = tables_of(CARDINALITIES, scheme_of(method, hidden=8), threshold=threshold, embedding_dim=embedding_dim)
    return quorem.EmbeddingCollection(wanted, **options)


class Plain(nn.Module):
    """Embeddings that know nothing of quorem: one ``nn.Embedding`` a feature, laid end to end."""

    def __init__(self, dims, **options):
        super().__init__()
        self.features = nn.ModuleList(nn.Embedding(n, d, **options) for n, d in zip(CARDINALITIES, dims, strict=True))

    def forward(self, ids):
        return torch.cat([table(column) for table, column in zip(self.features, ids.unbind(1), strict=True)], 1)


@each
def test_rows_narrower_than_the_network_give_logits_in_its_dtype(network):
    """As the same rows in float32 do; so do networks without dense features."""
    torch.manual_seed(0)
    narrow = tables("add", dtype=torch.bfloat16)
    wide = tables("add")
    wide.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in narrow.state_dict().items()})
    model, dense_and_ids = SMALL[network](narrow), batch(20)
    same = SMALL[network](wide)
    same.load_state_dict({**model.state_dict(), **{f"embeddings.{n}": t for n, t in wide.state_dict().items()}})
    logits = model(*dense_and_ids)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, same(*dense_and_ids), rtol=0.01, atol=0.01)
    logits.sum().backward()
    assert narrow.stored.grad.dtype == torch.bfloat16 and narrow.stored.grad.abs().sum() > 0
    build = {"dcn": models.DCN, "dlrm": models.DLRM}[network]
    assert build(narrow, num_dense=0)(torch.zeros(20, 0), dense_and_ids[1]).dtype == torch.float32


@each
@pytest.mark.parametrize("threshold", [0, 30, 1000])
@pytest.mark.parametrize("method", PAPER_METHODS)
def test_every_method_gives_one_logit_a_row_and_trains_every_parameter(network, method, threshold):
    torch.manual_seed(0)
    model = SMALL[network](tables(method, threshold))
    logits = model(*batch(300))
    assert logits.shape == (300,)
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name


@each
def test_any_module_will_do(network):
    torch.manual_seed(0)
    collection = tables("full")
    plain = Plain((4, 4, 4, 4))
    for table, (_, values) in zip(plain.features, collection.named_tables(), strict=True):
        table.weight.data.copy_(values)
    ours, theirs = SMALL[network](collection), SMALL[network](plain, embedding_dims=(4, 4, 4, 4))
    theirs.load_state_dict({k: v for k, v in ours.state_dict().items() if "embeddings" not in k}, strict=False)
    inputs = batch(50)
    torch.testing.assert_close(ours(*inputs), theirs(*inputs))


@each
def test_gradients_agree_with_finite_differences(network):
    torch.manual_seed(0)
    model = TINY[network](nn.Identity(), embedding_dims=(2,) * 5, dtype=torch.float64)
    dense, vectors = (torch.randn(3, *size, dtype=torch.float64, requires_grad=True) for size in ((2,), (5, 2)))
    names, values = zip(*model.named_parameters(), strict=True)

    def logits(dense, vectors, *values):
        return functional_call(model, dict(zip(names, values, strict=True)), (dense, vectors))

    assert torch.autograd.gradcheck(logits, (dense, vectors, *values))
    assert torch.autograd.gradgradcheck(lambda v: model.logits(dense, v), (vectors,))


@each
@pytest.mark.parametrize("method", ["mult", "path"])
def test_compiles_without_a_graph_break(network, method):
    torch.manual_seed(0)
    model = SMALL[network](tables(method))
    inputs = batch(40)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, got = model(*inputs), compiled(*inputs)
    torch.testing.assert_close(got, expected)
    want = torch.autograd.grad(expected.sum(), list(model.parameters()))
    have = torch.autograd.grad(got.sum(), list(model.parameters()))
    for (name, _), w, h in zip(model.named_parameters(), want, have, strict=True):
        torch.testing.assert_close(h, w, msg=lambda m, name=name: f"{name}: {m}")


@each
def test_meta_model_is_filled_by_reset(network):
    torch.manual_seed(0)
    model = SMALL[network](tables("mult", device="meta"), device="meta").to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(9)
    model.embeddings.reset_parameters()
    model.reset_parameters()
    model.load_state_dict((other := SMALL[network](tables("mult"))).state_dict())
    inputs = batch(20)
    torch.testing.assert_close(model(*inputs), other(*inputs), rtol=0, atol=0)


@each
def test_reset_leaves_the_embeddings_alone(network):
    model = SMALL[network](tables("path"))
    before = {k: v.clone() for k, v in model.embeddings.state_dict().items()}
    weight = model.output.weight.clone()
    model.reset_parameters()
    assert not torch.equal(weight, model.output.weight)
    for name, value in model.embeddings.state_dict().items():
        assert torch.equal(value, before[name]), name


@each
def test_deterministic_mode_has_an_answer(network):
    model = SMALL[network](tables("mult"))
    parameters, inputs = list(model.parameters()), batch(10)
    expected = torch.autograd.grad(model(*inputs).sum(), parameters)
    torch.use_deterministic_algorithms(True)
    try:
        gradients = [torch.autograd.grad(model(*inputs).sum(), parameters) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    for first, second, other in zip(*gradients, expected, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, other)


@each
def test_wrong_inputs_are_named(network):
    model = SMALL[network](tables("mult"))
    dense, ids = batch(5)
    with pytest.raises(ValueError, match=r"dense has shape \(5, 2\) but must be \[B, 3\]"):
        model(dense[:, :2], ids)
    with pytest.raises(ValueError, match=r"gave shape \(5, 4, 4\) but must give 16 columns \(4 .*\) for each of the 3"):
        model(dense[:3], ids)
    with pytest.raises(ValueError, match=r"gave shape \(5, 3, 4\) but must give 16 columns"):
        model.logits(dense, torch.zeros(5, 3, 4))


def wrong_sizes(build: type[nn.Module], hidden: str) -> list[Case]:
    plain = Plain((4, 4, 4, 4))
    return [
        (lambda: build(plain), ValueError, r"embedding_dims must be given: embeddings \(Plain\) does not say its own"),
        (lambda: build(plain, embedding_dims=(4, 0)), ValueError, r"embedding_dims \(\(4, 0\)\) must be one or more"),
        (lambda: build(tables("full"), num_dense=-1), ValueError, r"num_dense \(-1\) must be at least 0"),
        (lambda: build(tables("full"), **{hidden: ()}), ValueError, rf"{hidden} \(\(\)\) must have at least one layer"),
        (lambda: build(tables("full"), **{hidden: (4, 0)}), ValueError, r"sizes \(.*\) must all be at least 1"),
    ]


dcn, dlrm = partial(models.DCN, nn.Identity()), partial(models.DLRM, nn.Identity())
test_wrong_sizes_are_named = refused(
    *wrong_sizes(models.DCN, "deep"),
    *wrong_sizes(models.DLRM, "top"),
    (lambda: dcn(embedding_dims=(4,), num_cross=0), ValueError, r"num_cross \(0\) must be at least 1"),
    (lambda: dlrm(embedding_dims=(4, 8)), ValueError, r"embedding_dims \(\(4, 8\)\) must all be equal: DLRM takes"),
    (lambda: dlrm(embedding_dims=(4,), num_dense=0), ValueError, r"num_dense \(0\) must be at least 1 for a single"),
)


def test_layers_start_with_glorot_variance():
    torch.manual_seed(0)
    layers = mlp((300, 2000, 500))
    init_layers_(layers)
    for layer in (layers[0], layers[2]):
        ins, outs = layer.in_features, layer.out_features
        for values, variance in ((layer.weight, 2 / (ins + outs)), (layer.bias, 1 / outs)):
            n = values.numel()
            assert abs(values.mean()) < 5 * sqrt(variance / n)
            assert abs(values.var() / variance - 1) < 5 * sqrt(2 / n)
