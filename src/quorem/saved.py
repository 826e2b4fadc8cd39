"""Tables of a module in a ``state_dict``: each under its own name, with a description of what its rows mean."""

import warnings
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .partitions import Partition
from .schemes import Path, TableSpec

if TYPE_CHECKING:
    from .stored import StoredTables

EXTRA_STATE = "_extra_state"


def save_tables(tables: "StoredTables", destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """``nn.Module._save_to_state_dict`` of ``StoredTables``."""
    for name, table in tables.named_tables():
        destination[prefix + name] = table if keep_vars else table.detach()
    for name, tensor in {**ranks(tables), **others_of(tables)}.items():
        destination[prefix + name] = tensor if keep_vars else tensor.detach()
    if has_extra_state(tables):
        destination[prefix + EXTRA_STATE] = tables.get_extra_state()
    if hasattr(destination, "_metadata"):
        descriptions = {"meanings": meanings_of(tables), "pool_numbers": pool_numbers_of(tables)}
        destination._metadata[prefix[:-1]] |= {**descriptions, "bits": tables.bits}


def load_tables(
    tables: "StoredTables",
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """``nn.Module._load_from_state_dict`` of ``StoredTables``; if it adds to ``error_msgs``, it loads nothing."""
    for hook in tables._load_state_dict_pre_hooks.values():
        hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
    views = {prefix + name: table for name, table in tables.named_tables()}
    from_torch = f"{prefix}weight" in state_dict and f"{prefix}tables.0" not in state_dict
    if from_torch and tables.names == ("",) and tables.is_full() and not tables.bits:
        state_dict[f"{prefix}tables.0"] = state_dict.pop(f"{prefix}weight")
    others = {prefix + name: tensor for name, tensor in {**ranks(tables), **others_of(tables)}.items()}
    targets, extra = {**views, **others}, [prefix + EXTRA_STATE] if has_extra_state(tables) else []
    values = {key: whole(state_dict[key]) for key in targets if key in state_dict}
    missing_keys += [key for key in targets if key not in values]
    rows = {key: values[key] for key in views if key in values}
    if not rows and f"{prefix}weight" in state_dict:
        warnings.warn(
            f"{prefix}weight is a full table in the checkpoint: from_pretrained fits a scheme's tables to it",
            stacklevel=2,
        )
    if strict:
        missing_keys += [key for key in extra if key not in state_dict]
        unmatched = [key for key in state_dict if key.startswith(prefix) and key not in targets and key not in extra]
        unexpected_keys += [key for key in unmatched if key.removeprefix(prefix).split(".")[0] not in tables._modules]
    stored = tables.live_stored
    assign = local_metadata.get("assign_to_params_buffers", False) and len(rows) == len(views)
    assign = assign and not is_sharded(stored)
    wrong = wrong_shapes(targets, values) or _wrong_meanings(tables, prefix, rows, local_metadata)
    if stored.is_meta and rows and not assign:
        wrong.append(f"{prefix}stored is on the meta device: it takes every table at once, and with assign=True")
    error_msgs += wrong
    if wrong:
        return
    with torch.no_grad():
        for key, value in values.items():
            if key in others or not assign:
                targets[key].copy_(value)
        if assign:
            packed = torch.cat([values[key].detach().reshape(-1, stored.shape[1]) for key in views])
            tables.stored = nn.Parameter(packed, requires_grad=stored.requires_grad)
        elif rows and is_sharded(stored):
            write_shards_(stored, torch.cat([view.reshape(-1, stored.shape[1]) for view in views.values()]))
    for key in extra:
        if key in state_dict:
            tables.set_extra_state(state_dict[key])
    tables.register_integers()


def entry_name(kind: str, table: str, part: int | str) -> str:
    """The name of one tensor of a table: ``kind.table.part``, without ``table`` if the table has no name.

    >>> entry_name("tables", "user", 0), entry_name("ranks", "", "hot")
    ('tables.user.0', 'ranks.hot')
    """
    return f"{kind}.{table}.{part}" if table else f"{kind}.{part}"


class Names:
    """An object whose every attribute is the object itself.

    ``torch.distributed.checkpoint`` follows the names of a ``state_dict`` as attributes, also those that are none.
    """

    def __getattr__(self, name: str) -> "Names":
        if name.startswith("__") or name == "_fqn_modifiers":
            raise AttributeError(name)
        return self


class TransientNames(set[str]):
    """The names of buffers that are not saved in a ``state_dict``.

    It also claims to contain ``stored`` and the numbers of layers. These parameters are saved table by table under
    other names, and ``torch.distributed.checkpoint`` must not look for them. They are not real members of the set,
    since ``torch.export`` would drop them.
    """

    def __contains__(self, name: object) -> bool:
        return name == "stored" or str(name).isdigit() or super().__contains__(name)


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a ``DTensor``, of which each process has a part (``fully_shard``).

    The test is by attribute, since importing ``DTensor`` takes a second.
    """
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Any:
    """``tensor``, gathered from all processes if it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def write_shards_(stored: Any, rows: Tensor) -> None:
    """Write ``rows``, which every process has in full, into the sharded ``stored``."""
    from torch.distributed.tensor import distribute_tensor

    stored.copy_(distribute_tensor(rows, stored.device_mesh, stored.placements))


def others_of(tables: "StoredTables") -> dict[str, Tensor]:
    """Parameters and persistent buffers other than ``stored``: those of a subclass, or of pruning."""
    transient = tables._non_persistent_buffers_set
    named = {**tables._parameters, **{n: b for n, b in tables._buffers.items() if n not in transient}}
    return {name: tensor for name, tensor in named.items() if tensor is not None and name != "stored"}


def has_extra_state(tables: "StoredTables") -> bool:
    """Whether a subclass saves a state of its own."""
    return type(tables).get_extra_state is not nn.Module.get_extra_state


def ranks(tables: "StoredTables") -> dict[str, Tensor]:
    """The lists of hot and cold ids by name, for tables that were given frequencies."""
    return {
        entry_name("ranks", name, kind): ids
        for name, lists in zip(tables.names, tables.ranks_of, strict=True)
        if lists is not None
        for kind, ids in lists._asdict().items()
    }


def wrong_shapes(views: Mapping[str, Tensor], values: Mapping[str, Any]) -> list[str]:
    """An error message for each of ``values`` that differs in shape from its view, or of which one holds codes."""
    wrong = [
        f"{key} is {tuple(getattr(value, 'shape', ())) or type(value).__name__} in the checkpoint and"
        f" {tuple(views[key].shape)} here: was it saved under another scheme, size or embedding_dim?"
        for key, value in values.items()
        if not isinstance(value, Tensor) or value.shape != views[key].shape
    ]
    return wrong or [
        f"{key} is {value.dtype} in the checkpoint and {views[key].dtype} here: one was saved after quantize_"
        for key, value in values.items()
        if value.is_floating_point() != views[key].is_floating_point()
        and torch.uint8 in (value.dtype, views[key].dtype)
    ]


def _wrong_meanings(
    tables: "StoredTables", prefix: str, rows: Mapping[str, Tensor], local_metadata: Mapping[str, Any]
) -> list[str]:
    """An error message for each table of which ``rows`` are loaded that mean something else in the checkpoint."""
    bits = local_metadata.get("bits", tables.bits)
    if bits != tables.bits:
        return [f"{prefix}tables hold numbers of {bits} bits in the checkpoint and of {tables.bits} here"]
    pairs = zip(tables.names, tables.extents, strict=True)
    absent = {name for name, extents in pairs if extents and prefix + entry_name("tables", name, 0) not in rows}
    wrong = []
    for kind, meanings in (("meanings", meanings_of(tables)), ("pool_numbers", pool_numbers_of(tables))):
        saved = local_metadata.get(kind, {})
        wrong += [
            f"{prefix}tables{'.' * bool(name)}{name} holds {saved[name]} in the checkpoint and {meaning} here"
            for name, meaning in meanings.items()
            if saved.get(name, meaning) != meaning and name not in absent
        ]
    return wrong


def meanings_of(tables: "StoredTables") -> dict[str, str]:
    """For each table, as text: which rows an id reads, how they are combined, and whether ids are raw."""
    triples = zip(tables.names, tables.specs, tables.raw_ids, strict=True)
    return {name: meaning(spec) + raw * ", of raw ids" for name, spec, raw in triples}


def pool_numbers_of(tables: "StoredTables") -> dict[str, str]:
    """For each table of a pool, as text: its numbers in the pool, which follow from the tables before it."""
    texts = {}
    for t, spec in enumerate(tables.specs):
        if spec.pool is not None:
            first, mixing = tables.pool_numbering(t)
            texts[tables.names[t]] = f"numbers from {first} of {2**mixing.bits} in pool {spec.pool.name!r}"
    return texts


def meaning(spec: TableSpec) -> str:
    """Which rows an id reads and how they are combined, as text; a checkpoint must agree on this besides shapes."""
    parts = [
        f"{p.stride}:{p.size}" if isinstance(p, Partition) else f"index {zlib.crc32(p.index.numpy().tobytes()):08x}"
        for p in spec.partitions
    ]
    how: str = spec.operation if len(parts) > 1 else "table"
    if isinstance(spec.scheme, Path):
        how = f"{spec.scheme.activation} path"
    permutation = spec.permutation
    order = "" if permutation is None else f" after {permutation.multiplier} i + {permutation.shift}"
    if not spec.num_own and spec.pool is None:
        return f"{how} of {', '.join(parts)}{order}"
    cold = f"{how} of {', '.join(parts)}{order}" if spec.pool is None else f"sums of {spec.pool}"
    return f"{spec.num_hot} hot, {spec.num_rest} rest, {cold}"
