"""``quorem.save`` and ``quorem.load``: a module or a network in one file, without pickle.

The description names the class and its options; the tensors have the names of ``state_dict``. Loading builds the module
on the meta device, compares names and shapes with the file, and only then lets the parameters be the mapped file.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..bags import EmbeddingBag
from ..collection import EmbeddingCollection, Table
from ..embeddings import Embedding
from ..models import DCN, DLRM
from ..paths import PathNetworks
from ..provenance import versions
from ..schemes import TableSpec
from ..tables import Tables
from ..tensor_file import Kind, TensorFile, write
from . import description
from .description import Known, check_known, taken

KIND = Kind("quorem-model", 1)
EMBEDDINGS = "embeddings."  # prefix of a network's tables


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a module or a network to one file, for ``load``; it is there whole or not at all.

    The file is in the safetensors format: tensors by the names of ``state_dict``, and a description in its header.

    Args:
        model: ``Embedding``, ``EmbeddingBag``, ``EmbeddingCollection``, ``models.DLRM`` or ``models.DCN``.
        path: of the file; one that is there is replaced.

    Raises:
        TypeError: if the model is of another class; its ``state_dict`` can be saved, or its modules one by one.
        OSError: if the disk is full; a file that was there before stays.

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
    tables = tables_of(model)
    tensors = description.maps_of(tables) | {name: tensor.detach() for name, tensor in model.state_dict().items()}
    by_width = sorted(tensors.items(), key=lambda item: -item[1].itemsize)  # stable: tables stay together
    write(path, KIND, dict(by_width), values)


def load(path: str | os.PathLike[str], *, table: str | None = None, verify: bool = True) -> nn.Module:
    """The module or network that ``save`` wrote; its parameters are the mapped file until they are written to.

    Args:
        path: of the file.
        table: load this table of a collection alone, as an ``Embedding``.
        verify: compare every tensor with its checksum, which reads the file once; False maps it and reads nothing.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is cut off, damaged, of something else or of an unknown version, or has no such table.
    """
    file = TensorFile(path, KIND)
    try:
        loader = _Loader(file, verify)
        return loader.model() if table is None else loader.table(table)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # also what torch says of absurd sizes
        text = str(error)
        raise ValueError(text if str(file.path) in text else f"{file.path} is damaged: {text}") from None


def tables_of(model: nn.Module) -> Tables:
    """The tables of a model of a class that ``save`` knows.

    Raises:
        TypeError: if it is of another class.
    """
    tables = model.embeddings if type(model) in (DLRM, DCN) else model
    if type(tables) not in (Embedding, EmbeddingBag, EmbeddingCollection):
        known = "Embedding, EmbeddingBag, EmbeddingCollection, or a DLRM or DCN around one of these"
        raise TypeError(f"model ({type(tables).__name__}) must be an {known}")
    assert isinstance(tables, Tables)
    return tables


def _described(model: nn.Module) -> dict[str, Any]:
    """The class of a model and its options, as JSON values."""
    tables = tables_of(model)
    values: dict[str, Any] = {"type": type(tables).__name__}
    values |= {"sparse": tables.sparse, "on_invalid_id": tables.on_invalid_id}
    values["tables"] = [description.of_table(tables, feature) for feature in range(len(tables.specs))]
    if isinstance(tables, EmbeddingBag):
        values |= {"mode": tables.mode, "include_last_offset": tables.include_last_offset}
    elif isinstance(tables, EmbeddingCollection):
        values["mode"] = tables.mode
    if isinstance(model, DLRM):
        options = {"raw_dense": model.raw_dense, "bottom": _widths(model.bottom)[:-1], "top": _widths(model.top)}
    elif isinstance(model, DCN):
        options = {"deep": _widths(model.deep), "num_cross": len(model.cross_weight)}
    else:
        return values
    sizes = {"num_dense": model.num_dense, "embedding_dims": list(model.embedding_dims)}
    return {"type": type(model).__name__, **sizes, **options, "embeddings": values}


def _widths(layers: nn.Module) -> list[int]:
    return [layer.out_features for layer in layers.modules() if isinstance(layer, nn.Linear)]


class _Loader:
    """Builds what a file describes.

    Args:
        file: opened, its header checked.
        verify: compare the tensors that are used with their checksums.
    """

    def __init__(self, file: TensorFile, verify: bool) -> None:
        self.file, self.verify = file, verify
        values = dict(file.description)
        self.frozen = taken(values, "frozen", list)
        taken(values, "versions", dict)
        self.values = {name: value for name, value in values.items() if name not in ("frozen", "versions")}
        self.is_network = self.values.get("type") in NETWORKS
        self.prefix = EMBEDDINGS if self.is_network else ""
        self.table_values = taken(self.values, "embeddings", dict) if self.is_network else self.values

    def model(self) -> nn.Module:
        """The whole model."""
        tables = self._tables()
        self._check_names(tables, self.prefix)
        if self.verify:
            self.file.verify()
        model = self._network(tables) if self.is_network else tables
        self._map_tables(tables)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return model

    def table(self, name: str) -> Embedding:
        """One table of a collection."""
        tables = self._tables()
        self._check_names(tables, self.prefix)
        names = [known for known in tables.names if known]
        if name not in names:
            rule = f"one of {', '.join(map(repr, names))}" if names else "None: the file holds a single table"
            raise ValueError(f"table ({name!r}) of {self.file.path} must be {rule}")
        feature = names.index(name)
        options = {"sparse": tables.sparse, "on_invalid_id": tables.on_invalid_id, "dtype": tables.stored.dtype}
        module = _embedding(Embedding, tables.specs[feature], tables.padding[feature], options)
        stored = [f"{self.prefix}{table}" for table, _ in tables.named_tables()]
        mine = stored[sum(map(len, tables.extents[:feature])) :][: len(tables.extents[feature])]
        paths = {}
        for number, group in enumerate(tables.paths):
            if isinstance(group, PathNetworks) and feature in group.members:
                paths = _path_rows(tables, group, feature, f"{self.prefix}paths.{number}.")
        if self.verify:
            self.file.verify([*mine, *(source for source, _ in paths.values())])
        _assign(module, "stored", self.file.together(mine).view(module.stored.shape))
        for target, (source, rows) in paths.items():
            _assign(module, target, self.file.tensor(source)[rows])
        module.place_integers()
        return module.requires_grad_(f"{self.prefix}stored" not in self.frozen)

    def _tables(self) -> Tables:
        """The tables' module on the meta device."""
        values, kind = self.table_values, taken(self.table_values, "type", str)
        if kind not in OPTIONS:
            raise ValueError(f"type ({kind!r}) must be one of {', '.join((*OPTIONS, *NETWORKS))}")
        check_known(values, {"type", "sparse", "on_invalid_id", "tables", *OPTIONS[kind]}, kind)
        options: dict[str, Any] = {name: taken(values, name, kind) for name, kind in OPTIONS[kind].items()}
        options |= {"sparse": taken(values, "sparse", bool), "on_invalid_id": taken(values, "on_invalid_id", str)}
        entries = taken(values, "tables", list)
        if not entries or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError("tables must be one or more objects")
        cut = len(self.prefix)
        shapes = {n[cut:]: entry.shape for n, entry in self.file.entries.items() if n.startswith(self.prefix)}
        maps = {n: self.file.tensor(n) for n in self.file.entries if n.startswith("maps.")}
        if self.verify:
            self.file.verify(maps)
        specs = [description.table_spec(entry, shapes, maps) for entry in entries]
        first = self.file.entries[self.prefix + description.table_name(entries[0]["name"], 0)]
        options["dtype"] = first.dtype
        padding = [entry.get("padding_idx") for entry in entries]
        if kind == "EmbeddingCollection":
            tables = [
                Table(entry["name"], spec.num_embeddings, spec.embedding_dim, Known(table=spec), padding_idx=pad)
                for entry, spec, pad in zip(entries, specs, padding, strict=True)
            ]
            return EmbeddingCollection(tables, **options, device="meta")
        if len(specs) != 1 or entries[0]["name"]:
            raise ValueError(f"{kind} must have one table, without a name")
        return _embedding(EmbeddingBag if kind == "EmbeddingBag" else Embedding, specs[0], padding[0], options)

    def _network(self, tables: Tables) -> nn.Module:
        """The network around the tables: compared with the file on the meta device, then built and mapped."""
        values, kind = self.values, self.values["type"]
        check_known(values, {"type", "num_dense", "embedding_dims", "embeddings", *NETWORKS[kind][1]}, kind)
        options: dict[str, Any] = {name: taken(values, name, kind) for name, kind in NETWORKS[kind][1].items()}
        options["num_dense"] = taken(values, "num_dense", int)
        options["embedding_dims"] = taken(values, "embedding_dims", list)
        build: Callable[..., nn.Module] = NETWORKS[kind][0]
        if kind == "DLRM":  # whose pairs of vectors are numbered when it is built
            vectors, top = len(options["embedding_dims"]) + 1, self.file.entries.get("top.0.weight")
            if top is None or len(top.shape) != 2 or top.shape[1] < (vectors - 1) * (vectors - 2) // 2:
                raise ValueError(f"top.0.weight is too small for the dot products of {vectors - 1} vectors")
        self._check_names(build(tables, **options, device="meta"), "")
        with torch.random.fork_rng(devices=[]):  # the start that is drawn is replaced at once
            network = build(tables, **options)
        for name, _ in list(network.named_parameters()):
            if not name.startswith(EMBEDDINGS):
                _assign(network, name, self.file.tensor(name))
        return network

    def _check_names(self, module: nn.Module, prefix: str) -> None:
        """Raise ValueError unless the file has just the tensors of a module, in its shapes."""
        shapes = {prefix + name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        stored = {name: entry.shape for name, entry in self.file.entries.items() if not name.startswith("maps.")}
        if prefix:  # a network's own layers are compared with it
            stored = {name: shape for name, shape in stored.items() if name.startswith(prefix)}
        if wrong := sorted(stored.keys() ^ shapes.keys()):
            where = "missing" if wrong[0] in shapes else "not part of the model"
            raise ValueError(f"{wrong[0]} is {where}")
        for name, shape in shapes.items():
            if stored[name] != shape:
                raise ValueError(f"{name} is {stored[name]} and must be {shape}")

    def _map_tables(self, tables: Tables) -> None:
        names = [self.prefix + name for name, _ in tables.named_tables()]
        _assign(tables, "stored", self.file.together(names).view(tables.stored.shape))
        for name, _ in list(tables.named_parameters()):
            if name != "stored":
                _assign(tables, name, self.file.tensor(self.prefix + name))
        tables.place_integers()


# Options of each class beside those that all have, and the type of each in JSON.
OPTIONS: dict[str, dict[str, type]] = {
    "Embedding": {},
    "EmbeddingBag": {"mode": str, "include_last_offset": bool},
    "EmbeddingCollection": {"mode": str},
}
NETWORKS: dict[str, tuple[type[nn.Module], dict[str, type]]] = {
    "DLRM": (DLRM, {"raw_dense": bool, "bottom": list, "top": list}),
    "DCN": (DCN, {"deep": list, "num_cross": int}),
}


def _embedding(cls: type[Embedding], spec: TableSpec, padding: Any, options: Mapping[str, Any]) -> Embedding:
    known = Known(table=spec)
    return cls(spec.num_embeddings, spec.embedding_dim, known, padding_idx=padding, **options, device="meta")


def _path_rows(tables: Tables, group: PathNetworks, feature: int, prefix: str) -> dict[str, tuple[str, slice]]:
    """Which rows of which tensors are the networks of one table: by the parameter that they become."""
    before = group.members[: group.members.index(feature)]
    layers = len(group.weights) // len(group.counts)
    rows = {}
    for i in range(len(group.weights)):
        first = sum(tables.specs[other].path_sizes[i // layers] for other in before)
        mine = slice(first, first + tables.specs[feature].path_sizes[i // layers])
        for kind in ("weights", "biases"):
            rows[f"paths.0.{kind}.{i}"] = (f"{prefix}{kind}.{i}", mine)
    return rows


def _assign(module: nn.Module, name: str, values: Tensor) -> None:
    """Let a parameter be a tensor as it is."""
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    setattr(owner, leaf, nn.Parameter(values))
