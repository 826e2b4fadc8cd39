"""Weights and optimizer state by names that do not depend on the plan, to save, load, or copy to another model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined]
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from ...modules import collection as single
from ...modules.storage import entry_name
from ...ops.layout import Extent
from ...optim import RowOptimizer
from .collections import Collection, EmbeddingBagCollection
from .names import collections, id_lists, plain_tables, split_rows, table_rows

NamedTensors = dict[str, Any]  # tensors and sharded tensors, by name
Optimizers = Sequence[torch.optim.Optimizer]


def weights(model: nn.Module) -> NamedTensors:
    """Every weight of a model, sharded or not, by its plan-independent name; writing to one changes the model.

    >>> from quorem import QR, Table
    >>> from quorem.integrations.torchrec import EmbeddingBagCollection
    >>> list(weights(EmbeddingBagCollection([Table("user", 1000, 16, QR(4, operation="add"))])))
    ['tables.user.0', 'tables.user.1']
    """
    state: NamedTensors = dict(model.state_dict())
    for prefix, collection in collections(model):
        for key, rows in table_rows(collection).items():
            parts = split_rows(state.pop(prefix + key), rows)
            state.update({prefix + name: part for name, part in parts.items()})
        state.update({prefix + name: ids for name, ids in id_lists(collection).items()})
        networks = f"{prefix}compose."
        for key in [key for key in state if key.startswith(networks)]:
            state[prefix + key.removeprefix(networks)] = state.pop(key)
    for prefix, tables in plain_tables(model):
        for key in ("stored", "meaning", "ranks"):
            state.pop(prefix + key, None)
        state.update({prefix + name: table.detach() for name, table in tables.named_tables()})
        for table, ranks in zip(tables.names, tables.ranks_of, strict=True):
            lists = {} if ranks is None else ranks._asdict()
            state.update({prefix + entry_name("ranks", table, kind): ids for kind, ids in lists.items()})
    return state


def state_of(model: nn.Module, optimizers: Optimizers = ()) -> NamedTensors:
    """Weights and optimizer state by plan-independent names; those of optimizer state start with ``optimizer.``.

    Args:
        model: a model with TorchRec's tables, sharded or not, or a single-device model. The fused optimizers of sharded
            tables are found automatically.
        optimizers: the optimizers of the other parameters: of ``torch.optim``, ``quorem.optim``, or TorchRec's wrappers
            of those.

    Raises:
        ValueError: if a fused optimizer is not SGD, Adagrad or row-wise Adagrad, or is row-wise over shards of columns.
    """
    state = weights(model) | _fused_state(model)
    parameters = _parameters(model)
    for optimizer in optimizers:
        saved = optimizer.state_dict()["state"] if isinstance(optimizer, RowOptimizer) else None
        for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            values = optimizer.state.get(parameter, {}) if saved is None else saved.get(i, {})
            for key, value in values.items():
                if isinstance(value, Tensor):
                    state |= parameters[parameter].parts(key, value.detach())
    return state


@dataclass
class Targets:
    """Where a state is loaded to: tensors to fill, and functions to call once they are filled."""

    tensors: NamedTensors
    finish: list[Callable[[], None]] = field(default_factory=list)


def targets_of(model: nn.Module, optimizers: Optimizers, sizes: Mapping[str, Size]) -> Targets:
    """Where a state is loaded to whose tensors have these ``sizes``, by the names of ``state_of``.

    If the state has only weights, optimizers are left as they are.

    Raises:
        ValueError: if a weight, or the state of a fused optimizer, is missing or has another size.
    """
    needed = weights(model)
    if any(name.startswith("optimizer.") for name in sizes):
        needed |= _fused_state(model)
    if missing := sorted(set(needed) - set(sizes)):
        raise ValueError(f"the saved state must have {', '.join(missing[:4])}{', ...' * (len(missing) > 4)}")
    for name, value in needed.items():
        if value.size() != sizes[name]:
            raise ValueError(f"{name} is {tuple(sizes[name])} in the saved state and {tuple(value.size())} here")
    targets = Targets(needed)
    # They copy the lists of hot and cold ids.
    targets.finish += [tables.register_integers for _, tables in plain_tables(model)]
    parameters = _parameters(model)
    for optimizer in optimizers:
        loaded: dict[int, dict[str, Tensor]] = {}
        named = [parameters[p] for group in optimizer.param_groups for p in group["params"]]
        for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            for key, size in named[i].sizes(sizes).items():
                dtype, device = torch.promote_types(parameter.dtype, torch.float32), parameter.device
                value = torch.zeros(size, dtype=dtype, device=device) if size else torch.zeros(())  # number of steps
                loaded.setdefault(i, {})[key] = value
                targets.tensors |= named[i].parts(key, loaded[i][key])
        targets.finish.append(partial(_load_state, optimizer, loaded, named))
    return targets


def copy_state_(
    target: nn.Module,
    source: nn.Module,
    *,
    target_optimizers: Optimizers = (),
    source_optimizers: Optimizers = (),
) -> None:
    """Copy the weights and the optimizer state from one model to another with the same tables.

    Either may be sharded by TorchRec, unsharded, or a single-device model. If one is sharded, all ranks must call it.
    If the source's optimizers have no state, or are not given, those of the target are left as they are.

    Args:
        target: the model to fill. The fused optimizers of its sharded tables are found automatically.
        source: the model to read; the same on every rank unless it is sharded.
        target_optimizers: the optimizers of the target's other parameters.
        source_optimizers: the optimizers of the source's other parameters.

    Raises:
        ValueError: if a weight, or the state of a fused optimizer of the target, is missing or has another size.

    >>> from quorem import EmbeddingCollection, Table
    >>> from quorem.integrations.torchrec import EmbeddingBagCollection
    >>> tables = [Table("user", 1000, 16)]
    >>> source, target = EmbeddingCollection(tables), EmbeddingBagCollection(tables)
    >>> copy_state_(target, source)
    >>> torch.equal(target.bags.embedding_bags["user"].weight, source.dense(0))
    True
    """
    state = gathered(state_of(source, source_optimizers))
    targets = targets_of(target, target_optimizers, {name: value.size() for name, value in state.items()})
    with torch.no_grad():
        for name, value in targets.tensors.items():
            fill_(value, state[name])
    for finish in targets.finish:
        finish()


def to_collection(module: nn.Module) -> single.EmbeddingCollection:
    """A single-device collection, on the CPU, with the weights of TorchRec's tables.

    If the tables are sharded, all ranks must call it, and each gets the whole collection. ``copy_state_`` copies the
    optimizer state.

    Args:
        module: an ``EmbeddingBagCollection`` or ``EmbeddingCollection``, sharded or not.

    Raises:
        TypeError: if ``module`` is neither.

    >>> bags = EmbeddingBagCollection([single.Table("user", 1000, 16), single.Table("day", 7, 16)])
    >>> to_collection(bags).names
    ('user', 'day')
    """
    inner = get_unwrapped_module(module)
    if not isinstance(inner, Collection):
        raise TypeError(f"module ({type(inner).__name__}) must be a collection of quorem.integrations.torchrec")
    mode = inner.mode if isinstance(inner, EmbeddingBagCollection) else "sum"
    dtype = next(iter(weights(module).values())).dtype
    collection = single.EmbeddingCollection(
        inner.tables, mode=mode, on_invalid_id=inner.rows.on_invalid_id, dtype=dtype, device="cpu"
    )
    copy_state_(collection, module)
    return collection


def gathered(state: NamedTensors) -> dict[str, Tensor]:
    """The state with every sharded tensor gathered, on every rank; a rank may have names that others do not have."""
    if not any(isinstance(value, ShardedTensor) for value in state.values()):  # the same on all ranks
        return state
    sharded = {k: (tuple(v.size()), v.dtype) for k, v in state.items() if isinstance(v, ShardedTensor)}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, sharded)
    sharded = {name: shape for of_rank in of_ranks for name, shape in of_rank.items()}
    whole = {name: value for name, value in state.items() if name not in sharded}
    for name, (size, dtype) in sorted(sharded.items()):
        value = torch.zeros(size, dtype=dtype)
        for shard in state[name].local_shards() if name in state else ():
            _part(value, shard.metadata).copy_(shard.tensor)
        dist.all_reduce(value)
        whole[name] = value
    return whole


def fill_(target: Any, value: Tensor) -> None:
    """Copy ``value`` into a tensor; or into a sharded tensor, of which this rank fills its shards."""
    if isinstance(target, ShardedTensor):
        for shard in target.local_shards():
            shard.tensor.copy_(_part(value, shard.metadata))
    else:
        target.copy_(value)


def _part(value: Tensor, shard: Any) -> Tensor:
    """The view of ``value`` at the place of a shard."""
    for dim, (offset, size) in enumerate(zip(shard.shard_offsets, shard.shard_sizes, strict=True)):
        value = value.narrow(dim, offset, size)
    return value


def _fused_state(model: nn.Module) -> NamedTensors:
    """The state of the fused optimizers of sharded tables; each rank has the state of its own tables."""
    if not isinstance(model, DistributedModelParallel):
        return {}
    fused = model.fused_optimizer.state_dict()["state"]
    state: NamedTensors = {}
    for prefix, collection in collections(model):
        for key, rows in table_rows(collection).items():
            values = {name.rpartition(".")[2]: value for name, value in fused.get(prefix + key, {}).items()}
            if not values:
                continue
            if set(values) != {"momentum1"}:
                raise ValueError(f"the optimizer of {prefix}{key} must be SGD, Adagrad or row-wise Adagrad")
            momentum = values["momentum1"]
            if momentum.size()[0] != sum(rows.values()):
                raise ValueError(
                    f"{prefix}{key} has row-wise Adagrad over shards of columns, which no other plan can resume"
                )
            parts = split_rows(momentum, rows)
            state.update({f"optimizer.{prefix}{name}.sum": part for name, part in parts.items()})
    return state


@dataclass(frozen=True)
class Named:
    """The plan-independent names in a parameter, and how a tensor of its shape is cut into the parts of these names."""

    shape: Size
    names: tuple[str, ...]
    cut: Callable[[Tensor], Sequence[Tensor]]
    extents: Sequence[Extent] = ()  # extents of the stored tables, in quorem's own modules

    def parts(self, key: str, value: Tensor) -> NamedTensors:
        """The parts of the optimizer's tensor ``key`` for the parameter, by name; each is a view."""
        parts = [value] * len(self.names) if value.dim() == 0 else self.cut(value)
        return {f"optimizer.{name}.{key}": part for name, part in zip(self.names, parts, strict=True)}

    def sizes(self, sizes: Mapping[str, Size]) -> dict[str, Size]:
        """The size of each tensor of the optimizer that was saved for the parameter, by key."""
        prefixes = [f"optimizer.{name}." for name in self.names]
        first = prefixes[0]
        keys = [name.removeprefix(first) for name in sizes if name.startswith(first)]
        dims = {key: len(sizes[first + key]) for key in keys if all(prefix + key in sizes for prefix in prefixes)}
        if self.cut is _uncut:
            return {key: sizes[first + key] for key in dims}
        return {key: self.shape[:dim] for key, dim in dims.items()}


def _uncut(value: Tensor) -> Sequence[Tensor]:
    return [value]


def _parameters(model: nn.Module) -> dict[Tensor, Named]:
    """The names in every parameter."""
    named: dict[Tensor, Named] = {}
    by_name = dict(model.named_parameters())
    for name, parameter in by_name.items():
        named[parameter] = Named(parameter.shape, (name,), _uncut)
    for prefix, collection in collections(model):
        for key, rows in table_rows(collection).items():
            parameter, sizes = by_name[prefix + key], list(rows.values())
            names = tuple(prefix + name for name in rows)
            named[parameter] = Named(parameter.shape, names, partial(_cut_rows, sizes))
        for name, parameter in by_name.items():
            if name.startswith(f"{prefix}compose."):  # networks of path-based tables
                name = prefix + name.removeprefix(f"{prefix}compose.")
                named[parameter] = Named(parameter.shape, (name,), _uncut)
    for prefix, tables in plain_tables(model):
        (stored,) = tables.parameters(recurse=False)
        names = tuple(prefix + table for table, _ in tables.named_tables())
        extents = tables.all_extents
        named[stored] = Named(stored.shape, names, partial(_cut_extents, extents), extents)
    return named


def _cut_rows(rows: list[int], value: Tensor) -> Sequence[Tensor]:
    """Parts of a tensor for TorchRec's table; its row-wise Adagrad for replicated tables has a column ``[R, 1]``."""
    return (value[:, 0] if value.dim() == 2 and value.shape[1] == 1 else value).split(rows)


def _cut_extents(extents: list[Extent], value: Tensor) -> Sequence[Tensor]:
    """Parts of a tensor for quorem's storage; where it has one number for each row of a table, ``pitch`` times."""
    if value.dim() == 1:
        return [value[e.base : e.base + e.rows * e.pitch : e.pitch] for e in extents]
    return [e.of(value) for e in extents]


def _load_state(optimizer: torch.optim.Optimizer, loaded: dict[int, dict[str, Tensor]], named: list[Named]) -> None:
    """Give the optimizer the loaded tensors, by the position of their parameters."""
    for i, state in loaded.items():
        for value in state.values():
            if value.dim() == 1:
                for e in named[i].extents:  # only the first of each row's numbers was loaded
                    rows = value[e.base : e.base + e.rows * e.pitch].view(e.rows, e.pitch)
                    rows[:, 1:] = rows[:, :1]
    if isinstance(optimizer, RowOptimizer):
        saved = optimizer.state_dict()
        # A fused Adagrad does not count steps; the count only matters for ``lr_decay``.
        with_step = {i: {"step": torch.zeros(()), **tensors} for i, tensors in loaded.items()}
        optimizer.load_state_dict({**saved, "state": saved["state"] | with_step})
        return
    rowwise = isinstance(getattr(optimizer, "_optimizer", optimizer), RowWiseAdagrad)
    for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for key, value in loaded.get(i, {}).items():
            optimizer.state[parameter][key] = value[:, None] if rowwise and value.dim() == 1 else value
