"""DLRM, DCN (section 5.1) and DeepFM as ONNX nodes: from dense features and looked-up vectors to logits."""

import torch
from torch import Tensor, nn

from ..models import DCN, DLRM, DeepFM
from ..models.network import Network
from .onnx_graph import Graph


class NetworkNodes:
    """The layers of a network as nodes of a graph.

    Args:
        graph: the graph to which nodes are added.
        compute: dtype of the layers, float32 or float64.
    """

    def __init__(self, graph: Graph, compute: torch.dtype) -> None:
        self.graph, self.compute = graph, compute

    def logits(self, model: Network, dense: str, vectors: str) -> str:
        """Logits ``[B]`` of a network, from dense features and vectors ``[B, sum D]``."""
        if isinstance(model, DLRM):
            return self.dlrm(model, dense, vectors)
        if isinstance(model, DCN):
            return self.dcn(model, dense, vectors)
        assert isinstance(model, DeepFM)
        return self.deepfm(model, dense, vectors)

    def dlrm(self, model: DLRM, dense: str, vectors: str) -> str:
        """Logits ``[B]`` of dense features and vectors ``[B, sum D]``."""
        graph = self.graph
        stacked = graph.op("Reshape", vectors, graph.constant([0, len(model.embedding_dims), model.embedding_dim]))
        beside = []
        if model.num_dense:
            low = self._layers(model.bottom, dense, "bottom")
            stacked = graph.op("Concat", graph.op("Unsqueeze", low, graph.constant([1])), stacked, axis=1)
            beside = [dense if model.raw_dense else low]
        products = graph.op("MatMul", stacked, graph.op("Transpose", stacked, perm=[0, 2, 1]))
        flat = graph.op("Reshape", products, graph.constant([0, model.num_vectors**2]))
        dots = graph.op("Gather", flat, graph.constant(model.pairs.tolist()), axis=1)
        features = graph.op("Concat", *beside, dots, axis=1) if beside else dots
        top = self._layers(model.top, features, "top")
        return self._flat(self._linear(model.output, top, "output"))

    def dcn(self, model: DCN, dense: str, vectors: str) -> str:
        """Logits ``[B]``; the cross layers are folded as in ``models.DCN``, and their constants computed beforehand."""
        graph, num_cross = self.graph, len(model.cross_weight)
        x0 = graph.op("Concat", dense, vectors, axis=1)
        width = model.cross_weight.shape[1]
        to_cross, to_deep = model.output.weight.detach()[0].split([width, model.output.in_features - width])
        weights = torch.cat([model.cross_weight.detach(), to_cross[None]]).double()
        shifts = (weights @ model.cross_bias.detach().double().mT).tril(-1).sum(1).tolist()
        product = graph.op("MatMul", x0, self._weight("cross", weights.mT))
        *dots, last = graph.op("Split", product, outputs=num_cross + 1, axis=1, num_outputs=num_cross + 1)
        one = graph.scalar(1.0, self.compute)
        a = one
        for dot, shift in zip(dots, shifts, strict=False):
            a = graph.op("Mul", a, graph.op("Add", dot, one))
            a = graph.op("Add", a, graph.scalar(shift, self.compute))
        bias = shifts[-1] + float(model.output.bias.detach())
        cross = graph.op("Add", graph.op("Mul", a, last), graph.scalar(bias, self.compute))
        deep = graph.op("MatMul", self._layers(model.deep, x0, "deep"), self._weight("to_deep", to_deep[:, None]))
        return self._flat(graph.op("Add", cross, deep))

    def deepfm(self, model: DeepFM, dense: str, vectors: str) -> str:
        """Logits ``[B]``; the sum over pairs is computed from the sum of all vectors and the sum of their squares."""
        graph = self.graph
        features = graph.op("Concat", dense, vectors, axis=1)
        stacked = graph.op("Reshape", vectors, graph.constant([0, len(model.embedding_dims), model.embedding_dim]))
        total = graph.op("ReduceSum", stacked, graph.constant([1]), keepdims=0)
        squares = graph.op("ReduceSum", graph.op("Mul", vectors, vectors), graph.constant([1]), keepdims=1)
        if model.num_dense:
            own = model.dense_vectors.detach()
            total = graph.op("Add", total, graph.op("MatMul", dense, self._weight("dense_vectors", own)))
            lengths = self._weight("dense_squares", own.double().square().sum(1, keepdim=True))
            squares = graph.op("Add", squares, graph.op("MatMul", graph.op("Mul", dense, dense), lengths))
        lengths_of_sum = graph.op("ReduceSum", graph.op("Mul", total, total), graph.constant([1]), keepdims=1)
        pairs = graph.op("Mul", graph.op("Sub", lengths_of_sum, squares), graph.scalar(0.5, self.compute))
        deep = graph.op("Concat", features, self._layers(model.deep, features, "deep"), axis=1)
        return self._flat(graph.op("Add", self._linear(model.output, deep, "output"), pairs))

    def _layers(self, layers: nn.Sequential, value: str, name: str) -> str:
        for i, layer in enumerate(layers):
            if isinstance(layer, nn.Linear):
                value = self._linear(layer, value, f"{name}_{i}")
            else:
                value = self.graph.op("Relu", value)
        return value

    def _linear(self, layer: nn.Linear, value: str, name: str) -> str:
        weight, bias = self._weight(f"{name}_weight", layer.weight), self._weight(f"{name}_bias", layer.bias)
        return str(self.graph.op("Gemm", value, weight, bias, transB=1))

    def _weight(self, name: str, values: Tensor) -> str:
        return self.graph.weight(name, [values.detach().to(self.compute)])

    def _flat(self, value: str) -> str:
        return str(self.graph.op("Reshape", value, self.graph.constant([-1])))
