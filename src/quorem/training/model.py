"""The model of a run, built from its configuration and the data's cardinalities; and the identity of the data."""

import dataclasses
import hashlib
import json
import threading
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import models
from ..data.batches import Batch
from ..data.prepared import Prepared
from ..modules.collection import EmbeddingCollection, Table
from ..ops.declare import word_bytes
from ..paper.schemes import HotCold
from ..paper.schemes.frequency import comes_by_frequency
from .config import RunConfig
from .tables import tables_of_run

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
    tables = tables_of_run(config, prepared.cardinalities, prepared.names)
    tables = [_ranked(table, prepared) for table in tables]
    with _seeding, torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tables that stay full are counted in the result
        torch.manual_seed(config.seed)
        # Prepared ids are in range and have checksums, so the lookup on a GPU need not check them.
        embeddings = EmbeddingCollection(
            tables, device=device, dtype=getattr(torch, config.row_dtype), on_invalid_id="trust"
        )
        num_dense = len(prepared.dense_names)
        torch.manual_seed((config.seed + NETWORK) % 2**64)
        return models.build(
            config.network,
            embeddings,
            num_dense=num_dense,
            preset=config.preset,
            hidden=config.hidden,
            bottom=config.bottom,
            device=device,
        )


def sizes(model: nn.Module) -> dict[str, int]:
    """Parameters and bytes of a model and its tables; number of tables that their scheme would not shrink."""
    tables = next(module for module in model.modules() if isinstance(module, EmbeddingCollection))
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
    return table if comes_by_frequency(counts) else dataclasses.replace(table, frequencies=counts)


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
