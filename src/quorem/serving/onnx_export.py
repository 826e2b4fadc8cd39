"""Export a module or a network as an ONNX model."""

import os
from collections.abc import Mapping

import torch
from torch import nn

from ..bags import EmbeddingBag
from ..collection import EmbeddingCollection
from ..models.network import Network
from ..store.model_file import tables_in
from .onnx_graph import EXTERNAL_BYTES, OPSET, Graph, Value
from .onnx_networks import logits
from .onnx_tables import TableNodes
from .signature import UnknownVector, compute_dtype, inputs_of, output_shape


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

    | model                 | inputs                                                  | outputs                       |
    |-----------------------|---------------------------------------------------------|-------------------------------|
    | `Embedding`           | `input [N]`                                             | `vectors [N, D]`              |
    | `EmbeddingBag`        | `input [B, L]`; jagged: `input [V]`, `offsets`          | `vectors [B, D]`              |
    | `EmbeddingCollection` | `ids [B, F]`; jagged: `ids [V]`, `offsets`              | `vectors`, as the module's    |
    | `DLRM, DCN, DeepFM`   | `dense [B, num_dense]`, then as the collection          | `logits, probabilities [B]`   |

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

    >>> import onnx, quorem, tempfile
    >>> path = tempfile.mkdtemp() + "/users.onnx"
    >>> export_onnx(quorem.Embedding(1000, 16, quorem.QR(4)), path)
    >>> graph = onnx.load(path).graph
    >>> graph.input[0].name, graph.output[0].name
    ('input', 'vectors')
    """
    inputs, tables = inputs_of(model, unknown, jagged, sample_weights), tables_in(model)
    with torch.no_grad():
        graph = Graph(compute_dtype(tables))
        values = {each.name: graph.input(*each) for each in inputs}
        vectors = _vectors(TableNodes(graph, tables, unknown), values)
        if isinstance(model, Network):
            scores = logits(graph, model, values["dense"], vectors)
            graph.output("logits", scores, ["batch"])
            graph.output("probabilities", graph.op("Sigmoid", scores), ["batch"])
        else:
            shape = output_shape(tables)
            graph.output("vectors", graph.op("Reshape", vectors, [0, *shape]), ["batch", *shape])
        about = {"quorem.model": type(model).__name__, "quorem.unknown": unknown, "quorem.opset": str(OPSET)}
        graph.write(path, metadata=about, external_bytes=external_bytes)


def _vectors(nodes: TableNodes, values: Mapping[str, Value]) -> Value:
    """The vectors ``[B, sum W]`` of the graph's inputs."""
    tables, graph, weights = nodes.tables, nodes.graph, values.get("per_sample_weights")
    ids, offsets = values[tables.ids_argument], values.get("offsets")
    if offsets is not None:
        if isinstance(tables, EmbeddingBag) and not tables.include_last_offset:
            offsets = graph.op("Concat", offsets, graph.op("Shape", ids), axis=0)
        return nodes.bag(ids, offsets, weights)
    if isinstance(tables, EmbeddingBag):
        return nodes.bag_of_rows(ids, weights)
    return nodes.lookup(ids if isinstance(tables, EmbeddingCollection) else graph.op("Reshape", ids, [-1, 1]))
