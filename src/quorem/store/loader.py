"""Builds the module or network that a file describes.

The module is built on the meta device, and its names and shapes are compared with the file's. Only then are its
parameters replaced by views of the mapped file.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..bags import EmbeddingBag
from ..checks import FLOAT_DTYPES
from ..collection import EmbeddingCollection, Table
from ..embeddings import Embedding
from ..models import DCN, DLRM, DeepFM
from ..ops.layout import pool_key
from ..quantize import quantize_
from ..saved import entry_name
from ..saved_paths import network_layers
from ..schemes import Ranks, TableSpec
from ..tables import Tables
from ..tensor_file import TensorFile
from . import description
from .description import Known, check_known, taken
from .pooled import spec_alone

EMBEDDINGS = "embeddings."  # prefix of a network's tables
# Options of all classes of tables, and options of each class with their JSON types.
COMMON = ("type", "sparse", "on_invalid_id", "bits", "dtype")
OPTIONS: dict[str, dict[str, type]] = {
    "Embedding": {},
    "EmbeddingBag": {"mode": str, "include_last_offset": bool},
    "EmbeddingCollection": {"mode": str},
}
NETWORK_CLASSES: dict[str, tuple[type[nn.Module], dict[str, type]]] = {
    "DLRM": (DLRM, {"raw_dense": bool, "bottom": list, "top": list}),
    "DCN": (DCN, {"deep": list, "num_cross": int}),
    "DeepFM": (DeepFM, {"deep": list}),
}


class Loader:
    """Builds what a file describes.

    Args:
        file: the open file, whose header is checked.
        verify: compare the tensors that are loaded with their checksums.
    """

    def __init__(self, file: TensorFile, verify: bool) -> None:
        self.file, self.verify = file, verify
        values = dict(file.description)
        self.frozen = taken(values, "frozen", list)
        taken(values, "versions", dict)
        self.values = {name: value for name, value in values.items() if name not in ("frozen", "versions")}
        self.is_network = self.values.get("type") in NETWORK_CLASSES
        self.prefix = EMBEDDINGS if self.is_network else ""
        self.table_values = taken(self.values, "embeddings", dict) if self.is_network else self.values

    def model(self) -> nn.Module:
        """The whole model."""
        tables = self._tables()
        self._check_names(tables, tables, self.prefix)
        if self.verify:
            self.file.verify()
        model = self._network(tables) if self.is_network else tables
        self._map_tables(tables)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.is_floating_point() and name not in self.frozen)
        return model

    def table(self, name: str) -> Embedding:
        """One table of a collection, as an ``Embedding``."""
        tables = self._tables()
        self._check_names(tables, tables, self.prefix)
        names = [known for known in tables.names if known]
        if name not in names:
            rule = f"one of {', '.join(map(repr, names))}" if names else "None: the file holds a single table"
            raise ValueError(f"table ({name!r}) of {self.file.path} must be {rule}")
        t = names.index(name)
        in_pool = tables.specs[t].pool is not None
        try:
            spec = spec_alone(tables, t) if in_pool else tables.specs[t]
        except ValueError as error:
            raise ValueError(f"table ({name!r}) of {self.file.path} {error}") from None
        options: dict[str, Any] = {"sparse": tables.sparse, "on_invalid_id": tables.on_invalid_id}
        arguments = self.arguments[t] | {"scheme": Known(table=spec)}
        module = Embedding(**arguments, **options, dtype=tables.dtype, device="meta")
        if tables.bits and module.width != tables.width:
            rule = f"is stored in pieces of {tables.width} numbers and must be loaded with the whole file"
            raise ValueError(f"table ({name!r}) of {self.file.path} {rule}")
        if tables.bits:
            quantize_(module, cast(Literal[8, 4], tables.bits))
        stored = [self.prefix + entry_name("tables", name, j) for j in range(len(tables.extents[t]))]
        if in_pool:
            key = pool_key(tables.pools, tables.specs[t])
            stored += [f"{self.prefix}pools.{key}.{j}" for j in range(len(spec.partitions) if spec.num_composed else 0)]
        in_file = self._networks(tables)
        networks = {
            f"paths.{layer.name}": in_file[f"{self.prefix}paths.{name}.{own_name}"]
            for layer in network_layers(module)
            for own_name in layer.counts
        }
        if self.verify:
            self.file.verify([*stored, *(source for source, _ in networks.values())])
        if in_pool:  # its rows are not adjacent in the file, so they are copied
            parts = zip(stored, spec.shapes, strict=True)
            rows = torch.cat([self.file.tensor(part)[:count] for part, (count, _) in parts])
        else:
            rows = self.file.together(stored)
        _assign(module, "stored", rows.view(module.stored.shape))
        for target, (source, span) in networks.items():
            _assign(module, target, self.file.tensor(source)[span])
        module.register_integers()
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.is_floating_point() and f"{self.prefix}stored" not in self.frozen)
        return module

    def _tables(self) -> Tables:
        """The module of the tables, on the meta device; only its lists of ids are loaded."""
        values, kind = self.table_values, taken(self.table_values, "type", str)
        if kind not in OPTIONS:
            raise ValueError(f"type ({kind!r}) must be one of {', '.join((*OPTIONS, *NETWORK_CLASSES))}")
        check_known(values, {*COMMON, "tables", *OPTIONS[kind]}, kind)
        bits, dtype = taken(values, "bits", int), taken(values, "dtype", str)
        if bits not in (0, 8, 4) or dtype not in FLOAT_DTYPES:
            raise ValueError(f"bits ({bits}) must be 0, 8 or 4, and dtype ({dtype!r}) one of {', '.join(FLOAT_DTYPES)}")
        options: dict[str, Any] = {name: taken(values, name, kind) for name, kind in OPTIONS[kind].items()}
        options |= {"sparse": taken(values, "sparse", bool), "on_invalid_id": taken(values, "on_invalid_id", str)}
        options["dtype"] = FLOAT_DTYPES[dtype]
        entries = taken(values, "tables", list)
        if not entries or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError("tables must be one or more objects")
        entries = [{"raw_ids": False, "unknown": "error"} | entry for entry in entries]  # for old files
        cut = len(self.prefix)
        shapes = {n[cut:]: entry.shape for n, entry in self.file.entries.items() if n.startswith(self.prefix)}
        maps = {n: self.file.tensor(n) for n in self.file.entries if n.startswith("maps.")}
        if self.verify:
            self.file.verify(maps)
        specs = [description.table_spec(entry, shapes, maps, bits) for entry in entries]
        self._check_pools(specs, shapes)
        self.arguments = [self._arguments(entry, spec) for entry, spec in zip(entries, specs, strict=True)]
        module: Tables
        if kind == "EmbeddingCollection":
            tables = [
                Table(entry["name"], features=tuple(taken(entry, "features", list)), **arguments)
                for entry, arguments in zip(entries, self.arguments, strict=True)
            ]
            module = EmbeddingCollection(tables, **options, device="meta")
        elif len(specs) != 1 or entries[0]["name"]:
            raise ValueError(f"{kind} must have one table, without a name")
        else:
            build = EmbeddingBag if kind == "EmbeddingBag" else Embedding
            module = build(**self.arguments[0], **options, device="meta")
        if bits:
            quantize_(module, bits)
        return module

    def _arguments(self, entry: Mapping[str, Any], spec: TableSpec) -> dict[str, Any]:
        """The arguments with which a table is constructed."""
        return {
            "num_embeddings": spec.num_embeddings,
            "embedding_dim": spec.embedding_dim,
            "scheme": Known(table=spec),
            "padding_idx": entry.get("padding_idx"),
            "frequencies": self._ranks(entry, spec),
            "raw_ids": taken(entry, "raw_ids", bool),
            "unknown": taken(entry, "unknown", str),
        }

    def _check_pools(self, specs: Sequence[TableSpec], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError unless the file has rows for every pool; this comes before the search for their sizes."""
        rows = {name: shape[0] for name, shape in shapes.items() if name.startswith("pools.") and len(shape) == 2}
        for pool in {spec.pool for spec in specs if spec.pool is not None}:
            mine = [size for name, size in rows.items() if name.startswith(f"pools.{pool.name}.")]
            if pool.num_partitions > len(mine) or pool.num_rows > 2 * sum(mine) + pool.num_partitions:
                raise ValueError(f"pool {pool.name!r} has {len(mine)} tables of {sum(mine)} rows, not {pool}")

    def _ranks(self, entry: Mapping[str, Any], spec: TableSpec) -> Ranks | None:
        """The lists of hot and cold ids of a table, or None if it has none."""
        if not taken(entry, "ranked", bool):
            return None
        if not spec.num_own:
            raise ValueError(f"ranked (true) must be false for table {entry['name']!r}: it has no hot ids and no rest")
        names = [self.prefix + entry_name("ranks", entry["name"], kind) for kind in Ranks._fields]
        if self.verify:
            self.file.verify(names)
        return Ranks(*(self.file.tensor(name) for name in names))

    def _network(self, tables: Tables) -> nn.Module:
        """The network around the tables: checked against the file on the meta device, then built and mapped."""
        values, kind = self.values, self.values["type"]
        check_known(values, {"type", "num_dense", "embedding_dims", "embeddings", *NETWORK_CLASSES[kind][1]}, kind)
        options: dict[str, Any] = {name: taken(values, name, kind) for name, kind in NETWORK_CLASSES[kind][1].items()}
        options["num_dense"] = taken(values, "num_dense", int)
        options["embedding_dims"] = taken(values, "embedding_dims", list)
        build: Callable[..., nn.Module] = NETWORK_CLASSES[kind][0]
        if kind == "DLRM":  # its constructor lists all pairs of vectors, so check their number first
            vectors, top = len(options["embedding_dims"]) + 1, self.file.entries.get("top.0.weight")
            if top is None or len(top.shape) != 2 or top.shape[1] < (vectors - 1) * (vectors - 2) // 2:
                raise ValueError(f"top.0.weight is too small for the dot products of {vectors - 1} vectors")
        self._check_names(tables, build(tables, **options, device="meta"), "")
        with torch.random.fork_rng(devices=[]):  # its initial values are replaced below
            network = build(tables, **options)
        for name, _ in list(network.named_parameters()):
            if not name.startswith(EMBEDDINGS):
                _assign(network, name, self.file.tensor(name))
        return network

    def _check_names(self, tables: Tables, module: nn.Module, prefix: str) -> None:
        """Raise ValueError unless the file has exactly the tensors of ``module``, in its shapes.

        ``tables`` are the tables of ``module``, or the module itself.
        """
        shapes = {prefix + name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        stored = {name: entry.shape for name, entry in self.file.entries.items() if not name.startswith("maps.")}
        for layer in network_layers(tables):
            group = stored.pop(f"{self.prefix}paths.{layer.name}", None)
            if group is not None:  # an earlier version saved all tables of the group in one tensor
                if group != layer.parameter.shape:
                    rule = f"must be {tuple(layer.parameter.shape)}"
                    raise ValueError(f"{self.prefix}paths.{layer.name} is {group} and {rule}")
                stored |= {f"{self.prefix}paths.{name}": (n, *group[1:]) for name, n in layer.counts.items()}
        if prefix:  # the layers of a network are compared in _network
            stored = {name: shape for name, shape in stored.items() if name.startswith(prefix)}
        if wrong := sorted(stored.keys() ^ shapes.keys()):
            where = "missing" if wrong[0] in shapes else "not part of the model"
            raise ValueError(f"{wrong[0]} is {where}")
        for name, shape in shapes.items():
            if stored[name] != shape:
                raise ValueError(f"{name} is {stored[name]} and must be {shape}")

    def _map_tables(self, tables: Tables) -> None:
        names = [self.prefix + name for name, _ in tables.named_tables()]
        stored = self.file.together(names)
        if stored.dtype != tables.stored.dtype:
            raise ValueError(f"its tables are {stored.dtype} and must be {tables.stored.dtype}")
        _assign(tables, "stored", stored.view(tables.stored.shape))
        networks = self._networks(tables)
        for layer in list(network_layers(tables)):
            sources = dict.fromkeys(networks[f"{self.prefix}paths.{name}"][0] for name in layer.counts)
            values = self.file.together(sources).view(layer.parameter.shape)
            _assign(tables, f"paths.{layer.name}", values)
        tables.register_integers()

    def _networks(self, tables: Tables) -> dict[str, tuple[str, slice]]:
        """For the networks of each table, by name, the file's tensor and the rows of it that hold them.

        Earlier versions saved the networks of a whole group in one tensor.
        """
        sources = {}
        for layer in network_layers(tables):
            group, first = f"{self.prefix}paths.{layer.name}", 0
            for name, count in layer.counts.items():
                key, rows = f"{self.prefix}paths.{name}", slice(first, first + count)
                sources[key] = (group, rows) if group in self.file.entries else (key, slice(None))
                first += count
        return sources


def _assign(module: nn.Module, name: str, values: Tensor) -> None:
    """Replace a parameter by one that shares the memory of ``values``."""
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    setattr(owner, leaf, nn.Parameter(values, requires_grad=values.is_floating_point()))
