"""The inputs and outputs of an exported model, the same for ONNX, ``torch.export`` and AOTInductor."""

from typing import Literal, NamedTuple, get_args

import torch
from torch import nn

from ..bags import EmbeddingBag
from ..collection import EmbeddingCollection
from ..models.network import Network
from ..store.model_file import tables_in
from ..tables import Tables

UnknownVector = Literal["nan", "zeros"]  # the vector of an id outside its table


class Input(NamedTuple):
    """One input; a string in its shape names a size that may change from batch to batch."""

    name: str
    dtype: torch.dtype
    shape: list[int | str]


def inputs_of(model: nn.Module, unknown: str, jagged: bool, sample_weights: bool) -> list[Input]:
    """The inputs of an exported model in order: dense features, ids, offsets and sample weights.

    Raises:
        TypeError: if ``save`` does not accept the class of the model.
        ValueError: if an option does not fit the model.
    """
    tables = tables_in(model)
    if unknown not in get_args(UnknownVector):
        raise ValueError(f"unknown ({unknown!r}) must be {' or '.join(map(repr, get_args(UnknownVector)))}")
    pools = isinstance(tables, EmbeddingBag) or (isinstance(tables, EmbeddingCollection) and jagged)
    if jagged and not pools:
        raise ValueError(f"jagged ({jagged}) must be False for {type(tables).__name__}, which does not pool")
    if sample_weights and (not pools or tables.mode == "max"):
        raise ValueError(f"sample_weights ({sample_weights}) must be False: nothing is pooled by a weighted sum")
    shape: list[int | str] = ["batch"]
    if jagged:
        shape = ["values"]
    elif isinstance(tables, EmbeddingBag):
        shape = ["batch", "length"]
    elif isinstance(tables, EmbeddingCollection):
        shape = ["batch", len(tables.features)]
    elif isinstance(model, Network):  # all columns are ids of the only table
        shape = ["batch", len(model.embedding_dims)]
    inputs = [Input(tables.ids_argument, torch.int64, shape)]
    if isinstance(model, Network):
        inputs.insert(0, Input("dense", compute_dtype(tables), ["batch", model.num_dense]))
    if jagged:
        inputs.append(Input("offsets", torch.int64, ["offsets"]))
    if sample_weights:
        inputs.append(Input("per_sample_weights", compute_dtype(tables), shape))
    return inputs


def compute_dtype(tables: Tables) -> torch.dtype:
    """The dtype of an exported computation: float64 for tables in float64, else float32."""
    return torch.float64 if tables.dtype == torch.float64 else torch.float32


def output_shape(tables: Tables) -> list[int]:
    """The shape of a module's output without the batch dimension."""
    if isinstance(tables, EmbeddingCollection):
        dims = tables.embedding_dims
        return [len(dims), dims[0]] if len(set(dims)) == 1 else [sum(dims)]
    return list(tables.specs[0].vector_shape)
