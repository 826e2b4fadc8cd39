"""The stored tables of a module: one weight, found by integers, with a name for each table in it."""

import warnings
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import init
from .operations import OPERATIONS
from .ops import layout, lookup, reference, update
from .partitions import Partition
from .paths import PathNetworks
from .schemes import Path, Scheme, TableSpec

INVALID_ID_MODES = ("raise", "warn", "trust")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_alive: weakref.WeakSet["Tables"] = weakref.WeakSet()


class Tables(nn.Module):
    """What ``Embedding``, ``EmbeddingBag`` and ``EmbeddingCollection`` share: storage, start, saving, lookup.

    All tables lie in one parameter ``weight`` ``[R, W]``, so a lookup is one op whatever the number of tables;
    ``named_tables`` gives each as a view, and ``state_dict`` saves each under its own name.
    """

    slots: Tensor
    parts: Tensor
    maps: Tensor
    spans: Tensor
    limits: Tensor
    invalid_ids: Tensor
    ids_argument = "input"  # what ``forward`` calls the ids

    def __init__(
        self,
        names: Sequence[str],
        specs: Sequence[TableSpec],
        padding: Sequence[int | None],
        *,
        sparse: bool,
        on_invalid_id: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if on_invalid_id not in INVALID_ID_MODES:
            raise ValueError(f"on_invalid_id ({on_invalid_id!r}) must be one of {INVALID_ID_MODES}")
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype ({dtype}) must be one of {DTYPES}")
        self.names, self.specs, self.padding = tuple(names), tuple(specs), tuple(padding)
        self.sparse, self.on_invalid_id = sparse, on_invalid_id
        self.titles = "\n".join(f"table {name}" if name else f"{type(self).__name__}" for name in names)
        laid = layout.build(specs, padding)
        self.extents = laid.extents
        self.weight = nn.Parameter(torch.empty(laid.num_rows, laid.width, device=device, dtype=dtype))
        groups = _path_groups(specs)
        networks = [PathNetworks(group, specs, padding, laid.spans, device, dtype) for group in groups]
        self.paths = nn.ModuleList(networks) if networks else ()
        self._lookups, self._warned = 0, False
        _alive.add(self)
        self.reset_parameters()
        _say_fallbacks(self)

    @property
    def num_parameters(self) -> int:
        """Stored parameters."""
        return sum(spec.num_parameters for spec in self.specs)

    @property
    def compression(self) -> float:
        """Parameters of the full tables over stored parameters."""
        return sum(spec.num_embeddings * spec.embedding_dim for spec in self.specs) / self.num_parameters

    def reset_parameters(self, start: str = "matched") -> None:
        """Start the tables afresh: ``"matched"``, ``"symmetric"`` or ``"reference"`` (see ``quorem.init``)."""
        self._place_integers()  # after to_empty() the buffers hold nothing
        for f, spec in enumerate(self.specs):
            init.start_(self.tables(f), spec, start)
        for group in self._path_networks():
            group.reset_parameters()

    def tables(self, feature: int = 0) -> list[Tensor]:
        """The stored tables of one feature, views ``[rows, width]`` of ``weight``."""
        update.flush_(self.weight)
        return [extent.of(self.weight) for extent in self.extents[feature]]

    def named_tables(self, values: Tensor | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and view of each stored table.

        Args:
            values: a tensor shaped as ``weight`` to take the views of, such as ``weight.grad``; ``weight`` if None.
        """
        if values is None:
            update.flush_(self.weight)
        for name, extents in zip(self.names, self.extents, strict=True):
            for j, extent in enumerate(extents):
                view = extent.of(self.weight if values is None else values)
                yield f"tables.{name}.{j}" if name else f"tables.{j}", view

    def dense(self, feature: int = 0) -> Tensor:
        """The table that a feature stands for, ``[n, D]``, straight from the paper's equations.

        Differentiable. Feature generation gives ``[n, K, D]``.
        """
        spec, pad = self.specs[feature], self.padding[feature]
        ids = torch.arange(spec.num_embeddings, device=self.weight.device)
        placed = ids if spec.permutation is None else spec.permutation(ids)
        rows = [table[p(placed)] for table, p in zip(self.tables(feature), spec.partitions, strict=False)]
        dense = OPERATIONS[spec.operation](*rows)
        for group in self._path_networks():
            if feature in group.members:
                dense = group(dense, ids, torch.full_like(ids, group.members.index(feature)))
        return dense if pad is None else dense.index_fill(0, torch.tensor([pad], device=ids.device), 0)

    def num_duplicates(self, feature: int = 0) -> int:
        """Number of ids whose vector equals that of a lower id: 0 where each has a vector of its own.

        Theorem 1 promises that for ``concat`` over distinct rows; ``add`` and ``mult`` can collide, and a hash does.
        """
        vectors = self.dense(feature).detach().flatten(1)
        return len(vectors) - len(vectors.unique(dim=0))

    def _lookup(self, ids: Tensor) -> Tensor:
        """Composed vectors ``[B, S, W]`` of ``ids`` ``[B, F]``."""
        check_device(self.weight, self.ids_argument, ids)
        integers = self._integers()
        invalid = self.invalid_ids if self._counts_invalid(ids) else None
        out = lookup.lookup(ids, self.weight, *integers, names=self.titles, sparse=self.sparse, invalid=invalid)
        if invalid is not None:
            self._report_invalid()
        for group in self._path_networks():
            out = group.transform(out, ids)
        return out

    def _bag(self, ids: Tensor, offsets: Tensor, sample_weights: Tensor | None, mean: bool) -> Tensor:
        """Composed, then pooled vectors ``[B, S, W]`` of jagged ``ids`` ``[V]``; ``offsets`` ``[F * B + 1]``."""
        check_device(self.weight, self.ids_argument, ids, offsets, sample_weights)
        integers = self._integers()
        if self._counts_invalid(ids):
            torch.ops.quorem.count_invalid_(ids, offsets, self.invalid_ids, *integers)
            self._report_invalid()
        out = lookup.bag(
            ids, offsets, sample_weights, self.weight, *integers, mean=mean, names=self.titles, sparse=self.sparse
        )
        for group in self._path_networks():  # the op pooled their rows; they have to be transformed before
            out = out.index_copy(1, group.columns, self._path_bag(group, ids, offsets, sample_weights, mean))
        return out

    def _path_bag(
        self, group: PathNetworks, ids: Tensor, offsets: Tensor, sample_weights: Tensor | None, mean: bool
    ) -> Tensor:
        """Transformed, then pooled vectors of the features of one group, ``[B, slots of the group, W]``."""
        bags, feature = reference.bags_of(ids, offsets, self.spans)
        members, member = len(group.members), group.member[feature]
        own = (member >= 0) & (torch.arange(ids.shape[0], device=ids.device) < offsets[-1])
        member = member.clamp(min=0)
        slot = group.columns.view(members, -1)[member]
        rows, valid = reference.rows_of(ids[:, None], self.slots[slot], self.parts[slot][..., :1, :], self.maps)
        valid = valid & own[:, None]
        vectors = lookup.gather(rows[..., 0], self.weight, self.sparse).flatten(1)
        vectors = group(vectors, ids, member).to(reference.accumulator(self.weight))
        factor = reference.scale(bags, valid, sample_weights, offsets, mean, vectors.dtype)[:, 0]
        vectors = torch.where(valid[:, :1], vectors * factor, 0)
        batch = (offsets.shape[0] - 1) // self.spans.shape[0]
        place = bags % reference.larger(batch, 1) * members + member
        pooled = vectors.new_zeros((batch + 1) * members, vectors.shape[1]).index_add(0, place, vectors)
        return pooled[: batch * members].view(batch, group.columns.shape[0], self.weight.shape[1]).to(self.weight.dtype)

    def _integers(self) -> tuple[Tensor, ...]:
        """The layout, as the ops take it."""
        buffers = self._buffers  # an attribute of a module takes longer to find
        return buffers["slots"], buffers["parts"], buffers["maps"], buffers["spans"]  # type: ignore[return-value]

    def _path_networks(self) -> list[PathNetworks]:
        return cast(list[PathNetworks], list(self.paths))

    def _counts_invalid(self, ids: Tensor) -> bool:
        """Whether ids out of range are counted; the CPU ops raise by themselves."""
        return ids.is_cuda and self.on_invalid_id != "trust"

    def _report_invalid(self) -> None:
        """Do what ``on_invalid_id`` says about the ids that were counted."""
        if self.on_invalid_id == "raise":
            torch._assert_async(self.invalid_ids == 0, f"an id is out of range in {self.titles!r}")
            return
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return
        self.__dict__["_lookups"] += 1  # a module's own assignment takes longer
        if not self._warned and self._lookups & (self._lookups - 1) == 0:
            self._warned = self.warn_invalid_ids() > 0

    def warn_invalid_ids(self) -> int:
        """Number of ids out of range that a GPU has seen so far, with a warning if there were any.

        Called by itself at the 1st, 2nd, 4th, 8th, ... lookup until it has warned, since reading the count waits for
        the GPU.
        """
        count = int(self.invalid_ids)
        if count:
            tables = ", ".join(self.titles.split("\n"))
            warnings.warn(f"{count} ids out of range in {tables}: each gave a vector of zeros", stacklevel=2)
        return count

    def _place_integers(self) -> None:
        """(Re)build the layout's buffers where the weight is; they hold no learned state."""
        laid = layout.build(self.specs, self.padding)
        integers = {"slots": laid.slots, "parts": laid.parts, "maps": laid.maps, "spans": laid.spans}
        integers["limits"] = laid.slots[laid.spans[:, 0], layout.LIMIT]
        integers["invalid_ids"] = torch.zeros((), dtype=torch.int64, device="cpu")
        for name, values in integers.items():
            self.register_buffer(name, values.to(self.weight.device), persistent=False)
        for group in self._path_networks():
            group.place_integers(self.weight.device)

    def __getstate__(self) -> Any:
        update.flush_(self.weight)  # a copy owes nothing
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _alive.add(self)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, table in self.named_tables():
            destination[prefix + name] = table if keep_vars else table.detach()
        if hasattr(destination, "_metadata"):
            meanings = {name: _meaning(spec) for name, spec in zip(self.names, self.specs, strict=True)}
            destination._metadata[prefix[:-1]]["meanings"] = meanings

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        tables = {prefix + name: table for name, table in self.named_tables()}
        found = {key: state_dict[key] for key in tables if key in state_dict}
        missing_keys += [key for key in tables if key not in found]
        if not found and f"{prefix}weight" in state_dict:
            warnings.warn(
                f"{prefix}weight is a full table in the checkpoint: from_pretrained fits a scheme's tables to it",
                stacklevel=2,
            )
        if strict:
            own = (key for key in state_dict if key.startswith(prefix) and key not in tables)
            unexpected_keys += [key for key in own if key.removeprefix(prefix).split(".")[0] not in self._modules]
        wrong = [
            f"{key} is {tuple(getattr(value, 'shape', ())) or type(value).__name__} in the checkpoint and"
            f" {tuple(tables[key].shape)} here: was it saved under another scheme, size or embedding_dim?"
            for key, value in found.items()
            if not isinstance(value, Tensor) or value.shape != tables[key].shape
        ]
        saved = local_metadata.get("meanings", {})
        wrong = wrong or [
            f"{prefix}tables{'.' * bool(name)}{name} holds {saved[name]} in the checkpoint and {_meaning(spec)} here"
            for name, spec in zip(self.names, self.specs, strict=True)
            if saved.get(name, _meaning(spec)) != _meaning(spec)
        ]
        assign = local_metadata.get("assign_to_params_buffers", False)
        if self.weight.is_meta and found and not (assign and len(found) == len(tables)):
            wrong.append(f"{prefix}weight is on the meta device: it takes every table at once, and with assign=True")
        error_msgs += wrong
        if wrong:
            return
        if assign and len(found) == len(tables):
            packed = torch.cat([found[key].detach().reshape(-1, self.weight.shape[1]) for key in tables])
            self.weight = nn.Parameter(packed, requires_grad=self.weight.requires_grad)
        else:
            with torch.no_grad():
                for key, value in found.items():
                    tables[key].copy_(value)
        self._place_integers()


def owner(weight: Tensor) -> Tables | None:
    """The tables whose ``weight`` this is."""
    return next((tables for tables in _alive if tables.weight is weight), None)


def check_device(weight: Tensor, argument: str, *inputs: Tensor | None) -> None:
    """Raise ValueError unless ids, and offsets and sample weights where there are any, are where the tables are."""
    for name, tensor in zip((argument, "offsets", "per_sample_weights"), inputs, strict=False):
        if tensor is not None and tensor.device != weight.device:
            raise ValueError(f"{name} is on {tensor.device} but must be on {weight.device}, where the tables are")


def check_ids(ids: Tensor, argument: str) -> None:
    """Raise TypeError unless ``ids`` is a tensor of int32 or int64."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"{argument} ({type(ids).__name__}) must be a Tensor")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{argument} dtype ({ids.dtype}) must be torch.int32 or torch.int64")


def check_offsets(offsets: Tensor, num_ids: int) -> Tensor:
    """``offsets`` as int64, or ValueError where they do not start at 0, rise, and end within the ids."""
    check_ids(offsets, "offsets")
    if offsets.dim() != 1:
        raise ValueError(f"offsets has shape {tuple(offsets.shape)} but must be 1-D")
    offsets = offsets.long()
    if offsets.device.type == "cpu" and not torch.compiler.is_compiling() and len(offsets):
        if offsets[0] != 0:
            raise ValueError(f"offsets[0] ({int(offsets[0])}) must be 0")
        if (offsets.diff() < 0).any():
            raise ValueError(f"offsets ({offsets.tolist()[:8]}...) must not decrease")
        if offsets[-1] > num_ids:
            raise ValueError(f"offsets[-1] ({int(offsets[-1])}) must be at most the number of ids ({num_ids})")
    return offsets


def check_sample_weights(weights: Tensor, ids: Tensor, argument: str) -> None:
    """Raise TypeError or ValueError unless ``weights`` holds a floating-point number for each of ``ids``."""
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        got = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"per_sample_weights ({got}) must be a floating-point Tensor")
    if weights.shape != ids.shape:
        raise ValueError(
            f"per_sample_weights {tuple(weights.shape)} must have the shape of {argument} {tuple(ids.shape)}"
        )


def check_scheme(scheme: Scheme) -> None:
    """Raise TypeError unless ``scheme`` is one."""
    if not isinstance(scheme, Scheme):
        raise TypeError(f"scheme ({scheme!r}) must be a Scheme, such as quorem.QR(num_collisions=4)")


def check_padding(padding_idx: int | None, n: int) -> int | None:
    """``padding_idx`` counted from the front, or ValueError where it is outside the table."""
    if padding_idx is None:
        return None
    if isinstance(padding_idx, bool) or not hasattr(padding_idx, "__index__"):
        raise TypeError(f"padding_idx ({padding_idx!r}) must be an int or None")
    if not -n <= padding_idx < n:
        raise ValueError(f"padding_idx ({padding_idx}) must be within num_embeddings ({n})")
    return int(padding_idx) % int(n)


def _path_groups(specs: Sequence[TableSpec]) -> list[list[int]]:
    """Features whose path networks have one shape, and so run together."""
    groups: dict[Any, list[int]] = {}
    for f, spec in enumerate(specs):
        if isinstance(spec.scheme, Path):
            shape = (spec.embedding_dim, spec.scheme.hidden, spec.scheme.activation, len(spec.partitions))
            groups.setdefault(shape, []).append(f)
    return list(groups.values())


def _meaning(spec: TableSpec) -> str:
    """Which rows an id takes and how they are combined: what a checkpoint must agree on beside shapes."""
    parts = [
        f"{p.stride}:{p.size}" if isinstance(p, Partition) else f"index {zlib.crc32(p.index.numpy().tobytes()):08x}"
        for p in spec.partitions
    ]
    how = spec.operation if len(parts) > 1 else "table"
    if isinstance(spec.scheme, Path):
        how = f"{spec.scheme.activation} path"
    permutation = spec.permutation
    order = "" if permutation is None else f" after {permutation.multiplier} i + {permutation.shift}"
    return f"{how} of {', '.join(parts)}{order}"


def _say_fallbacks(tables: Tables) -> None:
    pairs = zip(tables.names, tables.specs, strict=True)
    kept = [f"{name + ': ' if name else ''}{spec.fallback}" for name, spec in pairs if spec.fallback]
    if kept:
        constructors = sum("__init__" in vars(cls) for cls in type(tables).__mro__ if issubclass(cls, Tables))
        text = f"{len(kept)} of {len(tables.specs)} tables stay full: {'; '.join(kept)}"
        warnings.warn(text, stacklevel=2 + constructors)  # where the module was made
