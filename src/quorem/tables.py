"""Storage and lookup of the tables of a module: one parameter, found by integers, with a name for each table in it."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from . import init, saved
from .checks import InvalidIdMode, check_choice, check_device, check_dtype
from .operations import OPERATIONS
from .ops import autograd, declare, layout
from .ops.lookup import pooling_factor
from .ops.rows import accumulator, bag_and_feature, larger, rows_of
from .ops.updates import Updates, updates_of
from .partitions import naive
from .paths import PathNetworks
from .schemes import Path, TableSpec


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
    invalid_ids: Tensor
    ids_argument = "input"  # what ``forward`` calls the ids

    def __init__(
        self,
        names: Sequence[str],
        specs: Sequence[TableSpec],
        padding: Sequence[int | None],
        *,
        sparse: bool,
        on_invalid_id: InvalidIdMode,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        check_choice("on_invalid_id", on_invalid_id, InvalidIdMode)
        check_dtype(dtype)
        self.names, self.specs, self.padding = tuple(names), tuple(specs), tuple(padding)
        self.sparse, self.on_invalid_id = sparse, on_invalid_id
        self.titles = "\n".join(f"table {name}" if name else f"{type(self).__name__}" for name in names)
        storage = layout.build(specs, padding)
        self.extents = storage.extents
        self.stored = nn.Parameter(torch.empty(storage.num_rows, storage.width, device=device, dtype=dtype))
        groups = _path_groups(specs)
        networks = [PathNetworks(group, specs, padding, storage.layout.spans, device, dtype) for group in groups]
        self.paths = nn.ModuleList(networks) if networks else ()
        self._lookups, self._warned = 0, False
        self.reset_parameters()
        _warn_of_fallbacks(self)

    @property
    def num_parameters(self) -> int:
        """Stored parameters."""
        return sum(spec.num_parameters for spec in self.specs)

    @property
    def compression(self) -> float:
        """Parameters of the full tables over stored parameters."""
        return sum(spec.num_embeddings * spec.embedding_dim for spec in self.specs) / self.num_parameters

    def reset_parameters(self, method: init.Method = "matched") -> None:
        """Draw the tables anew: ``"matched"``, ``"symmetric"`` or ``"reference"`` (see ``quorem.init``)."""
        self.place_integers()  # after to_empty() the buffers hold nothing
        for f, spec in enumerate(self.specs):
            init.init_(self.tables(f), spec, method)
            if self.is_full(f) and self.padding[f] is not None:
                self.tables(f)[0].data[self.padding[f]] = 0  # as in torch.nn; lookups give zeros in any case
        for group in self._path_networks():
            group.reset_parameters()

    def tables(self, feature: int = 0) -> list[Tensor]:
        """The stored tables of one feature, views ``[rows, width]`` of ``stored``."""
        self.updates.flush_()
        return [extent.of(self.stored) for extent in self.extents[feature]]

    def named_tables(self, values: Tensor | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and view of each stored table.

        Args:
            values: a tensor shaped as ``stored`` to take the views of, such as ``stored.grad``; ``stored`` if None.
        """
        if values is None:
            self.updates.flush_()
            values = self.stored
        for name, extents in zip(self.names, self.extents, strict=True):
            for j, extent in enumerate(extents):
                yield f"tables.{name}.{j}" if name else f"tables.{j}", extent.of(values)

    def dense(self, feature: int = 0) -> Tensor:
        """The table that a feature stands for, ``[n, D]``, straight from the paper's equations.

        Differentiable. Feature generation gives ``[n, K, D]``.
        """
        spec, pad = self.specs[feature], self.padding[feature]
        ids = torch.arange(spec.num_embeddings, device=self.stored.device)
        placed = ids if spec.permutation is None else spec.permutation(ids)
        rows = [table[p(placed)] for table, p in zip(self.tables(feature), spec.partitions, strict=False)]
        dense = OPERATIONS[spec.operation](*rows)
        for group in self._path_networks():
            if feature in group.members:
                dense = group(dense, ids, torch.full_like(ids, group.members.index(feature)))
        return dense if pad is None else dense.index_fill(0, torch.tensor([pad], device=ids.device), 0)

    def is_full(self, feature: int = 0) -> bool:
        """Whether a feature's one stored table is the table that it stands for, row by row."""
        spec = self.specs[feature]
        one_row = spec.permutation is None and spec.partitions == naive(spec.num_embeddings)
        return one_row and spec.operation != "feature"  # which has a dimension more

    def num_duplicates(self, feature: int = 0) -> int:
        """Number of ids whose vector equals that of a lower id: 0 where each has a vector of its own.

        Theorem 1 promises that for ``concat`` over distinct rows; ``add`` and ``mult`` can collide, and a hash does.
        """
        vectors = self.dense(feature).detach().flatten(1)
        return len(vectors) - len(vectors.unique(dim=0))

    def _lookup(self, ids: Tensor) -> Tensor:
        """Composed vectors ``[B, S, W]`` of ``ids`` ``[B, F]``."""
        stored = self.stored
        check_device(stored, self.ids_argument, ids)
        invalid = self.invalid_ids if self._counts_invalid(ids) else None
        out = autograd.lookup(
            ids, stored, self.layout, self.updates, names=self.titles, sparse=self.sparse, invalid=invalid
        )
        if invalid is not None:
            self._report_invalid()
        for group in self._path_networks():
            out = group.transform(out, ids)
        return out

    def _bag(self, ids: Tensor, offsets: Tensor, sample_weights: Tensor | None, mean: bool) -> Tensor:
        """Composed, then pooled vectors ``[B, S, W]`` of jagged ``ids`` ``[V]``; ``offsets`` ``[F * B + 1]``."""
        stored, layout = self.stored, self.layout
        check_device(stored, self.ids_argument, ids, offsets, sample_weights)
        if self._counts_invalid(ids):
            declare.call("count_invalid_", ids, offsets, self.invalid_ids, layout)
            self._report_invalid()
        inputs = (ids, offsets, sample_weights, stored, layout, self.updates)
        out = autograd.bag(*inputs, mean=mean, names=self.titles, sparse=self.sparse)
        for group in self._path_networks():  # the op pooled their rows; they have to be transformed before
            out = out.index_copy(1, group.columns, self._path_bag(group, ids, offsets, sample_weights, mean))
        return out

    def _path_bag(
        self, group: PathNetworks, ids: Tensor, offsets: Tensor, sample_weights: Tensor | None, mean: bool
    ) -> Tensor:
        """Transformed, then pooled vectors of the features of one group, ``[B, slots of the group, W]``."""
        stored, spans = self.stored, self.spans
        bag, feature = bag_and_feature(ids, offsets, spans)
        members, member = len(group.members), group.member[feature]
        inside = (member >= 0) & (torch.arange(ids.shape[0], device=ids.device) < offsets[-1])
        member = member.clamp(min=0)
        slot = group.columns.view(members, -1)[member]
        rows, valid = rows_of(ids[:, None], self.slots[slot], self.parts[slot][..., :1, :], self.maps)
        valid = valid & inside[:, None]
        vectors = autograd.gather(rows[..., 0], stored, self.updates, self.sparse).flatten(1)
        vectors = group(vectors, ids, member).to(accumulator(stored))
        factor = pooling_factor(valid, bag, sample_weights, offsets, mean, vectors.dtype)[:, 0]
        vectors = torch.where(valid[:, :1], vectors * factor, 0)
        batch = (offsets.shape[0] - 1) // spans.shape[0]
        position = bag % larger(batch, 1) * members + member
        pooled = vectors.new_zeros((batch + 1) * members, vectors.shape[1]).index_add(0, position, vectors)
        return pooled[: batch * members].view(batch, group.columns.shape[0], stored.shape[1]).to(stored.dtype)

    @property
    def layout(self) -> layout.Layout:
        """The integers by which the ops find the rows of an id."""
        buffers: dict[str, Any] = self._buffers  # an attribute of a module takes longer to find
        return layout.Layout(buffers["slots"], buffers["parts"], buffers["maps"], buffers["spans"])

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
        integers = layout.build(self.specs, self.padding).layout._asdict()
        integers["invalid_ids"] = torch.zeros((), dtype=torch.int64, device="cpu")
        for name, values in integers.items():
            self.register_buffer(name, values.to(self.stored.device), persistent=False)
        for group in self._path_networks():
            group.place_integers(self.stored.device)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in ``nn.Module``, and tell optimizers whose parameter ``stored`` now is."""
        super().register_parameter(name, param)
        if name == "stored":
            self._bind_updates()

    def _bind_updates(self) -> None:
        if "updates" in self.__dict__:
            self.updates.modules.discard(self)
        self.updates = updates_of(self.stored) or Updates(self.stored)
        self.updates.modules.add(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.updates.flush_()
        super()._apply(fn, recurse)
        self._bind_updates()  # the parameter may be another object
        return self

    def __getstate__(self) -> Any:
        self.updates.flush_()  # in a copy every row is up to date
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind_updates()

    _save_to_state_dict = saved.save_tables
    _load_from_state_dict = saved.load_tables


def module_of(stored: Tensor) -> Tables | None:
    """A module whose ``stored`` this is, or None."""
    updates = updates_of(stored)
    return None if updates is None else next(iter(updates.modules), None)


def _path_groups(specs: Sequence[TableSpec]) -> list[list[int]]:
    """Features whose path networks have one shape, and so run together."""
    groups: dict[Any, list[int]] = {}
    for f, spec in enumerate(specs):
        if isinstance(spec.scheme, Path):
            shape = (spec.embedding_dim, spec.scheme.hidden, spec.scheme.activation, len(spec.partitions))
            groups.setdefault(shape, []).append(f)
    return list(groups.values())


def _warn_of_fallbacks(tables: Tables) -> None:
    pairs = zip(tables.names, tables.specs, strict=True)
    kept = [f"{name + ': ' if name else ''}{spec.fallback}" for name, spec in pairs if spec.fallback]
    if kept:
        constructors = sum("__init__" in vars(cls) for cls in type(tables).__mro__ if issubclass(cls, Tables))
        text = f"{len(kept)} of {len(tables.specs)} tables stay full: {'; '.join(kept)}"
        warnings.warn(text, stacklevel=2 + constructors)  # where the module was made
