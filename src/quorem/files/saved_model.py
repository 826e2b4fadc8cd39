"""``quorem.save``, and ``load`` for its files: a module or a network in one file, without pickle.

The file has the model's ``state_dict``, index maps of partitions, and a description of the classes and their options.
Loading builds the model on the meta device and then maps the file as its parameters. ``state_dict`` says what the rows
mean, so a file is refused where a later version would choose other partitions for a scheme.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from ..checks import FLOAT_DTYPES, InvalidIdMode, dtype_name
from ..models import DCN, DLRM
from ..modules.bag import EmbeddingBag
from ..modules.collection import EmbeddingCollection, Table
from ..modules.embedding import Embedding
from ..modules.lookup import Tables
from ..modules.quantize import quantize_
from ..paper import schemes
from ..paper.schemes import Custom, Scheme
from .atomic import naming_damage
from .checked_json import build
from .provenance import versions
from .tensors import FileKind, TensorFile, write_tensors

KIND = FileKind("quorem-model", 4)
NETWORKS: dict[str, type[DLRM | DCN]] = {"DLRM": DLRM, "DCN": DCN}


@dataclass(frozen=True, kw_only=True)
class SavedNetwork:
    """The network around the tables: its class and the options of its constructor, None where it has no such option."""

    type: Literal["DLRM", "DCN"]
    num_dense: int
    embedding_dims: tuple[int, ...]
    raw_dense: bool | None = None
    bottom: tuple[int, ...] | None = None
    top: tuple[int, ...] | None = None
    deep: tuple[int, ...] | None = None
    num_cross: int | None = None


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """The description of a file: the module that holds the tables and its options, and the network around it."""

    type: Literal["Embedding", "EmbeddingBag", "EmbeddingCollection"]
    sparse: bool
    on_invalid_id: InvalidIdMode
    mode: Literal["sum", "mean", "max"] | None  # None where the class has no such option
    include_last_offset: bool | None
    bits: Literal[0, 8, 4]
    dtype: Literal["float32", "float64", "bfloat16", "float16"]
    tables: tuple[Table, ...]
    network: SavedNetwork | None
    frozen: tuple[str, ...]  # names of the parameters that are not trained
    versions: dict[str, str]


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a module or a network to one file for ``load``, atomically.

    The file is in the safetensors format: the ``state_dict``, and a description in its header.

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
    tables = savable_tables(model)
    maps: dict[str, Tensor] = {}
    options = ("sparse", "on_invalid_id", "mode", "include_last_offset", "bits")
    description = {
        "type": type(tables).__name__,
        **{name: getattr(tables, name, None) for name in options},
        "dtype": dtype_name(tables.dtype),
        "tables": [_table_described(tables, t, maps) for t in range(len(tables.specs))],
        "network": None if model is tables else _network_described(model),
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "versions": versions(),
    }
    write_tensors(path, KIND, {**model.state_dict(), **maps}, description)


def load(path: str | os.PathLike[str], *, verify: bool = True) -> nn.Module:
    """The module or network that ``save`` wrote; arguments and errors are those of ``quorem.load``."""
    file = TensorFile(path, KIND, verify=verify)
    with naming_damage(file.path):
        maps = {name: tensor for name, tensor in file.tensors.items() if name.startswith("maps.")}
        state = {name: tensor for name, tensor in file.tensors.items() if name not in maps}
        saved = build(SavedModel, file.description, converters={Scheme: partial(schemes.from_dict, maps=maps)})
        return _model(saved, state)


def savable_tables(model: nn.Module) -> Tables:
    """The tables of a model whose class ``save`` accepts; raises TypeError for others."""
    tables = model.embeddings if type(model) in NETWORKS.values() else model
    if type(tables) not in (Embedding, EmbeddingBag, EmbeddingCollection):
        known = "Embedding, EmbeddingBag, EmbeddingCollection, or a DLRM or DCN around one of these"
        raise TypeError(f"model ({type(tables).__name__}) must be an {known}")
    assert isinstance(tables, Tables)
    return tables


def _table_described(tables: Tables, t: int, maps: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments of ``Table`` for the ``t``-th table."""
    spec = tables.specs[t]
    scheme = spec.scheme
    if spec.fallback and spec.operation == "feature":  # the table stayed full, but its vectors are [1, D]
        scheme = Custom(spec.partitions, operation="feature", force=True)
    return {
        "name": tables.names[t],
        "num_embeddings": spec.num_embeddings,
        "embedding_dim": spec.embedding_dim,
        "scheme": schemes.to_dict(scheme, maps=maps),
        "padding_idx": tables.padding_ids[t],
        "features": tables.features_of(t) if tables.names[t] else (),
        "frequencies": None if tables.ranks_of[t] is None else "loaded",
        "raw_ids": tables.raw_ids[t],
        "unknown": tables.unknown[t],
    }


def _network_described(model: Any) -> dict[str, Any]:
    """The description of a network, as ``SavedNetwork``."""
    layers = {name: getattr(model, name) for name in ("bottom", "top", "deep") if hasattr(model, name)}
    widths = {name: [each.out_features for each in mlp if isinstance(each, nn.Linear)] for name, mlp in layers.items()}
    options: dict[str, Any] = {"num_dense": model.num_dense, "embedding_dims": model.embedding_dims, **widths}
    if isinstance(model, DLRM):
        options |= {"raw_dense": model.raw_dense, "bottom": widths["bottom"][:-1]}  # the last width follows from D
    else:
        options["num_cross"] = len(model.cross_weight)
    return {"type": type(model).__name__, **options}


def _model(saved: SavedModel, state: Mapping[str, Tensor]) -> nn.Module:
    """The model, whose parameters are the tensors of ``state``."""
    model: nn.Module = _empty_tables(saved)
    if (network := saved.network) is not None:
        options = {name: value for name, value in vars(network).items() if name != "type" and value is not None}
        model = NETWORKS[network.type](model, **options, device="meta")
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:  # other tensors, or of other shapes
        raise ValueError("; ".join(line.strip() for line in str(error).splitlines()[1:])) from None
    for name in saved.frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def _empty_tables(saved: SavedModel) -> Tables:
    """The module of the tables, on the meta device."""
    options: dict[str, Any] = {"sparse": saved.sparse, "on_invalid_id": saved.on_invalid_id}
    options |= {"dtype": FLOAT_DTYPES[saved.dtype], "device": "meta"}
    options |= {name: v for name in ("mode", "include_last_offset") if (v := getattr(saved, name)) is not None}
    module: Tables
    if saved.type == "EmbeddingCollection":
        module = EmbeddingCollection(saved.tables, **options)
    elif len(saved.tables) != 1 or saved.tables[0].name:
        raise ValueError(f"{saved.type} must have one table, without a name")
    else:
        of_table = {name: value for name, value in vars(saved.tables[0]).items() if name not in ("name", "features")}
        module = (EmbeddingBag if saved.type == "EmbeddingBag" else Embedding)(**of_table, **options)
    if saved.bits:
        quantize_(module, saved.bits)
    return module
