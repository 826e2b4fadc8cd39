"""Export a module or a network as an ONNX model."""

import os

import torch
from torch import nn

from ..bags import EmbeddingBag
from ..collection import EmbeddingCollection
from ..embeddings import Embedding
from ..models.network import Network
from ..store.model_file import tables_in
from .groups import UnknownVector, check_options, output_shape
from .onnx_graph import EXTERNAL_BYTES, OPSET, Graph
from .onnx_networks import NetworkNodes
from .onnx_tables import TableNodes


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    unknown: UnknownVector = "nan",
    jagged: bool = False,
    sample_weights: bool = False,
    external_bytes: int = EXTERNAL_BYTES,
) -> None:
    """Write a model as an ONNX graph of plain operators (opset 18), for any batch size.

    ==================== ========================================================= ===========================
    model                inputs                                                    outputs
    ==================== ========================================================= ===========================
    Embedding            input ``[N]``                                             vectors ``[N, D]``
    EmbeddingBag         input ``[B, L]``, or jagged: input ``[V]``, offsets       vectors ``[B, D]``
    EmbeddingCollection  ids ``[B, F]``, or jagged: ids ``[V]``, offsets           vectors, as the module gives
    DLRM, DCN, DeepFM    dense ``[B, num_dense]``, then as the collection          logits, probabilities ``[B]``
    ==================== ========================================================= ===========================

    Ids are int64. Vectors of bags are composed, then pooled; ``offsets`` is as in the module's ``forward``. Tables in
    half precision are stored so, but computation and outputs are in float32 (float64 for float64 tables).

    Args:
        model: a module or network that ``save`` accepts.
        path: path of the ``.onnx`` file; an existing file is replaced.
        unknown: the vector of an id outside its table, since a graph cannot raise: ``"nan"``, so that the score is NaN
            and the error shows; or ``"zeros"``, with which the id is left out of a bag, as on a GPU.
        jagged: bags of any length, given by offsets.
        sample_weights: add ``per_sample_weights`` as an input.
        external_bytes: if the weights have at least this many bytes, they are written to a second file beside it.

    Raises:
        TypeError: if ``save`` does not accept the class of the model.
        ValueError: if an option does not fit the model.
        OSError: if the disk is full; an existing file is kept.
    """
    tables = tables_in(model)
    check_options(model, unknown, jagged, sample_weights)
    with torch.no_grad():
        graph = Graph()
        nodes = TableNodes(graph, tables, unknown)
        if isinstance(model, Network):
            dense = graph.input("dense", nodes.compute, ["batch", model.num_dense])
            vectors = _vectors(graph, nodes, jagged, sample_weights, len(model.embedding_dims))
            layers = NetworkNodes(graph, nodes.compute)
            logits = layers.logits(model, dense, vectors)
            graph.output("logits", logits, nodes.compute, ["batch"])
            graph.output("probabilities", graph.op("Sigmoid", logits), nodes.compute, ["batch"])
        else:
            vectors = _vectors(graph, nodes, jagged, sample_weights)
            vectors = graph.op("Reshape", vectors, graph.constant([0, *output_shape(tables)]))
            graph.output("vectors", vectors, nodes.compute, ["batch", *output_shape(tables)])
        about = {"quorem.model": type(model).__name__, "quorem.unknown": unknown, "quorem.opset": str(OPSET)}
        graph.write(path, metadata=about, external_bytes=external_bytes)


def _vectors(graph: Graph, nodes: TableNodes, jagged: bool, sample_weights: bool, columns: int | None = None) -> str:
    """Add the inputs of ids; returns their vectors ``[B, sum W]``.

    A network with a single ``Embedding`` has ids with several ``columns``, all for that table.
    """
    tables = nodes.tables
    name = tables.ids_argument
    if isinstance(tables, EmbeddingBag):
        shape = ["values"] if jagged else ["batch", "length"]
        ids = graph.input(name, torch.int64, shape)
        offsets = _offsets(graph, ids, tables.include_last_offset) if jagged else None
        weights = graph.input("per_sample_weights", nodes.compute, shape) if sample_weights else None
        if offsets is None:
            return nodes.bag_of_rows(ids, weights, tables.mode)
        return nodes.bag(ids, offsets, weights, tables.mode)
    if isinstance(tables, Embedding):
        ids = graph.input(name, torch.int64, ["batch"] if columns is None else ["batch", columns])
        vectors = nodes.lookup(graph.op("Reshape", ids, graph.constant([-1, 1])))
        return (
            vectors
            if columns is None
            else str(graph.op("Reshape", vectors, graph.constant([-1, columns * tables.embedding_dim])))
        )
    assert isinstance(tables, EmbeddingCollection)
    if not jagged:
        return nodes.lookup(graph.input(name, torch.int64, ["batch", len(tables.features)]))
    ids = graph.input(name, torch.int64, ["values"])
    offsets = graph.input("offsets", torch.int64, ["offsets"])
    weights = graph.input("per_sample_weights", nodes.compute, ["values"]) if sample_weights else None
    return nodes.bag(ids, offsets, weights, tables.mode)


def _offsets(graph: Graph, ids: str, include_last: bool) -> str:
    """Add the input ``offsets`` of an ``EmbeddingBag``; returns offsets that end with the number of ids."""
    offsets = graph.input("offsets", torch.int64, ["offsets"])
    return offsets if include_last else str(graph.op("Concat", offsets, graph.op("Shape", ids), axis=0))
