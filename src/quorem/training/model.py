"""The model of a run, from its configuration and the data's cardinalities; and the name of the data."""

import hashlib
import json
import threading
import warnings

import numpy as np
import torch
from torch import nn

from .. import models
from ..collection import EmbeddingCollection
from ..data.batches import Prepared
from .config import RunConfig
from .tables import tables_of

BLOCKS, BLOCK_ROWS = 64, 1024  # of the rows that name the data

_seeding = threading.Lock()  # of torch's global generator


def build_model(config: RunConfig, prepared: Prepared, device: torch.device | str = "cpu") -> nn.Module:
    """The network of a run around its tables, started from the seed.

    The same configuration and data give the same bits on one kind of device. The global generator is left as it was.

    Args:
        config: network, scheme, threshold, width and seed.
        prepared: names and cardinalities of the features, and the number of dense ones.
        device: where the model is.

    Raises:
        ValueError: if ``config.data`` is not the name of ``prepared``.
    """
    if config.data != (name := data_identity(prepared)):
        raise ValueError(f"config.data ({config.data!r}) must be the identity of {prepared.path}, {name!r}")
    device = torch.device(device)
    tables = tables_of(
        prepared.cardinalities,
        config.scheme,
        threshold=config.threshold,
        embedding_dim=config.embedding_dim,
        names=prepared.names,
    )
    with _seeding, torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tables that stay full are counted in the result
        torch.manual_seed(config.seed)
        # Ids are checked as they are read: the lookup need not look again on a GPU.
        embeddings = EmbeddingCollection(tables, device=device, on_invalid_id="trust")
        num_dense = len(prepared.dense_names)
        return models.build(config.network, embeddings, num_dense=num_dense, preset=config.preset, device=device)


def data_identity(prepared: Prepared) -> str:
    """A name for prepared data, the same wherever the folder lies and whatever prepared it.

    Hashed are the names, cardinalities and split, all labels, and blocks of rows spread over the whole log.
    """
    meta = {key: prepared.meta[key] for key in ("num_rows", "dense", "categorical", "bags", "cardinalities", "split")}
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    digest.update(prepared.all.labels.numpy().data)
    step = max(BLOCK_ROWS, prepared.num_rows // BLOCKS)
    for start in range(0, prepared.num_rows, step):
        block = prepared.all.rows(start, min(start + BLOCK_ROWS, prepared.num_rows))
        parts = [block.dense, block.ids, *(t for bag in block.bags.values() for t in (bag.values, bag.offsets))]
        for part in parts:
            digest.update(np.ascontiguousarray(part.numpy()).data)
    return digest.hexdigest()[:16]
