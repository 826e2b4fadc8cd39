"""Storage and lookup of the tables of a module: one parameter, found by integers, with a name for each table in it."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from . import init, saved
from .checks import InvalidIdMode, check_choice, check_device, check_dtype, check_padding
from .fit import fit_
from .hashing import mixed_id
from .id_rules import UnknownIds, check_unknown, listed_of, replaced, rules_of
from .operations import OPERATIONS
from .ops import autograd, declare
from .ops.layout import LIMIT, Extent, Layout, Storage, build
from .ops.lookup import pooling_factor
from .ops.quantized import dequantize
from .ops.rows import accumulator, bag_and_feature, larger, lookup_reads, raise_out_of_range, reads_of
from .ops.updates import Updates, updates_of
from .partitions import Mixing, Partition, naive
from .paths import PathNetworks, path_scheme
from .schemes import TableSpec
from .schemes.frequency import Ranks, RawCounts, places, rank


class Tables(nn.Module):
    """What ``Embedding``, ``EmbeddingBag`` and ``EmbeddingCollection`` share: storage, initialization, lookup.

    All rows lie in one parameter ``stored`` ``[R, W]``, so a lookup is one op whatever the number of tables;
    ``named_tables`` gives each table as a view, and ``state_dict`` saves each under its own name.
    """

    stored: nn.Parameter
    updates: Updates

    slots: Tensor
    parts: Tensor
    maps: Tensor
    spans: Tensor
    ranks: Tensor
    invalid_ids: Tensor
    id_rules: Tensor  # of each feature; only where ids are mixed or replaced
    ids_argument = "input"  # what ``forward`` calls the ids
    bits = 0  # of a number in ``stored``, where rows are quantized (``quantize_``)
    vector_dtype: torch.dtype  # where rows are quantized, the dtype of the vectors that come out

    def __init__(
        self,
        names: Sequence[str],
        specs: Sequence[TableSpec],
        padding: Sequence[int | None],
        *,
        features: Sequence[tuple[str, int]] | None = None,
        frequencies: Sequence[Tensor | Ranks | RawCounts | None] | None = None,
        raw_ids: Sequence[bool] | None = None,
        unknown: Sequence[UnknownIds] | None = None,
        sparse: bool,
        on_invalid_id: InvalidIdMode,
        init_std: float | None = None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self._non_persistent_buffers_set = saved.TransientNames()
        check_choice("on_invalid_id", on_invalid_id, InvalidIdMode)
        check_dtype(dtype)
        self.names, self.specs = tuple(names), tuple(specs)
        self.raw_ids = (False,) * len(specs) if raw_ids is None else tuple(raw_ids)
        policies: list[UnknownIds] = ["error" for _ in specs]
        self.unknown = tuple(policies if unknown is None else unknown)
        for policy, spec, raw, name in zip(self.unknown, specs, self.raw_ids, names, strict=True):
            check_unknown(policy, spec, raw, name)
        pads = zip(padding, specs, self.raw_ids, strict=True)
        self.padding = tuple(padding_of(pad, spec.num_embeddings, raw) for pad, spec, raw in pads)
        # As ids are given: of raw ids, ``padding`` is mixed.
        pairs = zip(padding, self.padding, self.raw_ids, strict=True)
        self.padding_ids = tuple(given if raw else within for given, within, raw in pairs)
        self.sparse, self.on_invalid_id = sparse, on_invalid_id
        if init_std is not None and not 0 < init_std < math.inf:
            raise ValueError(f"init_std ({init_std}) must be above 0 and finite")
        self.init_std = init_std
        features = [(name, t) for t, name in enumerate(names)] if features is None else features
        self.features, self.table_of = tuple(name for name, _ in features), tuple(t for _, t in features)
        self.titles = "\n".join(f"table {names[t]}" if names[t] else f"{type(self).__name__}" for t in self.table_of)
        counts = [None] * len(specs) if frequencies is None else frequencies
        for name, count, raw in zip(names, counts, self.raw_ids, strict=True):
            if isinstance(count, RawCounts) and not raw:
                title = f" of table {name!r}" if name else ""
                raise ValueError(f"frequencies{title} counts raw ids: raw_ids must be True")
        self.ranks_of: list[Ranks | None] = [
            rank(count, spec) if count is not None and spec.num_own else None
            for count, spec in zip(counts, specs, strict=True)
        ]
        storage = self._storage()
        self.extents, self.pools = storage.extents, storage.pools
        self.width = storage.width
        self.stored = nn.Parameter(torch.empty(storage.num_rows, storage.width, device=device, dtype=dtype))
        groups = _path_groups(specs, self.table_of)
        networks = [PathNetworks(group, specs, self.table_of, storage.layout, device, dtype) for group in groups]
        self.paths = nn.ModuleList(networks) if networks else ()
        self._lookups, self._warned = 0, False
        self.reset_parameters()
        _warn_of_fallbacks(self)

    @property
    def live_stored(self) -> nn.Parameter:
        """``stored`` as it is: rows may lag behind. To read ``stored`` itself brings them up to date."""
        stored: nn.Parameter | None = self._parameters.get("stored")
        return self.stored if stored is None else stored  # None: pruning or a parametrization computes it

    def __getattr__(self, name: str) -> Any:
        if name == "stored" and "updates" in self.__dict__:
            self.updates.flush_()
        return super().__getattr__(name)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the vectors that come out."""
        return self.vector_dtype if self.bits else self.live_stored.dtype

    @property
    def num_parameters(self) -> int:
        """Stored parameters: every table's, every pool's, and every path network's."""
        pools = sum(extent.rows * extent.pitch for extents in self.pools.values() for extent in extents)
        return sum(spec.num_parameters for spec in self.specs) + pools * self.width

    @property
    def compression(self) -> float:
        """Parameters of the full tables over stored parameters."""
        return sum(spec.num_embeddings * spec.embedding_dim for spec in self.specs) / self.num_parameters

    def reset_parameters(self, method: init.Method = "matched") -> None:
        """Draw the tables anew.

        Args:
            method: ``"matched"``, ``"symmetric"`` or ``"reference"``; ``quorem.init`` says what each is.
        """
        self.place_integers()  # after to_empty() the buffers hold nothing
        for t, spec in enumerate(self.specs):
            init.init_(self.tables(t), spec, method, std=self.start_std([t]))
            if self.is_full(t) and self.padding[t] is not None:
                self.tables(t)[0].data[self.padding[t]] = 0  # as in torch.nn; lookups give zeros in any case
        for name, extents in self.pools.items():
            members = [t for t, spec in enumerate(self.specs) if pool_key(self.pools, spec) == name]
            init.pool_(self._views(extents), [self.specs[t] for t in members], std=self.start_std(members))
        for group in self._path_networks():
            group.reset_parameters()

    def start_std(self, members: Sequence[int]) -> float | None:
        """The deviation that vectors are drawn with; that of raw ids does not depend on the size of the id space."""
        if self.init_std is None and any(self.raw_ids[t] for t in members):
            return init.RAW_STD
        return self.init_std

    def tables(self, table: int = 0) -> list[Tensor]:
        """What is stored for one table, views ``[rows, width]`` of ``stored``; rows of ids' own come first."""
        self.updates.flush_()
        return self._views(self.extents[table])

    def _views(self, extents: Sequence[Extent]) -> list[Tensor]:
        """Some stored tables; copies, where their rows are quantized."""
        if not self.bits:
            return [extent.of(self.live_stored) for extent in extents]
        rows = [self.live_stored[extent.base : extent.base + extent.rows * extent.pitch] for extent in extents]
        wide = torch.promote_types(self.dtype, torch.float32)
        numbers = [dequantize(row, self.width, self.bits).to(wide) for row in rows]
        return [n.view(extent.rows, -1) for n, extent in zip(numbers, extents, strict=True)]

    def named_tables(self, values: Tensor | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and view of each stored table; its bytes, where rows are quantized.

        Args:
            values: a tensor shaped as ``stored`` to take the views of, such as ``stored.grad``; ``stored`` if None.
        """
        if values is None:
            self.updates.flush_()
            values = saved.whole(self.live_stored)
        for name, extents in zip(self.names, self.extents, strict=True):
            for j, extent in enumerate(extents):
                yield f"tables.{name}.{j}" if name else f"tables.{j}", extent.of(values)
        for name, extents in self.pools.items():
            for j, extent in enumerate(extents):
                yield f"pools.{name}.{j}", extent.of(values)

    def dense(self, table: int = 0) -> Tensor:
        """The table ``[n, D]`` that the module stands for, straight from the paper's equations.

        Differentiable. Feature generation gives ``[n, K, D]``.
        """
        spec, pad, stored = self.specs[table], self.padding[table], self.tables(table)
        place = places(spec, self.ranks_of[table]).to(self.live_stored.device)
        ids = torch.arange(spec.num_embeddings, device=place.device)
        composed, own = ids[place >= spec.num_own], ids[place < spec.num_own]
        dense = torch.empty(0)
        if len(composed):
            numbers, partitions = place[composed] - spec.num_own, spec.partitions
            if spec.pool is not None:
                key = pool_key(self.pools, spec)
                extents = self.pools[key]
                before = [
                    other for t, other in enumerate(self.specs) if t < table and pool_key(self.pools, other) == key
                ]
                total = sum(other.num_composed for other in self.specs if pool_key(self.pools, other) == key)
                numbers = Mixing.covering(max(total, 2))(numbers + sum(other.num_composed for other in before))
                partitions = tuple(Partition(1, extent.rows) for extent in extents)
                rows = self._views(extents)
            else:
                numbers = numbers if spec.permutation is None else spec.permutation(numbers)
                rows = stored[spec.num_own > 0 :]
            dense = OPERATIONS[spec.operation](*(t[p(numbers)] for t, p in zip(rows, partitions, strict=False)))
            for group in self._path_networks():
                if table in (members := [self.table_of[f] for f in group.members]):
                    member = torch.full_like(composed, members.index(table))
                    dense = group(dense.to(self.dtype), composed, member, self.layout.ranks)
        if spec.num_own:
            vectors = stored[0].new_zeros(spec.num_embeddings, spec.embedding_dim)
            vectors = vectors.index_copy(0, own, stored[0][place[own]])
            dense = vectors.index_copy(0, composed, dense.to(vectors.dtype)) if len(composed) else vectors
        dense = dense if pad is None else dense.index_fill(0, torch.tensor([pad], device=ids.device), 0)
        return dense.to(self.dtype)

    def is_full(self, table: int = 0) -> bool:
        """Whether what is stored for a table is the table itself, row by row."""
        spec = self.specs[table]
        one_row = spec.permutation is None and spec.partitions == naive(spec.num_embeddings)
        return one_row and spec.operation != "feature" and not spec.num_own  # feature has a dimension more

    def _fit_(self, dense: Tensor, frequencies: Tensor | None, table: int = 0) -> None:
        """Set what is stored for one table to the fit of ``dense``; a pool must be its own."""
        spec = self.specs[table]
        if spec.pool is not None:
            sharing = [n for n, other in zip(self.names, self.specs, strict=True) if other.pool == spec.pool]
            if len(sharing) > 1:
                raise ValueError(f"pool {spec.pool.name!r} is shared by tables {sharing}: none can be fitted alone")
        with torch.no_grad():
            tables = self.tables(table) + self._views(self.pools.get(pool_key(self.pools, spec), ()))
            ranks, padding = self.ranks_of[table], self.padding[table]
            fit_(tables, spec, dense, frequencies, padding_idx=padding, ranks=ranks)

    def num_duplicates(self, table: int = 0) -> int:
        """Number of ids whose vector equals that of a lower id: 0 where each has a vector of its own.

        Theorem 1 promises that for ``concat`` over distinct rows; ``add`` and ``mult`` can collide, and a hash does.
        The rest of a ``HotCold`` table shares one vector by design: ``num_rest - 1`` duplicates.
        """
        vectors = self.dense(table).detach().flatten(1)
        return len(vectors) - len(vectors.unique(dim=0))

    def _row_numbers(self, ids: Tensor) -> Tensor:
        """The rows of ``stored`` ``[B, F, K]`` that the vectors of ``ids`` ``[B, F]`` sum; -1 for none."""
        for name, spec in zip(self.names, self.specs, strict=True):
            title = f"table {name}: " if name else ""
            if spec.hidden is not None or (spec.operation != "add" and len(spec.partitions) > 1):
                raise ValueError(f"{title}scheme ({spec.scheme}) must add rows: only then is a vector a sum of rows")
            if spec.embedding_dim != self.width:
                rule = f"must be that of all tables ({self.width})"
                raise ValueError(f"{title}embedding_dim ({spec.embedding_dim}) {rule}")
        ids = self._within(ids, None)
        raise_out_of_range(ids, None, self.layout, self.titles)
        reads = lookup_reads(ids, self.layout)
        return torch.where(reads.valid[..., None] & reads.used, reads.rows, -1)

    def _lookup(self, ids: Tensor) -> Tensor:
        """Composed vectors ``[B, S, W]`` of ``ids`` ``[B, F]``."""
        stored = self.live_stored
        check_device(stored, self.ids_argument, ids)
        ids = self._within(ids, None)
        invalid = self._buffers["invalid_ids"] if self._counts_invalid(ids) else None  # quicker than an attribute
        if self.bits:
            out = autograd.lookup_quantized(ids, stored, self.layout, invalid=invalid, **self._quantized())
        else:
            out = autograd.lookup(
                ids, stored, self.layout, self.updates, names=self.titles, sparse=self.sparse, invalid=invalid
            )
        if invalid is not None:
            self._report_invalid()
        for group in self._path_networks():
            out = group.transform(out, ids, self.layout.ranks)
        return out

    def _bag(self, ids: Tensor, offsets: Tensor, sample_weights: Tensor | None, mean: bool) -> Tensor:
        """Composed, then pooled vectors ``[B, S, W]`` of jagged ``ids`` ``[V]``; ``offsets`` ``[F * B + 1]``."""
        stored, layout = self.live_stored, self.layout
        check_device(stored, self.ids_argument, ids, offsets, sample_weights)
        ids = self._within(ids, offsets)
        if self._counts_invalid(ids):
            declare.call("count_invalid_", ids, offsets, self.invalid_ids, layout)
            self._report_invalid()
        inputs = (ids, offsets, sample_weights, stored, layout, self.updates)
        if self.bits:
            out = declare.call("bag_quantized", *inputs[:-1], mean=mean, **self._quantized())
        else:
            transformed = sum(len(group.members) for group in self._path_networks())  # below, with their gradients
            with torch.set_grad_enabled(torch.is_grad_enabled() and transformed < len(self.features)):
                out = autograd.bag(*inputs, mean=mean, names=self.titles, sparse=self.sparse)
        for group in self._path_networks():  # the op pooled their rows; they have to be transformed before
            out = out.index_copy(1, group.columns, self._path_bag(group, ids, offsets, sample_weights, mean))
        return out

    def _within(self, ids: Tensor, offsets: Tensor | None) -> Tensor:
        """Raw ids mixed into the ids of their tables, unknown ids replaced; others as they are."""
        rules: Tensor | None = self._buffers.get("id_rules")
        if rules is None:
            return ids
        feature = None if offsets is None else bag_and_feature(ids, offsets, self.spans)[1]
        limits = self.slots[self.spans[:, 0], LIMIT]
        return replaced(ids, feature, rules, limits, self._listed)

    def _signed(self, ids: Tensor) -> Tensor:
        """Unsigned raw ids by their bits, which torch computes with."""
        is_unsigned = isinstance(ids, Tensor) and ids.dtype == torch.uint64 and any(self.raw_ids)
        return ids.view(torch.int64) if is_unsigned else ids

    def _quantized(self) -> dict[str, Any]:
        return {"width": self.width, "bits": self.bits, "dtype": self.dtype, "names": self.titles}

    def _path_bag(
        self, group: PathNetworks, ids: Tensor, offsets: Tensor, sample_weights: Tensor | None, mean: bool
    ) -> Tensor:
        """Transformed, then pooled vectors of the features of one group, ``[B, slots of the group, W]``."""
        stored, spans = self.live_stored, self.spans
        bag, feature = bag_and_feature(ids, offsets, spans)
        members, member = len(group.members), group.member[feature]
        inside = (member >= 0) & (torch.arange(ids.shape[0], device=ids.device) < offsets[-1])
        member = member.clamp(min=0)
        slot = group.columns.view(members, -1)[member]
        reads = reads_of(ids[:, None], self.slots[slot], self.parts[slot], self.layout)
        valid = reads.valid & inside[:, None]
        rows = torch.where(reads.used, reads.rows, 0).sum(-1)  # one is used: the id's own, or its first partition's
        if self.bits:
            vectors = dequantize(stored[rows], self.width, self.bits).to(self.dtype).flatten(1)
        else:
            alone = len(group.members) == len(self.features)  # torch adds no two sparse gradients in float16
            sparse = self.sparse and (alone or stored.dtype != torch.float16)
            vectors = autograd.gather(rows, stored, self.updates, sparse).flatten(1)
        vectors = group(vectors, ids, member, self.layout.ranks)
        vectors = vectors.to(accumulator(vectors))
        factor = pooling_factor(valid, bag, sample_weights, offsets, mean, vectors.dtype)[:, 0]
        vectors = torch.where(valid[:, :1], vectors * factor, 0)
        batch = (offsets.shape[0] - 1) // spans.shape[0]
        position = bag % larger(batch, 1) * members + member
        pooled = vectors.new_zeros((batch + 1) * members, vectors.shape[1]).index_add(0, position, vectors)
        return pooled[: batch * members].view(batch, group.columns.shape[0], self.width).to(self.dtype)

    @property
    def layout(self) -> Layout:
        """The integers by which the ops find the rows of an id."""
        buffers: dict[str, Any] = self._buffers  # an attribute of a module takes longer to find
        layout: Layout | None = self.__dict__.get("_layout")
        if layout is None or layout.slots is not buffers["slots"] or layout.parts is not buffers["parts"]:
            layout = self.__dict__["_layout"] = Layout(*[buffers[name] for name in Layout._fields])
        return layout

    def _storage(self) -> Storage:
        return build(self.specs, self.padding, self.table_of, self.ranks_of)

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

    def place_integers(self) -> None:
        """(Re)build the layout's buffers where ``stored`` is; they hold no learned state."""
        integers = self._storage().layout._asdict()
        integers["invalid_ids"] = torch.zeros((), dtype=torch.int64, device="cpu")
        rules = rules_of(self.specs, self.raw_ids, self.unknown, self.ranks_of, self.table_of)
        if rules is not None:
            integers["id_rules"] = rules
        listed = listed_of(self.specs, self.unknown, self.ranks_of, self.table_of)
        self._listed = [each._replace(ids=each.ids.to(self.stored.device)) for each in listed]
        for name, values in integers.items():
            self.register_buffer(name, values.to(self.live_stored.device), persistent=False)
        for group in self._path_networks():
            group.place_integers(self.live_stored.device)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As in ``nn.Module``; of this module alone (``recurse=False``) also what ``state_dict`` names.

        ``torch.distributed.checkpoint`` looks for the entries of a ``state_dict`` by such calls.
        """
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if not recurse:
            dot = "." if prefix else ""
            yield from ((f"{prefix}{dot}{name}", tensor) for name, tensor in saved.named_entries(self))

    def _fqn_modifiers(self) -> dict[str, str]:
        # For torch.distributed.checkpoint, which follows the names of a state_dict as attributes.
        return dict.fromkeys(("tables", "pools", "ranks"), "_entries")

    _entries = saved.Names()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in ``nn.Module``, and tell optimizers whose parameter ``stored`` now is."""
        super().register_parameter(name, param)
        if name == "stored":
            self._bind_updates()

    def _bind_updates(self) -> None:
        if "updates" in self.__dict__:
            self.updates.modules.discard(self)
        self.updates = updates_of(self.live_stored) or Updates(self.live_stored)
        self.updates.modules.add(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.updates.flush_()
        super()._apply(fn, recurse)
        self._bind_updates()  # the parameter may be another object
        self.place_integers()  # which ``fn`` may have emptied, or made floats
        return self

    def __getstate__(self) -> Any:
        self.updates.flush_()  # in a copy every row is up to date
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind_updates()

    _save_to_state_dict = saved.save_tables
    _load_from_state_dict = saved.load_tables


def padding_of(padding_idx: int | None, n: int, raw_ids: bool) -> int | None:
    """The id of a table that stands for nothing; a raw one is mixed into the table's ids."""
    if not isinstance(raw_ids, bool):
        raise TypeError(f"raw_ids ({raw_ids!r}) must be a bool")
    return mixed_id(padding_idx, n) if raw_ids and padding_idx is not None else check_padding(padding_idx, n)


def module_of(stored: Tensor) -> Tables | None:
    """A module whose ``stored`` this is, or None."""
    updates = updates_of(stored)
    return None if updates is None else next(iter(updates.modules), None)


def pool_key(pools: Mapping[str, Any], spec: TableSpec) -> str:
    """The name of a table's pool among ``pools``, where pools of several widths carry theirs; "" if it has none."""
    if spec.pool is None:
        return ""
    return spec.pool.name if spec.pool.name in pools else f"{spec.pool.name}.{spec.embedding_dim}"


def _path_groups(specs: Sequence[TableSpec], table_of: Sequence[int]) -> list[list[int]]:
    """Features whose path networks have one shape, and so run together."""
    groups: dict[Any, list[int]] = {}
    for f, t in enumerate(table_of):
        scheme = path_scheme(specs[t])
        if scheme is not None:
            shape = (specs[t].embedding_dim, scheme.hidden, scheme.activation, len(specs[t].partitions))
            groups.setdefault(shape, []).append(f)
    return list(groups.values())


def _warn_of_fallbacks(tables: Tables) -> None:
    pairs = zip(tables.names, tables.specs, strict=True)
    kept = [f"{name + ': ' if name else ''}{spec.fallback}" for name, spec in pairs if spec.fallback]
    if kept:
        constructors = sum("__init__" in vars(cls) for cls in type(tables).__mro__ if issubclass(cls, Tables))
        text = f"{len(kept)} of {len(tables.specs)} tables stay full: {'; '.join(kept)}"
        warnings.warn(text, stacklevel=2 + constructors)  # where the module was made
