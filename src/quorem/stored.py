"""The rows of a module's tables in one parameter: their names, initial values, moves between devices, and copies."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from . import init, saved
from .checks import FLOAT_DTYPES, InvalidIdMode, check_choice, check_dtype, check_padding
from .hashing import mixed_id
from .id_rules import UnknownIds, check_unknown, rules_of
from .ops.codes import dequantize
from .ops.cpu.pages import in_huge_pages
from .ops.layout import Extent, Layout, Storage, build, pool_key
from .ops.updates import Updates, updates_of
from .partitions import naive
from .paths import PathNetworks, path_groups
from .renumbering import Mixing
from .saved_paths import PathGroups
from .schemes import TableSpec
from .schemes.frequency import Ranks, RawCounts, rank


class TableOptions(NamedTuple):
    """One table and its options, as the constructor of a module is given them."""

    name: str  # "" for the only table of a module
    spec: TableSpec
    padding_idx: int | None
    frequencies: Tensor | Ranks | RawCounts | None
    raw_ids: bool
    unknown: UnknownIds

    def check(self) -> None:
        """Raise TypeError or ValueError if the options do not go together."""
        if not isinstance(self.raw_ids, bool):
            raise TypeError(f"raw_ids ({self.raw_ids!r}) must be a bool")
        check_unknown(self.unknown, self.spec, self.raw_ids, self.name)
        if isinstance(self.frequencies, RawCounts) and not self.raw_ids:
            title = f" of table {self.name!r}" if self.name else ""
            raise ValueError(f"frequencies{title} counts raw ids: raw_ids must be True")

    def padding(self) -> int | None:
        """The padding id as an id of the table: counted from the front, or hashed if ids are raw."""
        if self.raw_ids and self.padding_idx is not None:
            return mixed_id(self.padding_idx, self.spec.num_embeddings)
        return check_padding(self.padding_idx, self.spec.num_embeddings)


class StoredTables(nn.Module):
    """All rows in one parameter ``stored`` ``[R, W]``, and the integers from which the rows of an id are computed.

    ``named_tables`` gives each table as a view, and ``state_dict`` saves each under its own name. The integers are
    buffers. They are not saved, but rebuilt on the device of ``stored`` whenever that changes.
    """

    stored: nn.Parameter
    updates: Updates

    slots: Tensor
    parts: Tensor
    maps: Tensor
    spans: Tensor
    ranks: Tensor
    invalid_ids: Tensor
    id_rules: Tensor  # the rule of each feature; exists only if raw ids are hashed or unknown ids are replaced
    bits = 0  # bits per number in ``stored`` if rows are quantized (``quantize_``), else 0
    vector_dtype: torch.dtype  # exists only if rows are quantized: dtype of the output vectors

    def __init__(
        self,
        tables: Sequence[TableOptions],
        *,
        features: Sequence[tuple[str, int]] | None = None,
        sparse: bool,
        on_invalid_id: InvalidIdMode,
        init_std: float | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self._non_persistent_buffers_set = saved.TransientNames()
        check_choice("on_invalid_id", on_invalid_id, InvalidIdMode)
        check_dtype(dtype)
        for table in tables:
            table.check()
        names = self.names = tuple(table.name for table in tables)
        specs = self.specs = tuple(table.spec for table in tables)
        self.raw_ids = tuple(table.raw_ids for table in tables)
        self.unknown = tuple(table.unknown for table in tables)
        self.padding = tuple(table.padding() for table in tables)
        # The padding ids as the caller gives them; ``padding`` holds ids of the table, to which raw ids are hashed.
        pairs = zip(tables, self.padding, strict=True)
        self.padding_ids = tuple(table.padding_idx if table.raw_ids else within for table, within in pairs)
        self.sparse, self.on_invalid_id = sparse, on_invalid_id
        if init_std is not None and not 0 < init_std < math.inf:
            raise ValueError(f"init_std ({init_std}) must be above 0 and finite")
        self.init_std = init_std
        features = [(name, t) for t, name in enumerate(names)] if features is None else features
        self.features, self.table_of = tuple(name for name, _ in features), tuple(t for _, t in features)
        self.titles = "\n".join(f"table {names[t]}" if names[t] else f"{type(self).__name__}" for t in self.table_of)
        self.ranks_of: list[Ranks | None] = [
            rank(table.frequencies, table.spec) if table.frequencies is not None and table.spec.num_own else None
            for table in tables
        ]
        storage = self._storage()
        self.extents, self.pools = storage.extents, storage.pools
        self.width = storage.width
        self.stored = nn.Parameter(
            in_huge_pages(torch.empty(storage.num_rows, storage.width, device=device, dtype=dtype))
        )
        groups = path_groups(specs, self.table_of)
        networks = [PathNetworks(group, names, specs, self.table_of, storage.layout, device, dtype) for group in groups]
        self.paths = PathGroups(networks) if networks else ()
        self.reset_parameters()
        _warn_of_fallbacks(self)

    @property
    def live_stored(self) -> nn.Parameter:
        """``stored`` as it is in memory, where rows may lag behind. Reading ``stored`` brings them up to date first."""
        stored: nn.Parameter | None = self._parameters.get("stored")
        return self.stored if stored is None else stored  # None if pruning or a parametrization computes it

    def __getattr__(self, name: str) -> Any:
        if name == "stored" and "updates" in self.__dict__:
            self.updates.flush_()
        return super().__getattr__(name)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the output vectors."""
        return self.vector_dtype if self.bits else self.live_stored.dtype

    @property
    def num_parameters(self) -> int:
        """Number of stored parameters, of all tables, pools and path networks."""
        pools = sum(extent.rows * extent.pitch for extents in self.pools.values() for extent in extents)
        return sum(spec.num_parameters for spec in self.specs) + pools * self.width

    @property
    def compression(self) -> float:
        """Parameters of the full tables divided by stored parameters."""
        return sum(spec.num_embeddings * spec.embedding_dim for spec in self.specs) / self.num_parameters

    def is_full(self, table: int = 0) -> bool:
        """Whether a table is stored as the full table, row by row."""
        spec = self.specs[table]
        one_row = spec.permutation is None and spec.partitions == naive(spec.num_embeddings)
        return one_row and spec.operation != "feature" and not spec.num_own  # feature has an extra dimension

    @property
    def all_extents(self) -> list[Extent]:
        """Where every stored table lies in ``stored``: those of the tables, then those of the pools."""
        return [extent for group in (*self.extents, *self.pools.values()) for extent in group]

    def features_of(self, table: int) -> list[str]:
        """The features that read a table."""
        return [name for name, t in zip(self.features, self.table_of, strict=True) if t == table]

    def reset_parameters(self, method: init.Method = "matched") -> None:
        """Draw new initial values for all tables and path networks.

        Args:
            method: ``"matched"``, ``"symmetric"`` or ``"reference"`` (see ``quorem.init``).

        Raises:
            ValueError: if rows are quantized.
        """
        self._check_writable()
        self.register_integers()  # after to_empty() the buffers hold nothing
        for t, spec in enumerate(self.specs):
            init.init_(self.tables(t), spec, method, std=self.start_std([t]))
            if self.is_full(t) and self.padding[t] is not None:
                self.tables(t)[0].data[self.padding[t]] = 0  # as in torch.nn; lookups give zeros in any case
        for name, extents in self.pools.items():
            members = self.pool_members(name)
            init.pool_(self._views(extents), [self.specs[t] for t in members], std=self.start_std(members))
        for group in self._path_networks():
            group.reset_parameters()

    def _check_writable(self) -> None:
        if self.bits:
            raise ValueError(f"a module of {self.bits} bits takes no new values: set them before quantize_")

    def pool_members(self, pool: str) -> list[int]:
        """The tables that share a pool, in the order in which it numbers their cold ids."""
        return [t for t, spec in enumerate(self.specs) if pool_key(self.pools, spec) == pool]

    def pool_numbering(self, table: int) -> tuple[int, Mixing]:
        """The number of a table's first cold id in its pool, and the bijection that the pool applies to numbers."""
        counts = {t: self.specs[t].num_composed for t in self.pool_members(pool_key(self.pools, self.specs[table]))}
        first = sum(count for t, count in counts.items() if t < table)
        return first, Mixing.covering(sum(counts.values()))

    def start_std(self, members: Sequence[int]) -> float | None:
        """The standard deviation of initial vectors, or None for the default, which depends on the number of ids.

        Raw ids have a default that does not depend on the size of the id space.
        """
        if self.init_std is None and any(self.raw_ids[t] for t in members):
            return init.RAW_STD
        return self.init_std

    def tables(self, table: int = 0) -> list[Tensor]:
        """The stored tables of one table, as views ``[rows, width]`` of ``stored``; ids' own rows come first."""
        self.updates.flush_()
        return self._views(self.extents[table])

    def _views(self, extents: Sequence[Extent]) -> list[Tensor]:
        """The stored tables at ``extents``: views, or dequantized copies if rows are quantized."""
        if not self.bits:
            return [extent.of(self.live_stored) for extent in extents]
        rows = [self.live_stored[extent.base : extent.base + extent.rows * extent.pitch] for extent in extents]
        wide = torch.promote_types(self.dtype, torch.float32)
        numbers = [dequantize(row, self.width, self.bits).to(wide) for row in rows]
        return [n.view(extent.rows, -1) for n, extent in zip(numbers, extents, strict=True)]

    def named_tables(self, values: Tensor | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and view of each stored table; views of bytes if rows are quantized.

        Args:
            values: a tensor in the shape of ``stored``, such as ``stored.grad``, to view instead of ``stored``.
        """
        if values is None:
            self.updates.flush_()
            values = saved.whole(self.live_stored)
        for name, extents in zip(self.names, self.extents, strict=True):
            for j, extent in enumerate(extents):
                yield saved.entry_name("tables", name, j), extent.of(values)
        for name, extents in self.pools.items():
            for j, extent in enumerate(extents):
                yield f"pools.{name}.{j}", extent.of(values)

    def _storage(self) -> Storage:
        return build(self.specs, self.padding, self.table_of, self.ranks_of)

    def _path_networks(self) -> list[PathNetworks]:
        return cast(list[PathNetworks], list(self.paths))

    @property
    def layout(self) -> Layout:
        """The integers from which the ops compute the rows of an id."""
        buffers: dict[str, Any] = self._buffers  # faster than a module's attribute lookup
        layout: Layout | None = self.__dict__.get("_layout")
        if layout is None or layout.slots is not buffers["slots"] or layout.parts is not buffers["parts"]:
            layout = self.__dict__["_layout"] = Layout(*[buffers[name] for name in Layout._fields])
        return layout

    def register_integers(self) -> None:
        """(Re)build the buffers of the layout on the device of ``stored``; they hold no learned state."""
        layout = self._storage().layout
        integers = layout._asdict()
        integers["invalid_ids"] = torch.zeros((), dtype=torch.int64, device="cpu")
        rules, listed = rules_of(self.specs, self.raw_ids, self.unknown, self.ranks_of, self.padding, self.table_of)
        if rules is not None:
            integers["id_rules"] = rules
        self._listed = [each._replace(ids=each.ids.to(self.stored.device)) for each in listed]
        for name, values in integers.items():
            self.register_buffer(name, values.to(self.live_stored.device), persistent=False)
        for group in self._path_networks():
            group.register_integers(self.live_stored.device, layout)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register as ``nn.Module`` does; if it is ``stored``, this module joins the parameter's ``Updates``."""
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
        super()._apply(self._keeping_bytes(fn) if self.bits else fn, recurse)
        self._bind_updates()  # the parameter may be a new object
        self.register_integers()  # ``fn`` may have emptied the buffers or changed their dtype
        return self

    def _keeping_bytes(self, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """``fn``, except that quantized rows stay bytes: a change of dtype applies to output vectors and networks."""
        stored = self.live_stored
        dtype = fn(torch.empty(0, dtype=self.vector_dtype, device=stored.device)).dtype
        if dtype not in FLOAT_DTYPES.values():
            raise TypeError(f"dtype ({dtype}) must be one of {', '.join(map(str, FLOAT_DTYPES.values()))}")
        self.vector_dtype = dtype

        def applied(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            return tensor.to(out.device) if tensor is stored and out.dtype != tensor.dtype else out

        return applied

    def __getstate__(self) -> Any:
        self.updates.flush_()  # in a copy every row is up to date
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind_updates()

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As in ``nn.Module``; with ``recurse=False``, also the entries of the ``state_dict`` that are no buffers.

        ``torch.distributed.checkpoint`` looks up the entries of a ``state_dict`` by such calls.
        """
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if not recurse:
            dot = "." if prefix else ""
            entries = (*self.named_tables(), *saved.ranks(self).items())
            yield from ((f"{prefix}{dot}{name}", tensor) for name, tensor in entries)

    def _fqn_modifiers(self) -> dict[str, str]:
        # For torch.distributed.checkpoint, which follows the names of a state_dict as attributes.
        return dict.fromkeys(("tables", "pools", "ranks"), "_entries")

    _entries = saved.Names()
    _save_to_state_dict = saved.save_tables
    _load_from_state_dict = saved.load_tables


def _warn_of_fallbacks(tables: StoredTables) -> None:
    pairs = zip(tables.names, tables.specs, strict=True)
    kept = [f"{name + ': ' if name else ''}{spec.fallback}" for name, spec in pairs if spec.fallback]
    if kept:
        constructors = sum("__init__" in vars(cls) for cls in type(tables).__mro__ if issubclass(cls, StoredTables))
        text = f"{len(kept)} of {len(tables.specs)} tables stay full: {'; '.join(kept)}"
        warnings.warn(text, stacklevel=2 + constructors)  # point at the line that constructs the module
