"""The rows of a module's tables in one parameter: their names, initial values, moves between devices, and copies."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from ..checks import InvalidIdMode, check_choice, check_dtype
from ..ops.codes import dequantize
from ..ops.lagging import unwatched, updates_of
from ..ops.layout import Extent, Layout, Storage, StoredPool, build, checksum
from ..ops.memory import in_huge_pages
from ..ops.pieces import Pieces, pieces_of
from ..ops.updates import Updates
from ..paper import init
from ..paper.schemes.frequency import Ranks, are_known, rank
from .id_rules import rules_of
from .meaning import are_ranked, differences, meaning_of, ranks_in
from .path_networks import PathNetworks, path_groups
from .table import Table


class StoredTables(nn.Module):
    """All rows in one parameter ``stored`` ``[R, W]``, and the integers from which the rows of an id are computed.

    ``named_tables`` gives each table as a view. A ``state_dict`` has ``stored``, ``meaning`` (what the rows mean, which
    is compared when they are loaded) and, if ids are ranked by frequency, ``ranks`` (the lists of hot and cold ids).
    All other integers are buffers that are not saved, but rebuilt whenever one of these changes.
    """

    stored: nn.Parameter
    projections: nn.ParameterList | tuple[nn.Parameter, ...]  # the matrix ``[d, D]`` of each narrow table
    pieces: Pieces  # the columns of each feature before and after its rows are projected
    updates: Updates

    slots: Tensor
    parts: Tensor
    maps: Tensor
    spans: Tensor
    ranks: Tensor
    meaning: Tensor
    invalid_ids: Tensor
    id_rules: Tensor  # the rule of each feature; exists only if raw ids are hashed or unknown ids are replaced
    bits = 0  # bits per number in ``stored`` if rows are quantized (``quantize_``), else 0
    vector_dtype: torch.dtype  # exists only if rows are quantized: dtype of the output vectors

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        sparse: bool,
        on_invalid_id: InvalidIdMode,
        init_std: float | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        check_choice("on_invalid_id", on_invalid_id, InvalidIdMode)
        check_dtype(dtype)
        names = self.names = tuple(table.name for table in tables)
        specs = self.specs = tuple(table.checked_spec() for table in tables)
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
        self.features = tuple(feature for table in tables for feature in table.features)
        self.table_of = tuple(t for t, table in enumerate(tables) for _ in table.features)
        self.titles = "\n".join(f"table {names[t]}" if names[t] else f"{type(self).__name__}" for t in self.table_of)
        self._ranks: list[Ranks | None] = [
            rank(table.frequencies, spec) if table.frequencies is not None and spec.num_own else None
            for table, spec in zip(tables, specs, strict=True)
        ]
        storage = self._storage()
        self.extents, self.pools = storage.extents, storage.pools
        self.width = storage.width
        rows = torch.empty(storage.num_rows, storage.width, device=device, dtype=dtype)
        self.stored = nn.Parameter(in_huge_pages(rows))
        groups = path_groups(specs, self.table_of)
        networks = [PathNetworks(group, specs, self.table_of, storage.layout, device, dtype) for group in groups]
        self.paths = nn.ModuleList(networks) if networks else ()
        self.narrow = tuple(t for t, spec in enumerate(specs) if spec.is_narrow)  # in the order of ``projections``
        read = [t for t in self.table_of for _ in range(specs[t].num_vectors)]
        matrix_of = [self.narrow.index(t) if t in self.narrow else -1 for t in read]
        self.pieces = pieces_of([specs[t].width for t in read], [specs[t].embedding_dim for t in read], matrix_of)
        matrices = [nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for shape in self.pieces.shapes]
        self.projections = nn.ParameterList(matrices) if matrices else ()
        self.reset_parameters()
        _warn_of_fallbacks(self)

    @property
    def live_stored(self) -> nn.Parameter:
        """``stored``, found faster than as an attribute."""
        stored: nn.Parameter | None = self._parameters.get("stored")
        return self.stored if stored is None else stored  # None if pruning or a parametrization computes it

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the output vectors."""
        return self.vector_dtype if self.bits else self.live_stored.dtype

    @property
    def num_parameters(self) -> int:
        """Number of stored parameters, of all tables, pools, path networks and matrices of narrow rows."""
        pools = sum(extent.rows * extent.pitch for pool in self.pools.values() for extent in pool.extents)
        return sum(spec.num_parameters for spec in self.specs) + pools * self.width

    @property
    def compression(self) -> float:
        """Parameters of the full tables divided by stored parameters."""
        return sum(spec.num_embeddings * spec.embedding_dim for spec in self.specs) / self.num_parameters

    def is_full(self, table: int = 0) -> bool:
        """Whether a table is stored as it is, row by row, in numbers."""
        return self.specs[table].is_naive and not self.specs[table].is_narrow and not self.bits

    def projection(self, table: int = 0) -> Tensor | None:
        """The matrix ``[d, D]`` that turns composed rows of width d into vectors; None if rows have width D."""
        return self.matrices()[self.narrow.index(table)] if table in self.narrow else None

    def matrices(self) -> list[Tensor]:
        """``projections`` in the dtype of the vectors: ``quantize_`` rounds them to bfloat16."""
        if isinstance(self.projections, tuple):
            return []
        found: Iterable[Tensor | None] = self.projections._parameters.values()  # ten times as fast as the list
        if self.projections._buffers or self.projections._modules:  # pruning or a parametrization computes a matrix
            found = self.projections
        matrices: list[Tensor] = [matrix for matrix in found if matrix is not None]
        if (shapes := [matrix.shape for matrix in matrices]) != self.pieces.shapes:  # kernels do not look
            raise ValueError(f"projections have shapes {[*map(tuple, shapes)]} but must have {self.pieces.shapes}")
        return [matrix.to(self.dtype) for matrix in matrices] if self.bits else matrices

    @property
    def all_extents(self) -> list[Extent]:
        """Where every stored table lies in ``stored``: those of the tables, then those of the pools."""
        groups = (*self.extents, *(pool.extents for pool in self.pools.values()))
        return [extent for group in groups for extent in group]

    @property
    def num_rows(self) -> int:
        """Number of rows of ``stored``, R; where rows are bytes, it has another shape."""
        return sum(extent.rows * extent.pitch for extent in self.all_extents)

    def features_of(self, table: int) -> list[str]:
        """The features that read a table."""
        return [name for name, t in zip(self.features, self.table_of, strict=True) if t == table]

    def reset_parameters(self) -> None:
        """Draw new initial values for all tables, path networks and matrices (see ``quorem.init``).

        Raises:
            ValueError: if rows are quantized.
        """
        self._check_writable()
        self.register_integers()  # after to_empty() the buffers hold nothing
        for t, spec in enumerate(self.specs):
            init.init_(self.tables(t), spec, std=self.initial_std([t]))
            if spec.is_naive and self.padding[t] is not None:
                self.tables(t)[0].data[self.padding[t]] = 0  # as in torch.nn; lookups give zeros in any case
        for pool in self.pools.values():
            specs, std = [self.specs[t] for t in pool.offsets], self.initial_std(pool.offsets)
            init.pool_(self._views(pool.extents), specs, std=std)
        for group in self.networks():
            group.reset_parameters()
        for matrix in self.projections:
            init.projection_(matrix)

    def _check_writable(self) -> None:
        if self.bits:
            raise ValueError(f"a module of {self.bits} bits takes no new values: set them before quantize_")

    def pool_of(self, table: int) -> StoredPool | None:
        """The pool that the cold ids of a table read; None if there is none."""
        return next((pool for pool in self.pools.values() if table in pool.offsets), None)

    def initial_std(self, members: Iterable[int]) -> float | None:
        """The standard deviation of initial vectors, or None for the default, which depends on the number of ids.

        Raw ids have a default that does not depend on the size of the id space.
        """
        if self.init_std is None and any(self.raw_ids[t] for t in members):
            return init.RAW_STD
        return self.init_std

    def tables(self, table: int = 0) -> list[Tensor]:
        """The stored tables of one table, as views ``[rows, width]`` of ``stored``; ids' own rows come first."""
        return self._views(self.extents[table])

    def _views(self, extents: Sequence[Extent]) -> list[Tensor]:
        """The stored tables at ``extents``: views, or dequantized copies if rows are quantized."""
        if not self.bits:
            self.updates.flush_()
            with unwatched():
                return [extent.of(self.live_stored) for extent in extents]
        wide, views = torch.promote_types(self.dtype, torch.float32), []
        for extent in extents:
            rows = torch.arange(extent.rows * extent.pitch, device=self.live_stored.device) + extent.base
            numbers = dequantize(self.live_stored, rows, self.width, self.bits).to(wide)
            views.append(numbers.view(extent.rows, -1))
        return views

    def named_tables(self, values: Tensor | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and view of each stored table, or of ``values`` in the same shape; numbers if rows are quantized."""
        stored: Any = self.live_stored if values is None else values
        stored = stored.full_tensor() if is_sharded(stored) else stored
        titles = [f"tables.{name}" if name else "tables" for name in self.names]
        titles += [f"pools.{name}" for name in self.pools]
        groups = (*self.extents, *(pool.extents for pool in self.pools.values()))
        for title, extents in zip(titles, groups, strict=True):
            for j, extent in enumerate(extents):
                yield f"{title}.{j}", self._views([extent])[0] if self.bits else extent.of(stored)

    def _storage(self) -> Storage:
        return build(self.specs, self.padding, self.table_of, self._ranks)

    def networks(self) -> list[PathNetworks]:
        """The networks of path-based tables, in groups that run together."""
        return cast(list[PathNetworks], list(self.paths))

    @property
    def ranks_of(self) -> list[Ranks | None]:
        """The lists of hot and cold ids of each table; None for a table whose ids are in order of frequency."""
        if self.__dict__.get("_layout") is None:
            self._take_filled_integers()
        return self._ranks

    def _take_filled_integers(self) -> None:
        """Called without a layout: tools that fill a module of the meta device do not call ``load_state_dict``."""
        if self.live_stored.is_meta:
            return
        self._take_integers()
        for name, ranks in zip(self.names, self._ranks, strict=True):
            if ranks is not None and not are_known(ranks):
                title = f"table {name!r}" if name else type(self).__name__
                raise RuntimeError(f"{title} has frequencies='loaded': load a state_dict, which lists its hot ids")

    def _take_integers(self) -> None:
        """Take over ``meaning`` and ``ranks`` as somebody has set them, and rebuild all that follows from them."""
        if not self.meaning.is_meta:
            if wrong := differences(self, self.meaning):
                raise RuntimeError("\n".join(wrong))
            if not self.ranks.is_meta:
                self._ranks = ranks_in(self, self.meaning, self.ranks)
        self._bind_updates()
        self.register_integers()

    def register_integers(self) -> None:
        """(Re)build the buffers on the device of ``stored``; they hold no learned state."""
        layout = self._storage().layout
        integers = layout._asdict()
        integers["meaning"] = meaning_of(self)
        saved = {"meaning", "ranks"} if any(self._ranks) else {"meaning"}  # tools take empty tensors for shared ones
        integers["invalid_ids"] = torch.zeros((), dtype=torch.int64, device="cpu")
        self.rules, listed = rules_of(self, layout)
        # The same as Python integers, which exported programs have as constants.
        self.lists: dict[str, Any] = {name: getattr(layout, name).tolist() for name in ("slots", "parts", "spans")}
        if self.rules:
            integers["id_rules"] = torch.tensor(self.rules, device="cpu")
        device = self.live_stored.device
        self._listed = [each._replace(ranks=Ranks(*(ids.to(device) for ids in each.ranks))) for each in listed]
        for name, values in integers.items():
            self.register_buffer(name, values.to(device), persistent=name in saved)
        # Views of the lists in the layout, so that they are in memory once.
        lists = iter(layout.ranks.split([len(ids) for ranks in self._ranks if ranks for ids in ranks]))
        self._ranks = [ranks and Ranks(next(lists), next(lists)) for ranks in self._ranks]
        ready = not self.slots.is_meta and all(ranks is None or are_known(ranks) for ranks in self._ranks)
        # Without a layout, the next lookup calls _take_filled_integers.
        self.__dict__["_layout"] = Layout(*(getattr(self, name) for name in Layout._fields)) if ready else None
        self._checksum = checksum(layout)
        for group in self.networks():
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
        if self.__dict__.get("_layout") is None and not self.live_stored.is_meta:
            self._take_integers()  # a tool has filled the parameters of a module of the meta device
        super()._apply(self._keeping_bytes(fn) if self.bits else fn, recurse)
        self._bind_updates()  # the parameter may be a new object
        self.updates.watch()
        self.register_integers()  # ``fn`` may have emptied the buffers or changed their dtype
        return self

    def _keeping_bytes(self, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """``fn``, which changes the dtype of output vectors and networks, but not of quantized rows and matrices."""
        kept = {id(tensor) for tensor in (self.live_stored, *self.projections)}
        dtype = fn(torch.empty(0, dtype=self.vector_dtype, device=self.live_stored.device)).dtype
        check_dtype(dtype)
        self.vector_dtype = dtype

        def applied(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            return tensor.to(out.device) if id(tensor) in kept and out.dtype != tensor.dtype else out

        return applied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind_updates()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """As in ``nn.Module``, after one check: if the rows mean something else, nothing of the module is loaded."""
        if f"{prefix}weight" in state_dict and f"{prefix}stored" not in state_dict:  # saved by torch.nn
            if self.names == ("",) and self.is_full():
                state_dict[f"{prefix}stored"] = state_dict.pop(f"{prefix}weight")
                state_dict.setdefault(f"{prefix}meaning", self.meaning)
            else:
                warnings.warn(
                    f"{prefix}weight is a full table: from_pretrained fits a scheme's rows to it", stacklevel=2
                )
        meaning, lists = (state_dict.get(prefix + name) for name in ("meaning", "ranks"))
        if meaning is not None and not getattr(meaning, "is_meta", False):
            wrong = differences(self, meaning, prefix)
            try:
                if not wrong and (lists is not None or not any(are_ranked(meaning))):
                    self._ranks = ranks_in(self, meaning, self.ranks[:0] if lists is None else lists)
            except (ValueError, TypeError) as error:
                wrong = [f"{prefix}{error}"]
            if wrong:
                *_, error_msgs = others
                error_msgs += wrong
                return
            self.register_integers()  # the lists may have another length now
        super()._load_from_state_dict(state_dict, prefix, *others)
        self._take_integers()


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a ``DTensor`` (``fully_shard``); by attribute, since importing that class takes a second."""
    return hasattr(tensor, "full_tensor")


def _warn_of_fallbacks(tables: StoredTables) -> None:
    pairs = zip(tables.names, tables.specs, strict=True)
    kept = [f"{name + ': ' if name else ''}{spec.fallback}" for name, spec in pairs if spec.fallback]
    if kept:
        constructors = sum("__init__" in vars(cls) for cls in type(tables).__mro__ if issubclass(cls, StoredTables))
        text = f"{len(kept)} of {len(tables.specs)} tables stay full: {'; '.join(kept)}"
        warnings.warn(text, stacklevel=2 + constructors)  # point at the line that constructs the module
