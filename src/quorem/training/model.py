"""The model of a run, from its configuration and the data's cardinalities; and the name of the data."""

import dataclasses
import hashlib
import json
import threading
import warnings

import torch
from torch import nn

from .. import models
from ..collection import EmbeddingCollection, Table
from ..data.batches import Prepared
from ..schemes import HotCold, RawCounts
from ..schemes.frequency import comes_by_frequency
from .config import RunConfig
from .tables import tables_of_run

MOST_RAW_PARAMETERS = 2**33  # of a table; more is a scheme that was made for a vocabulary
NETWORK = 2**63  # added to the seed of a run for its network, which so starts alike whatever the tables are
_seeding = threading.Lock()  # of torch's global generator


def build_model(config: RunConfig, prepared: Prepared, device: torch.device | str = "cpu") -> nn.Module:
    """The network of a run around its tables, started from the seed.

    The same configuration and data give the same bits on one kind of device, and one seed the same network around any
    tables. The global generator is left as it was.

    Args:
        config: network, scheme and threshold or plan, width, dtype of the rows and seed.
        prepared: names and cardinalities of the features, and the number of dense ones.
        device: where the model is.

    Raises:
        ValueError: if ``config.data`` is not the name of ``prepared``.
    """
    if config.data != (name := data_identity(prepared)):
        raise ValueError(f"config.data ({config.data!r}) must be the identity of {prepared.path}, {name!r}")
    device = torch.device(device)
    tables = tables_of_run(config, prepared.cardinalities, prepared.names)
    tables = [(_raw_table if prepared.has_raw_ids else _ranked)(table, prepared) for table in tables]
    with _seeding, torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tables that stay full are counted in the result
        torch.manual_seed(config.seed)
        # Ids are checked as they are read: the lookup need not look again on a GPU.
        dtype = getattr(torch, config.row_dtype)
        embeddings = EmbeddingCollection(tables, device=device, dtype=dtype, on_invalid_id="trust")
        num_dense = len(prepared.dense_names)
        torch.manual_seed((config.seed + NETWORK) % 2**64)
        return models.build(config.network, embeddings, num_dense=num_dense, preset=config.preset, device=device)


def _raw_table(table: Table, prepared: Prepared) -> Table:
    """A table that takes raw ids; a ``HotCold`` one ranks them by how often the training rows have them."""
    spec = table.scheme.spec(table.num_embeddings, table.embedding_dim)
    if spec.num_parameters > MOST_RAW_PARAMETERS:
        raise ValueError(
            f"scheme ({table.scheme}) would store {spec.num_parameters:,} numbers for {table.num_embeddings:,} raw ids"
            f" of {table.name}: GeneralizedQR(num_partitions=4), ChineseRemainder or HotCold store few"
        )
    counts = None
    if spec.num_own:
        ids, count = prepared.raw_counts(table.name)
        counts = RawCounts(torch.tensor(ids), torch.from_numpy(count))
    return dataclasses.replace(table, raw_ids=True, unknown="error", frequencies=counts)


def _ranked(table: Table, prepared: Prepared) -> Table:
    """A ``HotCold`` table with its frequencies in training, unless its ids come by frequency."""
    if not isinstance(table.scheme, HotCold):
        return table
    counts = torch.from_numpy(prepared.frequencies(table.name))
    return table if comes_by_frequency(counts) else dataclasses.replace(table, frequencies=counts)


def data_identity(prepared: Prepared) -> str:
    """A name for prepared data, the same wherever the folder lies and whatever prepared it.

    Hashed are the names, cardinalities and split, and the checksums of all rows.
    """
    meta = {key: prepared.meta[key] for key in ("num_rows", "dense", "categorical", "bags", "cardinalities", "split")}
    text = json.dumps([meta, prepared.checksums()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
