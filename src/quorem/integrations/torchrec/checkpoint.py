"""Checkpoints that fit any number of ranks, any plan and the single-device model, by torch.distributed.checkpoint."""

import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ...modules.meaning import spec_integers
from .names import collections, plain_tables
from .state import NamedTensors, Optimizers, state_of, targets_of

STEP = "step"
MEANING = "meaning."


def save(path: str | Path, model: nn.Module, optimizers: Optimizers = (), *, step: int = 0) -> None:
    """Save a model's weights and optimizer state. Each rank saves its part, so all ranks must call it.

    The names are those of the single-device model, whatever the plan. A folder without ``.metadata``, which is written
    last, is not complete.

    Args:
        path: a folder, the same for all ranks.
        model: the model, sharded or on a single device. The fused optimizers of sharded tables are found automatically.
        optimizers: the optimizers of the other parameters.
        step: a number that ``load`` returns.

    Raises:
        ValueError: if a fused optimizer is not SGD, Adagrad or row-wise Adagrad, or is row-wise over shards of columns.

    >>> import tempfile
    >>> from quorem import QR, EmbeddingCollection, Table
    >>> from quorem.integrations.torchrec import EmbeddingBagCollection
    >>> tables = [Table("user", 1000, 16, QR(4))]
    >>> folder = tempfile.mkdtemp()
    >>> save(folder, EmbeddingBagCollection(tables), step=7)
    >>> load(folder, EmbeddingCollection(tables))
    7
    """
    state = state_of(model, optimizers) | _meanings(model) | {STEP: torch.tensor(step)}
    with _quiet():
        state_dict_saver.save(state, checkpoint_id=path, no_dist=not dist.is_initialized())


def load(path: str | Path, model: nn.Module, optimizers: Optimizers = ()) -> int:
    """Load what ``save`` saved into a model of the same tables, sharded in any way, or on a single device.

    Args:
        path: the folder.
        model: the model to fill. The fused optimizers of its sharded tables are found automatically.
        optimizers: the optimizers of the other parameters, of the same kind as those that were saved.

    Returns:
        The step that was saved.

    Raises:
        FileNotFoundError: if the folder has no complete checkpoint.
        ValueError: if a weight, or the state of a fused optimizer, is missing or has another size, or if ids of a table
            now read different rows.

    >>> import tempfile
    >>> from quorem import EmbeddingCollection, Table
    >>> saved, loaded = (EmbeddingCollection([Table("user", 1000, 16)]) for _ in range(2))
    >>> folder = tempfile.mkdtemp()
    >>> save(folder, saved)
    >>> load(folder, loaded), torch.equal(loaded.dense(0), saved.dense(0))
    (0, True)
    """
    if not (Path(path) / ".metadata").exists():
        raise FileNotFoundError(f"{path} has no complete checkpoint: .metadata is missing")
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    sizes = {name: entry.size for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
    targets = targets_of(model, optimizers, sizes)
    meanings = _meanings(model)
    expected = {name: int(value) for name, value in meanings.items()}
    step = torch.tensor(0)
    _load(path, meanings | {STEP: step})
    if changed := [name.removeprefix(MEANING) for name, value in meanings.items() if int(value) != expected[name]]:
        rule = "must have the partitions, operation, permutation and order that were saved"
        raise ValueError(f"{', '.join(changed)} {rule}")
    _load(path, targets.tensors)
    for finish in targets.finish:
        finish()
    return int(step)


def _load(path: str | Path, tensors: NamedTensors) -> None:
    with torch.no_grad(), _quiet():
        state_dict_loader.load(tensors, checkpoint_id=path, no_dist=not dist.is_initialized())


def _meanings(model: nn.Module) -> NamedTensors:
    """A checksum of how each table maps ids to rows, so that tables of equal shapes are not confused."""
    specs = {f"{prefix}tables.{f.table}": f.spec for prefix, c in collections(model) for f in c.rows.features}
    for prefix, tables in plain_tables(model):
        specs |= {f"{prefix}tables.{t}": spec for t, spec in zip(tables.names, tables.specs, strict=True)}
    facts = {name: str(spec_integers(spec)) for name, spec in specs.items()}
    networks: dict[str, Any] = {
        prefix: list(cast(Any, collection.compose).paths) for prefix, collection in collections(model)
    }
    networks |= {prefix: list(tables.networks()) for prefix, tables in plain_tables(model)}
    # A layer holds the networks of several tables, and matrices are numbered, in the order of the tables.
    facts |= {f"{prefix}paths": str([list(group.tables) for group in g]) for prefix, g in networks.items() if g}
    narrow = {prefix: cast(Any, collection.compose).narrow for prefix, collection in collections(model)}
    narrow |= {prefix: tuple(tables.names[t] for t in tables.narrow) for prefix, tables in plain_tables(model)}
    facts |= {f"{prefix}projections": str(names) for prefix, names in narrow.items() if names}
    return {f"{MEANING}{name}": torch.tensor(zlib.crc32(fact.encode())) for name, fact in facts.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warning that it assumes a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
