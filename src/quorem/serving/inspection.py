"""``quorem inspect``: the contents of a run, a saved model or prepared data, as JSON values."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checks import dtype_name
from ..data.encoding import read_encoding
from ..data.prepared import Prepared
from ..files import atomic as files
from ..files import saved_model
from ..files.tensors import TensorFile
from ..modules.lookup import Tables
from ..ops.layout import Extent
from ..paper.partitions import ExplicitPartition
from ..training.model import data_identity
from ..training.run import ENCODING, LAYERS, LAYERS_KIND, MODEL, RESULT, read_result


def inspect(path: str | os.PathLike[str], *, verify: bool = False) -> dict[str, Any]:
    """Describe what is at a path.

    Args:
        path: the folder of a run or of prepared data, or a file of ``quorem.save``.
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
        return {"kind": "model", **_model(path, verify)}
    if (path / "meta.json").exists():
        return _prepared(Prepared(path), verify)
    if (path / "run.json").exists():
        return _run(path, verify)
    raise ValueError(f"{path} is neither a run nor prepared data: it has no run.json and no meta.json")


def _prepared(prepared: Prepared, verify: bool) -> dict[str, Any]:
    if verify:
        prepared.verify()
    features = []
    for name, size in zip(prepared.names, prepared.cardinalities, strict=True):
        counts = prepared.frequencies(name)
        seen, largest = int((counts > 0).sum()), float(counts.max(initial=0) / max(counts.sum(), 1))
        about = {"name": name, "ids": size, "seen_in_training": seen, "largest_share": largest}
        features.append({**about, "bag": name in prepared.meta.columns.bags})
    return {
        "kind": "data",
        "path": str(prepared.path),
        "identity": data_identity(prepared),
        "rows": prepared.num_rows,
        "split": prepared.meta.rows,
        "dense": prepared.dense_names,
        "ids": prepared.meta.config.get("ids", "made up"),
        "features": features,
        "bytes_on_disk": _size(prepared.path),
        "verified": verify,
    }


def _run(path: Path, verify: bool) -> dict[str, Any]:
    if not (path / RESULT).exists():
        raise FileNotFoundError(f"{path} has no {RESULT}: the run is not finished")
    config, result = files.read_json(path / "run.json"), read_result(path / RESULT)
    encoding, _ = read_encoding(path / ENCODING, verify=verify)
    if (path / LAYERS).exists() and verify:
        TensorFile(path / LAYERS, LAYERS_KIND)
    facts = {"kind": "run", "path": str(path), "config": config, "test": result["test"], "data": encoding.data}
    return facts | _model(path / MODEL, verify) | {"path": str(path), "bytes_on_disk": _size(path)}


def _model(path: Path, verify: bool) -> dict[str, Any]:
    model, file = saved_model.load(path, verify=verify), TensorFile(path, saved_model.KIND, verify=False)
    tables = saved_model.savable_tables(model)
    prefix = "" if model is tables else "embeddings."
    network = sum(p.nbytes for name, p in model.named_parameters() if prefix and not name.startswith(prefix))
    return {
        "path": str(path),
        "model": type(model).__name__,
        "bits": tables.bits,
        "dtype": dtype_name(tables.dtype),
        "tables": [_table(tables, t) for t in range(len(tables.specs))],
        "pools": [
            {"name": name, "rows": sum(e.rows for e in pool.extents), "bytes_in_memory": _share(tables, pool.extents)}
            for name, pool in tables.pools.items()
        ],
        "network_bytes": network,
        "bytes_on_disk": _size(path),
        "bytes_in_memory": network + sum(t.nbytes for t in [*tables.parameters(), *tables.buffers()]),
        "versions": file.description["versions"],
        "verified": verify,
    }


def _table(tables: Tables, t: int) -> dict[str, Any]:
    spec = tables.specs[t]
    memory = _share(tables, tables.extents[t])
    memory += sum(p.index.nbytes for p in spec.partitions if isinstance(p, ExplicitPartition))
    memory += sum(ids.nbytes for ids in tables.ranks_of[t] or ())
    in_matrix = spec.width * spec.embedding_dim if spec.is_narrow else 0
    in_networks = spec.num_parameters - in_matrix - sum(r * w for r, w in spec.shapes)
    memory += in_networks * tables.dtype.itemsize
    memory += in_matrix * (2 if tables.bits else tables.dtype.itemsize)  # ``quantize_`` rounds it to bfloat16
    return {
        "name": tables.names[t],
        "features": tables.features_of(t),
        "ids": spec.num_embeddings,
        "width": spec.embedding_dim,
        "scheme": str(spec.scheme),
        "dtype": dtype_name(tables.dtype),
        "bits": tables.bits or 8 * tables.dtype.itemsize,
        "rows": sum(extent.rows for extent in tables.extents[t]),
        "bytes_in_memory": memory,
        "compression": spec.num_embeddings * spec.embedding_dim * tables.dtype.itemsize / max(memory, 1),
        "raw_ids": tables.raw_ids[t],
        "unknown": tables.unknown[t],
    }


def _share(tables: Tables, extents: Sequence[Extent]) -> int:
    """The bytes of ``stored`` that are these rows; narrow rows in few bits share the last byte of their block."""
    size, num_rows = tables.stored.nbytes, tables.num_rows
    ends = [(extent.base, extent.base + extent.rows * extent.pitch) for extent in extents]
    return sum(stop * size // num_rows - start * size // num_rows for start, stop in ends)


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in (path, *path.rglob("*")) if each.is_file())
