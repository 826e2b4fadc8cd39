"""What ``quorem export`` writes: a module or a network with named inputs and outputs, for any batch size."""

import os
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim

from ..models.network import Network
from ..modules.bag import EmbeddingBag
from ..modules.collection import EmbeddingCollection
from ..modules.lookup import Tables
from .export import Format, UnknownVector, export

ROWS = 3  # rows of the example that is traced


class Named(nn.Module):
    """A module whose output is ``vectors``, or a network that gives ``logits`` and ``probabilities``.

    Args:
        model: the module or network.
        is_network: which of them it is.
        skips_offsets: whether the last input is sample weights although there are no offsets.
    """

    def __init__(self, model: nn.Module, is_network: bool, skips_offsets: bool) -> None:
        super().__init__()
        self.model, self.is_network, self.skips_offsets = model, is_network, skips_offsets

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Outputs by name."""
        arguments = (*inputs[:-1], None, inputs[-1]) if self.skips_offsets else inputs
        output = self.model(*arguments)
        return {"logits": output, "probabilities": output.sigmoid()} if self.is_network else {"vectors": output}


def export_named(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    num_dense: int | None = None,
    format: Format | None = None,
    unknown: UnknownVector = "nan",
    jagged: bool = False,
    sample_weights: bool = False,
) -> None:
    """Write a module or a network with named inputs and outputs (``docs/serve.md`` lists them).

    Args:
        model: ``Embedding``, ``EmbeddingBag``, ``EmbeddingCollection``, or a network that takes dense features and then
            the inputs of its only module of tables.
        path: as in ``export``.
        num_dense: number of dense features of a network of your own; None for other models.
        format: as in ``export``.
        unknown: as in ``export``.
        jagged: bags of any length, given by offsets.
        sample_weights: add ``per_sample_weights`` as an input.

    Raises:
        ValueError: if an option does not fit the model, or for a reason that ``export`` lists.
    """
    found = [module for module in model.modules() if isinstance(module, Tables)]
    if len(found) != 1:
        raise ValueError(f"model ({type(model).__name__}) has {len(found)} modules of tables but must have one")
    tables, features = found[0], len(found[0].features)
    num_dense = model.num_dense if isinstance(model, Network) else num_dense
    is_network = num_dense is not None
    pools = isinstance(tables, EmbeddingBag) or (isinstance(tables, EmbeddingCollection) and jagged)
    if jagged and not pools:
        raise ValueError(f"jagged ({jagged}) must be False for {type(tables).__name__}, which does not pool")
    if sample_weights and (not pools or tables.mode == "max"):
        raise ValueError(f"sample_weights ({sample_weights}) must be False: nothing is pooled by a weighted sum")
    batch, dtype, device = Dim("batch"), torch.promote_types(tables.dtype, torch.float32), tables.live_stored.device
    around_one = isinstance(model, Network) and not isinstance(tables, EmbeddingCollection)  # all columns are its ids
    columns = len(cast(Network, model).embedding_dims) if around_one else features
    shape, sizes = _shape_of_ids(tables, jagged, is_network, columns, batch)
    inputs: dict[str, tuple[Tensor, dict[int, Any]]] = {}
    if num_dense is not None:
        inputs["dense"] = torch.zeros(ROWS, num_dense, dtype=dtype, device=device), {0: batch}
    inputs[tables.ids_argument] = torch.zeros(shape, dtype=torch.int64, device=device), sizes
    if jagged:
        last = int(not isinstance(tables, EmbeddingBag) or tables.include_last_offset)
        length: Any = Dim("offsets")
        if is_network:  # else a size of its own: AOTInductor rounds when it computes the batch size from a derived one
            length = batch if (features, last) == (1, 0) else features * batch + last
        inputs["offsets"] = torch.zeros(features * ROWS + last, dtype=torch.int64, device=device), {0: length}
    if sample_weights:
        inputs["per_sample_weights"] = torch.zeros(shape, dtype=dtype, device=device), sizes
    export(
        Named(model, is_network, sample_weights and not jagged),
        [tensor for tensor, _ in inputs.values()],
        path,
        format=format,
        dynamic_shapes=(tuple(each for _, each in inputs.values()),),
        unknown=unknown,
        input_names=list(inputs),
        output_names=["logits", "probabilities"] if is_network else ["vectors"],
    )


def _shape_of_ids(
    tables: Tables, jagged: bool, is_network: bool, columns: int, batch: Any
) -> tuple[list[int], dict[int, Any]]:
    """The shape of the example's ids, and their sizes that may change."""
    if jagged:
        return [2 * ROWS], {0: Dim("values")}
    if isinstance(tables, EmbeddingBag):
        return [ROWS, ROWS + 1], {0: batch, 1: Dim("length")}
    if isinstance(tables, EmbeddingCollection) or is_network:
        return [ROWS, columns], {0: batch}
    return [ROWS], {0: batch}
