"""``quorem.save``, and ``load`` for its files: a module or a network in one file, without pickle.

The file has the model's parameters by name, lists of ids, and a description of the classes and their options. Loading
builds the model on the meta device, compares names and shapes with the file, and only then maps the file as its
parameters.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..checks import FLOAT_DTYPES, InvalidIdMode, dtype_name
from ..models import DCN, DLRM, DeepFM
from ..modules.bag import EmbeddingBag
from ..modules.collection import EmbeddingCollection, Table
from ..modules.embedding import Embedding
from ..modules.lookup import Tables
from ..modules.quantize import quantize_
from .checked_json import build
from .provenance import versions
from .saved_table import Known, SavedTable, description_of, lists_of, ranks_of, spec_of
from .tensors import FileKind, TensorFile, write_tensors

KIND = FileKind("quorem-model", 1)
NETWORKS = {"DLRM": DLRM, "DCN": DCN, "DeepFM": DeepFM}


@dataclass(frozen=True, kw_only=True)
class SavedTables:
    """The module that holds the tables: its class and options, None where it has no such option."""

    type: Literal["Embedding", "EmbeddingBag", "EmbeddingCollection"]
    sparse: bool
    on_invalid_id: InvalidIdMode
    bits: Literal[0, 8, 4]
    dtype: Literal["float32", "float64", "bfloat16", "float16"]
    tables: tuple[SavedTable, ...]
    mode: Literal["sum", "mean", "max"] | None = None
    include_last_offset: bool | None = None


@dataclass(frozen=True, kw_only=True)
class SavedNetwork:
    """The network around the tables: its class and the options of its constructor, None where it has no such option."""

    type: Literal["DLRM", "DCN", "DeepFM"]
    num_dense: int
    embedding_dims: tuple[int, ...]
    raw_dense: bool | None = None
    bottom: tuple[int, ...] | None = None
    top: tuple[int, ...] | None = None
    deep: tuple[int, ...] | None = None
    num_cross: int | None = None


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """The description of a file."""

    embeddings: SavedTables
    network: SavedNetwork | None
    frozen: tuple[str, ...]  # names of the parameters that are not trained
    versions: dict[str, str]


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a module or a network to one file for ``load``, atomically.

    The file is in the safetensors format: parameters by name, and a description in its header.

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
    tables = tables_in(model)
    parameters = dict(model.named_parameters())
    frozen = tuple(name for name, parameter in parameters.items() if not parameter.requires_grad)
    described = SavedModel(
        embeddings=_tables_described(tables),
        network=None if model is tables else _network_described(model),
        frozen=frozen,
        versions=versions(),
    )
    write_tensors(path, KIND, {**parameters, **lists_of(tables)}, asdict(described))


def load(path: str | os.PathLike[str], *, verify: bool = True) -> nn.Module:
    """The module or network that ``save`` wrote.

    Its parameters are views of the mapped file; memory is copied only where they are written to.

    Args:
        path: path of the file.
        verify: compare every tensor with its checksum, which reads the file once; False maps the file and reads
            nothing.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is cut off, damaged, or of another kind or version.
    """
    file = TensorFile(path, KIND)
    if verify:
        file.verify()
    try:
        return _model(build(SavedModel, file.description), file.tensors)
    except (ValueError, TypeError, RuntimeError, OverflowError, MemoryError) as error:  # the last three: absurd sizes
        text = str(error).partition("\n")[0]  # torch appends a stack trace
        raise ValueError(f"{file.path} is damaged: {text}") from None


def tables_in(model: nn.Module) -> Tables:
    """The tables of a model whose class ``save`` accepts.

    Raises:
        TypeError: if the model is of another class.
    """
    tables = model.embeddings if type(model) in NETWORKS.values() else model
    if type(tables) not in (Embedding, EmbeddingBag, EmbeddingCollection):
        known = "Embedding, EmbeddingBag, EmbeddingCollection, or a DLRM, DCN or DeepFM around one of these"
        raise TypeError(f"model ({type(tables).__name__}) must be an {known}")
    assert isinstance(tables, Tables)
    return tables


def _tables_described(tables: Tables) -> SavedTables:
    return SavedTables(
        type=cast(Any, type(tables).__name__),
        sparse=tables.sparse,
        on_invalid_id=tables.on_invalid_id,
        bits=cast(Any, tables.bits),
        dtype=cast(Any, dtype_name(tables.dtype)),
        tables=tuple(description_of(tables, t) for t in range(len(tables.specs))),
        mode=getattr(tables, "mode", None),
        include_last_offset=getattr(tables, "include_last_offset", None),
    )


def _network_described(model: Any) -> SavedNetwork:
    options: dict[str, Any] = {}
    if isinstance(model, DLRM):
        options = {"raw_dense": model.raw_dense, "bottom": _widths(model.bottom)[:-1], "top": _widths(model.top)}
    elif isinstance(model, DCN):
        options = {"deep": _widths(model.deep), "num_cross": len(model.cross_weight)}
    else:
        options = {"deep": _widths(model.deep)}
    sizes: dict[str, Any] = {"num_dense": model.num_dense, "embedding_dims": tuple(model.embedding_dims)}
    return SavedNetwork(type=cast(Any, type(model).__name__), **sizes, **options)


def _widths(layers: nn.Module) -> tuple[int, ...]:
    return tuple(layer.out_features for layer in layers.modules() if isinstance(layer, nn.Linear))


def _model(saved: SavedModel, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The model, whose parameters are ``tensors``; raises ValueError unless it has these names and shapes."""
    tables = _empty_tables(saved.embeddings, tensors)
    model: nn.Module = tables if saved.network is None else _network(saved.network, tables, "meta")
    _check(dict(model.named_parameters()), lists_of(tables), tensors)
    if saved.network is not None:  # again, for its buffers; its initial values are replaced below
        with torch.random.fork_rng(devices=[]):
            model = _network(saved.network, tables, None)
    for name, _ in list(model.named_parameters()):
        _assign(model, name, tensors[name], name not in saved.frozen)
    tables.register_integers()
    return model


def _empty_tables(saved: SavedTables, tensors: Mapping[str, Tensor]) -> Tables:
    """The module of the tables, on the meta device."""
    options: dict[str, Any] = {"sparse": saved.sparse, "on_invalid_id": saved.on_invalid_id}
    options |= {"dtype": FLOAT_DTYPES[saved.dtype], "device": "meta"}
    options |= {name: v for name in ("mode", "include_last_offset") if (v := getattr(saved, name)) is not None}
    arguments: list[dict[str, Any]] = []
    for t, table in enumerate(saved.tables):
        spec = spec_of(table, t, tensors)
        own = {name: getattr(table, name) for name in ("num_embeddings", "embedding_dim", "padding_idx", "raw_ids")}
        own |= {"unknown": table.unknown, "frequencies": ranks_of(table, t, spec, tensors)}
        arguments.append(own | {"scheme": Known(table=spec)})
    module: Tables
    if saved.type == "EmbeddingCollection":
        pairs = zip(saved.tables, arguments, strict=True)
        module = EmbeddingCollection([Table(t.name, features=t.features, **own) for t, own in pairs], **options)
    elif len(arguments) != 1 or saved.tables[0].name:
        raise ValueError(f"{saved.type} must have one table, without a name")
    else:
        module = (EmbeddingBag if saved.type == "EmbeddingBag" else Embedding)(**arguments[0], **options)
    if saved.bits:
        quantize_(module, saved.bits)
    return module


def _network(saved: SavedNetwork, tables: Tables, device: str | None) -> nn.Module:
    options = {name: value for name, value in vars(saved).items() if name != "type" and value is not None}
    return cast(nn.Module, NETWORKS[saved.type](tables, **options, device=device))


def _check(parameters: Mapping[str, nn.Parameter], lists: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the file has exactly the parameters and lists of the model, in their shapes."""
    if wrong := sorted(tensors.keys() ^ (parameters.keys() | lists.keys())):
        raise ValueError(f"{wrong[0]} is {'not part of the model' if wrong[0] in tensors else 'missing'}")
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape:
            raise ValueError(f"{name} is {tuple(tensors[name].shape)} and must be {tuple(parameter.shape)}")
        if tensors[name].is_floating_point() != parameter.is_floating_point():
            raise ValueError(f"{name} is {tensors[name].dtype} and must be {parameter.dtype}")


def _assign(module: nn.Module, name: str, values: Tensor, trained: bool) -> None:
    """Replace a parameter by one that shares the memory of ``values``."""
    parent, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(values, requires_grad=values.is_floating_point() and trained)
    setattr(module.get_submodule(parent), leaf, parameter)
