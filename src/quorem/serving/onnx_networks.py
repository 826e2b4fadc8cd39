"""DLRM, DCN (section 5.1) and DeepFM as ONNX nodes: from dense features and looked-up vectors to logits."""

import torch
from torch import Tensor, nn

from ..collection import EmbeddingCollection
from ..models import DCN, DLRM, DeepFM
from ..models.network import Network
from .onnx_graph import Graph, Value


def logits(graph: Graph, model: Network, dense: Value, vectors: Value) -> Value:
    """Add the layers of a network; returns logits ``[B]`` of dense features and vectors ``[B, sum D]``."""
    if not isinstance(model.embeddings, EmbeddingCollection):  # one table, whose vectors are ``[B F, D]``
        vectors = graph.op("Reshape", vectors, [-1, sum(model.embedding_dims)])
    if isinstance(model, DLRM):
        output = _dlrm(graph, model, dense, vectors)
    elif isinstance(model, DCN):
        output = _dcn(graph, model, dense, vectors)
    else:
        assert isinstance(model, DeepFM)
        output = _deepfm(graph, model, dense, vectors)
    return graph.op("Reshape", output, [-1])


def _dlrm(graph: Graph, model: DLRM, dense: Value, vectors: Value) -> Value:
    stacked = graph.op("Reshape", vectors, [0, len(model.embedding_dims), model.embedding_dim])
    beside = []
    if model.num_dense:
        low = _layers(graph, model.bottom, dense, "bottom")
        stacked = graph.op("Concat", graph.op("Unsqueeze", low, [1]), stacked, axis=1)
        beside = [dense if model.raw_dense else low]
    products = graph.op("MatMul", stacked, graph.op("Transpose", stacked, perm=[0, 2, 1]))
    flat = graph.op("Reshape", products, [0, model.num_vectors**2])
    dots = graph.op("Gather", flat, model.pairs.tolist(), axis=1)
    features = graph.op("Concat", *beside, dots, axis=1) if beside else dots
    top = _layers(graph, model.top, features, "top")
    return _linear(graph, model.output, top, "output")


def _dcn(graph: Graph, model: DCN, dense: Value, vectors: Value) -> Value:
    """The cross layers are folded as in ``models.DCN``, and their constants computed beforehand."""
    x0 = graph.op("Concat", dense, vectors, axis=1)
    width = model.cross_weight.shape[1]
    to_cross, to_deep = model.output.weight.detach()[0].split([width, model.output.in_features - width])
    weights = torch.cat([model.cross_weight.detach(), to_cross[None]]).double()
    shifts = (weights @ model.cross_bias.detach().double().mT).tril(-1).sum(1).tolist()
    product = graph.op("MatMul", x0, _weight(graph, "cross", weights.mT))
    *dots, last = graph.split(product, len(weights), axis=1)
    a = graph.constant(1.0)
    for dot, shift in zip(dots, shifts, strict=False):
        a = a * (dot + 1.0) + shift
    cross = a * last + (shifts[-1] + float(model.output.bias.detach()))
    return cross + graph.op(
        "MatMul", _layers(graph, model.deep, x0, "deep"), _weight(graph, "to_deep", to_deep[:, None])
    )


def _deepfm(graph: Graph, model: DeepFM, dense: Value, vectors: Value) -> Value:
    """The sum over pairs is computed from the sum of all vectors and the sum of their squares."""
    features = graph.op("Concat", dense, vectors, axis=1)
    stacked = graph.op("Reshape", vectors, [0, len(model.embedding_dims), model.embedding_dim])
    total = graph.op("ReduceSum", stacked, [1], keepdims=0)
    squares = graph.op("ReduceSum", vectors * vectors, [1], keepdims=1)
    if model.num_dense:
        dense_vectors = model.dense_vectors.detach()
        total = total + graph.op("MatMul", dense, _weight(graph, "dense_vectors", dense_vectors))
        lengths = _weight(graph, "dense_squares", dense_vectors.double().square().sum(1, keepdim=True))
        squares = squares + graph.op("MatMul", dense * dense, lengths)
    pairs = (graph.op("ReduceSum", total * total, [1], keepdims=1) - squares) * 0.5
    deep = graph.op("Concat", features, _layers(graph, model.deep, features, "deep"), axis=1)
    return _linear(graph, model.output, deep, "output") + pairs


def _layers(graph: Graph, layers: nn.Sequential, value: Value, name: str) -> Value:
    for i, layer in enumerate(layers):
        value = _linear(graph, layer, value, f"{name}_{i}") if isinstance(layer, nn.Linear) else graph.op("Relu", value)
    return value


def _linear(graph: Graph, layer: nn.Linear, value: Value, name: str) -> Value:
    weight, bias = _weight(graph, f"{name}_weight", layer.weight), _weight(graph, f"{name}_bias", layer.bias)
    return graph.op("Gemm", value, weight, bias, transB=1)


def _weight(graph: Graph, name: str, values: Tensor) -> Value:
    return graph.weight(name, [values.detach().to(graph.compute)])
