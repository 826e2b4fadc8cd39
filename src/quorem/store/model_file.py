"""``quorem.save``, and ``load`` for its files: a module or a network in one file, without pickle.

The description names the class and its options; the tensors have the names of ``state_dict``. Loading builds the module
on the meta device, compares names and shapes with the file, and only then maps the file as its parameters.
"""

import os
from typing import Any

from torch import nn

from ..bags import EmbeddingBag
from ..checks import dtype_name
from ..collection import EmbeddingCollection
from ..embeddings import Embedding
from ..models import DCN, DLRM, DeepFM
from ..provenance import versions
from ..tables import Tables
from ..tensor_file import FileKind, TensorFile, write_tensors
from . import description
from .loader import OPTIONS, Loader

KIND = FileKind("quorem-model", 1)


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a module or a network to one file for ``load``, atomically.

    The file is in the safetensors format: tensors by the names of ``state_dict``, and a description in its header.

    Args:
        model: ``Embedding``, ``EmbeddingBag``, ``EmbeddingCollection``, or a network of ``models``.
        path: path of the file; an existing file is replaced.

    Raises:
        TypeError: if the model is of another class. Save its ``state_dict`` instead, or its modules one by one.
        OSError: if the disk is full; an existing file is kept.

    >>> import quorem, tempfile
    >>> path = tempfile.mkdtemp() + "/user.quorem"
    >>> table = quorem.Embedding(1000, 16, quorem.QR(4))
    >>> save(table, path)
    >>> bool((load(path).to_dense() == table.to_dense()).all())
    True
    """
    values = _described(model)
    values["frozen"] = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    values["versions"] = versions()
    tables = tables_in(model)
    tensors = description.maps_of(tables) | {name: tensor.detach() for name, tensor in model.state_dict().items()}
    by_width = sorted(tensors.items(), key=lambda item: -item[1].itemsize)  # stable: tables stay together
    write_tensors(path, KIND, dict(by_width), values)


def load(path: str | os.PathLike[str], *, table: str | None = None, verify: bool = True) -> nn.Module:
    """The module or network that ``save`` wrote.

    Its parameters are views of the mapped file; memory is copied only where they are written to.

    Args:
        path: path of the file.
        table: load only this table of a collection, as an ``Embedding``.
        verify: compare every tensor with its checksum, which reads the file once; False maps the file and reads
            nothing.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is cut off, damaged, of another kind or of an unknown version, or has no such table.
    """
    file = TensorFile(path, KIND)
    try:
        loader = Loader(file, verify)
        return loader.model() if table is None else loader.table(table)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # torch raises the last two for absurd sizes
        text = str(error).partition("\n")[0]  # torch appends a stack trace
        raise ValueError(text if str(file.path) in text else f"{file.path} is damaged: {text}") from None


def tables_in(model: nn.Module) -> Tables:
    """The tables of a model whose class ``save`` accepts.

    Raises:
        TypeError: if the model is of another class.
    """
    tables = model.embeddings if type(model) in (DLRM, DCN, DeepFM) else model
    if type(tables) not in (Embedding, EmbeddingBag, EmbeddingCollection):
        known = "Embedding, EmbeddingBag, EmbeddingCollection, or a DLRM, DCN or DeepFM around one of these"
        raise TypeError(f"model ({type(tables).__name__}) must be an {known}")
    assert isinstance(tables, Tables)
    return tables


def _described(model: nn.Module) -> dict[str, Any]:
    """The class of a model and its options, as JSON values."""
    tables = tables_in(model)
    values: dict[str, Any] = {"type": type(tables).__name__}
    values |= {"sparse": tables.sparse, "on_invalid_id": tables.on_invalid_id}
    values |= {"bits": tables.bits, "dtype": dtype_name(tables.dtype)}
    values["tables"] = [description.of_table(tables, t) for t in range(len(tables.specs))]
    values |= {name: getattr(tables, name) for name in OPTIONS[values["type"]]}
    if isinstance(model, DLRM):
        options = {"raw_dense": model.raw_dense, "bottom": _widths(model.bottom)[:-1], "top": _widths(model.top)}
    elif isinstance(model, DCN):
        options = {"deep": _widths(model.deep), "num_cross": len(model.cross_weight)}
    elif isinstance(model, DeepFM):
        options = {"deep": _widths(model.deep)}
    else:
        return values
    sizes = {"num_dense": model.num_dense, "embedding_dims": list(model.embedding_dims)}
    return {"type": type(model).__name__, **sizes, **options, "embeddings": values}


def _widths(layers: nn.Module) -> list[int]:
    return [layer.out_features for layer in layers.modules() if isinstance(layer, nn.Linear)]
