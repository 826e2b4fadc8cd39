"""The model of a run, built from its configuration and the data's cardinalities; and the identity of the data.

Tables are stored by a plan, or as in the paper (section 5) by one scheme for all features and a threshold.
"""

import hashlib
import json
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from .. import models
from ..data.batches import Batch
from ..data.prepared import Prepared
from ..modules.collection import EmbeddingCollection, Table
from ..modules.lookup import tables_in
from ..modules.table import UnknownIds
from ..ops.declare import word_bytes
from ..paper.operations import Operation
from ..paper.schemes import QR, Composed, Full, Hash, HotCold, Path, Scheme
from ..paper.schemes.frequency import comes_by_frequency
from .config import RunConfig

PAPER_METHODS = ("full", "hash", "feature", "concat", "add", "mult", "path")
NETWORK = 2**63  # added to the seed for the network, whose initial values so do not depend on the tables
_seeding = threading.Lock()  # guards torch's global generator


def build_model(config: RunConfig, prepared: Prepared, device: torch.device | str = "cpu") -> nn.Module:
    """The network of a run with its tables, with initial values drawn from the seed.

    The same configuration and data give the same bits on one kind of device. With the same seed, the network's initial
    values are the same for any tables. The state of the global generator is restored.
    """
    if config.data != (name := data_identity(prepared)):
        raise ValueError(f"config.data ({config.data!r}) must be the identity of {prepared.path}, {name!r}")
    device = torch.device(device)
    tables = [_ranked(table, prepared) for table in tables_of_run(config, prepared)]
    dtype = getattr(torch, config.row_dtype)
    with _seeding, torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tables that stay full are counted in the result
        torch.manual_seed(config.seed)
        # Prepared ids are in range and have checksums, so the lookup on a GPU need not check them.
        embeddings = EmbeddingCollection(tables, device=device, dtype=dtype, on_invalid_id="trust")
        torch.manual_seed((config.seed + NETWORK) % 2**64)
        return models.build(
            config.network,
            embeddings,
            num_dense=len(prepared.dense_names),
            preset=config.preset,
            hidden=config.hidden,
            bottom=config.bottom,
            device=device,
        )


def sizes(model: nn.Module) -> dict[str, int]:
    """Parameters and bytes of a model and its tables; number of tables that their scheme would not shrink."""
    tables = tables_in(model)[0]
    parameters = sum(p.numel() for p in model.parameters())
    if tables.bits:  # ``stored`` holds bytes then
        parameters += tables.num_parameters - tables.stored.numel()
    lists = tables.ranks.nbytes + word_bytes(tables.layout)
    return {
        "parameters": parameters,
        "bytes": sum(p.nbytes for p in model.parameters()) + lists,
        "embedding_parameters": tables.num_parameters,
        "embedding_bytes": sum(p.nbytes for p in tables.parameters()) + lists,
        "tables_kept_full": sum(spec.fallback is not None for spec in tables.specs),
    }


def _ranked(table: Table, prepared: Prepared) -> Table:
    """A ``HotCold`` table with its training frequencies, unless its ids are numbered by frequency; others unchanged."""
    if not isinstance(table.scheme, HotCold):
        return table
    counts = torch.from_numpy(prepared.frequencies(table.name))
    return table if comes_by_frequency(counts) else replace(table, frequencies=counts)


def scheme_of(method: str, num_collisions: int = 4, *, hidden: int = 64, force: bool = True) -> Scheme:
    """The scheme behind a name in the paper's figures and table; ``hidden`` is the width of ``"path"``'s networks."""
    if method == "full":
        return Full()
    if method == "hash":
        return Hash(num_collisions, force=force)
    if method == "path":
        return Path(num_collisions, hidden=(hidden,), force=force)
    return QR(num_collisions, operation=cast(Operation, method), force=force)


def tables_of(
    cardinalities: Sequence[int],
    scheme: Scheme,
    *,
    threshold: int = 0,
    embedding_dim: int = 16,
    names: Sequence[str] | None = None,
) -> list[Table]:
    """One table per feature, stored by ``scheme``; tables of at most ``threshold`` ids stay full.

    ``concat`` concatenates K rows of width ``embedding_dim``, so all tables are K times as wide, including the full
    ones (section 5.1). Features without ``names`` are called ``C1``, ``C2``, ...
    """
    names = [f"C{f + 1}" for f in range(len(cardinalities))] if names is None else names
    width = embedding_dim
    if isinstance(scheme, Composed) and scheme.operation == "concat" and scheme.dims is None and cardinalities:
        width *= len(scheme.partitions_of(max(cardinalities)))
    return [
        Table(name, n, width, Full() if n <= threshold else scheme)
        for name, n in zip(names, cardinalities, strict=True)
    ]


def tables_of_run(config: RunConfig, prepared: Prepared) -> list[Table]:
    """The tables of a run: by its plan, or by one scheme and threshold."""
    scheme, width = config.scheme if config.plan is None else Full(), config.embedding_dim
    sizes, names = prepared.cardinalities, prepared.names
    tables = tables_of(sizes, scheme, threshold=config.threshold, embedding_dim=width, names=names)
    if config.plan is not None:
        schemes, features = dict(config.plan), {table.name for table in tables}
        if missing := sorted(features - set(schemes)):
            raise ValueError(f"plan must name every feature of the data: {', '.join(missing)} is missing")
        if extra := sorted(set(schemes) - features):
            raise ValueError(f"plan names {', '.join(extra)}, which the data do not have")
        tables = [replace(table, scheme=schemes[table.name]) for table in tables]
    return [_with_unknown(table, config.unknown) for table in tables]


def _with_unknown(table: Table, unknown: str) -> Table:
    """The table with the option ``unknown``, if it supports it; else unchanged."""
    spec = table.scheme.spec(table.num_embeddings, table.embedding_dim)
    able = {"rest": spec.num_rest > 0, "hash": not isinstance(spec.scheme, Full) and spec.num_composed > 0}
    return replace(table, unknown=cast(UnknownIds, unknown)) if able.get(unknown) else table


def counted_tables(prepared: Prepared, embedding_dim: int) -> list[Table]:
    """Full tables of prepared data with the counts of their training rows, for a planner."""
    tables = tables_of(prepared.cardinalities, Full(), embedding_dim=embedding_dim, names=prepared.names)
    return [replace(table, frequencies=torch.from_numpy(prepared.frequencies(table.name))) for table in tables]


def logits_of(model: nn.Module, batch: Batch, names: Sequence[str], precision: str) -> Tensor:
    """Logits ``[B]`` of a batch with the categorical features ``names``, as float32."""
    with autocast(batch.dense.device, precision):
        logits: Tensor = model(batch.dense, *batch.embedding_inputs(names))
    return logits.float()


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context in which a network runs: autocast if the precision is ``"bfloat16"``."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def data_identity(prepared: Prepared) -> str:
    """The identity of prepared data, which does not depend on where the folder is or on what version prepared it.

    It is a hash of the names, cardinalities and split, and of the checksums of all rows.
    """
    meta, columns = prepared.meta, prepared.meta.columns
    about = {"num_rows": meta.num_rows, "cardinalities": meta.cardinalities, "split": meta.split}
    about |= {"dense": columns.dense, "categorical": columns.categorical, "bags": columns.bags}
    text = json.dumps([about, prepared.checksums()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
