"""``quorem inspect``: the contents of a run, a saved model or prepared data, as JSON values."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checks import dtype_name
from ..data.encoding import read_encoding
from ..data.folder import file_name
from ..data.prepared import Prepared
from ..files import atomic as files
from ..files import saved_model
from ..files.tensors import TensorFile
from ..modules.lookup import Tables
from ..ops.rows import numbers_of
from ..paper.hashing import mixed_ids
from ..paper.partitions import ExplicitPartition
from ..paper.schemes import QR, ChineseRemainder, Full, GeneralizedQR, Hash, HotCold, Pool, TableSpec
from ..paper.schemes import Path as PathScheme
from ..training.model import data_identity
from ..training.run import ENCODING, LAYERS, LAYERS_KIND, MODEL, RESULT, read_result

MOST_COUNTED = 2**22  # largest number of composed ids of a custom scheme whose combinations of rows are enumerated


def inspect(
    path: str | os.PathLike[str], *, data: str | os.PathLike[str] | None = None, verify: bool = False
) -> dict[str, Any]:
    """Describe what is at a path.

    Args:
        path: the folder of a run or of prepared data, or a file of ``quorem.save``.
        data: prepared data, from whose training rows it is counted how often ids occur. For a run the default is its
            own data, if they still exist.
        verify: compare every file with its checksums.

    Returns:
        JSON values; ``"kind"`` is ``"data"``, ``"run"`` or ``"model"``.

    Raises:
        FileNotFoundError: if the path does not exist, or a file is missing.
        ValueError: if it is none of these, or damaged.

    >>> import quorem, tempfile
    >>> file = tempfile.mkdtemp() + "/users.safetensors"
    >>> quorem.save(quorem.Embedding(1000, 16, quorem.QR(4)), file)
    >>> facts = inspect(file)
    >>> facts["kind"], facts["tables"][0]["scheme"], facts["tables"][0]["rows"]
    ('model', 'QR(num_collisions=4)', 254)
    """
    path = Path(path)
    if not path.is_dir():
        return {"kind": "model", **_model(path, verify, None if data is None else Prepared(data))}
    if (path / "meta.json").exists():
        return _prepared(Prepared(path), verify)
    if (path / "run.json").exists():
        return _run(path, data, verify)
    raise ValueError(f"{path} is neither a run nor prepared data: it has no run.json and no meta.json")


def _prepared(prepared: Prepared, verify: bool) -> dict[str, Any]:
    if verify:
        prepared.verify()
    features = []
    for name, size in zip(prepared.names, prepared.cardinalities, strict=True):
        counts = prepared.raw_counts(name)[1] if prepared.has_raw_ids else prepared.frequencies(name)
        plain = file_name(name)
        kept = [f"counts/{plain}.npy", f"raw_ids/{plain}.npy", f"vocabulary/{plain}.txt"]
        features.append(
            {
                "name": name,
                "ids": size,
                "seen_in_training": int((counts > 0).sum()),
                "largest_share": float(counts.max(initial=0) / max(counts.sum(), 1)),
                "bag": name in prepared.meta["bags"],
                "vocabulary_bytes": sum(_size(prepared.path / file) for file in kept),
            }
        )
    return {
        "kind": "data",
        "path": str(prepared.path),
        "identity": data_identity(prepared),
        "rows": prepared.num_rows,
        "split": {name: stop - start for name, (start, stop) in prepared.meta["split"].items()},
        "dense": prepared.dense_names,
        "ids": prepared.meta["config"].get("ids", "made up"),
        "features": features,
        "bytes_on_disk": _size(prepared.path),
        "verified": verify,
    }


def _run(path: Path, data: str | os.PathLike[str] | None, verify: bool) -> dict[str, Any]:
    if not (path / RESULT).exists():
        raise FileNotFoundError(f"{path} has no {RESULT}: the run is not finished")
    config, result = files.read_json(path / "run.json"), read_result(path / RESULT)
    encoding, _ = read_encoding(path / ENCODING, verify=verify)
    if (path / LAYERS).exists() and verify:
        TensorFile(path / LAYERS, LAYERS_KIND).verify()
    prepared = None
    if data is not None or (Path(encoding.folder) / "meta.json").exists():
        prepared = Prepared(encoding.folder if data is None else data)
        if (identity := data_identity(prepared)) != encoding.data:
            if data is not None:
                raise ValueError(f"data ({data}, {identity}) must be those of the run ({encoding.data})")
            prepared = None
    facts = {"kind": "run", "path": str(path), "config": config, "test": result["test"], "data": encoding.data}
    return facts | _model(path / MODEL, verify, prepared) | {"path": str(path), "bytes_on_disk": _size(path)}


def _model(path: Path, verify: bool, prepared: Prepared | None) -> dict[str, Any]:
    model, file = saved_model.load(path, verify=verify), TensorFile(path, saved_model.KIND)
    tables = saved_model.tables_in(model)
    prefix = "" if model is tables else "embeddings."
    sizes = {name: tensor.nbytes for name, tensor in file.tensors.items()}
    network = sum(p.nbytes for name, p in model.named_parameters() if prefix and not name.startswith(prefix))
    return {
        "path": str(path),
        "model": type(model).__name__,
        "bits": tables.bits,
        "dtype": dtype_name(tables.dtype),
        "tables": [_table(tables, t, sizes, prepared) for t in range(len(tables.specs))],
        "pools": [_pool(tables, name) for name in tables.pools],
        "network_bytes": network,
        "bytes_on_disk": _size(path),
        "bytes_in_memory": network + sum(t.nbytes for t in [*tables.parameters(), *tables.buffers()]),
        "versions": file.description["versions"],
        "verified": verify,
    }


def _table(tables: Tables, t: int, sizes: Mapping[str, int], prepared: Prepared | None) -> dict[str, Any]:
    spec, name = tables.specs[t], tables.names[t]
    row_bytes = tables.stored.shape[1] * tables.stored.itemsize
    stored = sum(extent.rows * extent.pitch for extent in tables.extents[t]) * row_bytes
    map_bytes = sum(p.index.nbytes for p in spec.partitions if isinstance(p, ExplicitPartition))
    map_bytes += sum(ids.nbytes for ids in tables.ranks_of[t] or ())
    networks = (spec.num_parameters - sum(r * w for r, w in spec.shapes)) * tables.dtype.itemsize
    lists = sum(size for entry, size in sizes.items() if entry.startswith((f"maps.{t}.", f"ranks.{t}.")))
    distinct = num_distinct(spec)
    memory = stored + map_bytes + networks
    return {
        "name": name,
        "features": tables.features_of(t),
        "ids": spec.num_embeddings,
        "width": spec.embedding_dim,
        "scheme": str(spec.scheme),
        "operation": spec.operation,
        "dtype": dtype_name(tables.dtype),
        "bits": tables.bits or 8 * tables.dtype.itemsize,
        "rows": sum(extent.rows for extent in tables.extents[t]),
        "bytes_on_disk": stored + lists + networks,
        "bytes_in_memory": memory,
        "map_bytes": map_bytes,
        "compression": spec.num_embeddings * spec.embedding_dim * tables.dtype.itemsize / max(memory, 1),
        "distinct_ids": distinct,
        "unique": None if distinct is None else distinct / spec.num_embeddings,
        "raw_ids": tables.raw_ids[t],
        "unknown": tables.unknown[t],
        "traffic": _shares(tables, t, prepared) if spec.num_own and prepared is not None else None,
    }


def _pool(tables: Tables, name: str) -> dict[str, Any]:
    row_bytes = tables.stored.shape[1] * tables.stored.itemsize
    pieces = sum(extent.rows * extent.pitch for extent in tables.pools[name])
    return {"name": name, "rows": sum(e.rows for e in tables.pools[name]), "bytes_in_memory": pieces * row_bytes}


def num_distinct(spec: TableSpec) -> int | None:
    """Number of distinct combinations of rows among the ids of a table; None if it is too expensive to count.

    >>> num_distinct(QR(4).spec(1000, 16)), num_distinct(Hash(4).spec(1000, 16))
    (1000, 250)
    """
    scheme, n = spec.scheme, spec.num_composed
    cold = scheme.cold if isinstance(scheme, HotCold) else scheme
    if isinstance(cold, Full | QR | GeneralizedQR | ChineseRemainder | PathScheme | Pool) or not n:
        return spec.num_own + n
    if isinstance(cold, Hash):
        return spec.num_own + min(spec.partitions[0].size, n)
    if n > MOST_COUNTED:
        return None
    numbers = torch.arange(n, device="cpu")
    combinations = torch.stack([partition(numbers) for partition in spec.partitions], 1)
    return spec.num_own + len(combinations.unique(dim=0))


def _shares(tables: Tables, t: int, prepared: Prepared) -> dict[str, float]:
    """The shares of training lookups of a ``HotCold`` table that go to hot ids, cold ids and the rest."""
    spec, layout, total = tables.specs[t], tables.layout, np.zeros(3)
    for f, feature in enumerate(tables.features):
        if tables.table_of[f] != t:
            continue
        if feature not in prepared.names:
            raise ValueError(f"{prepared.path} has no feature {feature}, which table {tables.names[t]} is read by")
        if prepared.has_raw_ids:
            raw, counts = prepared.raw_counts(feature)
            ids = mixed_ids(torch.tensor(raw, device="cpu"), spec.num_embeddings)
        else:
            counts = prepared.frequencies(feature)
            ids = torch.arange(len(counts), device="cpu")
            if len(ids) != spec.num_embeddings:
                raise ValueError(f"{prepared.path} has {len(ids):,} ids of {feature}, not {spec.num_embeddings:,}")
        numbers = numbers_of(ids, layout.slots[layout.spans[f, 0]], layout.ranks)
        hot = ~numbers.composed & (numbers.row < spec.num_hot)
        seen = torch.from_numpy(counts)
        total += [float(seen[each].sum()) for each in (hot, numbers.composed, ~hot & ~numbers.composed)]
    return dict(zip(("hot", "cold", "rest"), (total / max(total.sum(), 1)).tolist(), strict=True))


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    return path.stat().st_size if path.exists() else 0
