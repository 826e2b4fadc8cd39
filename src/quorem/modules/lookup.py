"""Lookups of single ids and of bags, and the full tables that a module represents."""

import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..checks import check_device, check_ids
from ..ops import autograd
from ..ops.declare import is_eager, is_traced
from ..ops.lagging import unwatched, updates_of
from ..ops.layout import LIMIT, Layout, checksum
from ..ops.lookup import pooling_factor
from ..ops.narrow import project
from ..ops.pieces import Pieces
from ..ops.rows import IdBatch, accumulator, bag_and_feature, lookup_reads, raise_out_of_range, reads_of, rows_read
from ..ops.updates import uncompiled
from ..paper.operations import OPERATIONS
from ..paper.schemes.frequency import places
from . import plain
from .id_rules import replaced_ids
from .path_networks import PathNetworks
from .storage import StoredTables


class Tables(StoredTables):
    """The base of ``Embedding``, ``EmbeddingBag`` and ``EmbeddingCollection``: storage and lookup.

    A lookup is one op for any number of tables and any mix of schemes; path networks add their own.
    """

    ids_argument = "input"  # name of the ids in ``forward``
    exported_unknown: Literal["nan", "zeros"] = "nan"  # the vector of an id outside its table in an exported program
    _lookups = 0  # number of lookups in which ids out of range were counted
    _warned = False

    @property
    def layout(self) -> Layout:
        """The integers from which the ops compute the rows of an id."""
        buffers: dict[str, Any] = self._buffers  # faster than a module's attribute lookup
        layout: Layout | None = self.__dict__.get("_layout")
        if layout is None or layout.slots is not buffers["slots"] or layout.parts is not buffers["parts"]:
            if layout is None:
                self._take_filled_integers()
            layout = Layout(*[buffers[name] for name in Layout._fields])
            self.__dict__["_layout"] = None if layout.slots.is_meta else layout
        elif not torch.compiler.is_compiling():
            self._check_unwritten(layout)
        return layout

    def _check_unwritten(self, layout: Layout) -> None:
        """Raise RuntimeError if the integers were overwritten, as by an average over buffers, which rounds them."""
        version = 0 if layout.slots.is_inference() else layout.slots._version
        if version == self.__dict__.get("_version") or not is_eager():
            return
        # DistributedDataParallel sends the buffers of the first process at each call: comparing would wait for a GPU.
        if DistributedDataParallel._active_ddp_module is None and checksum(layout) != self._checksum:
            title, hint = self.names[0] or type(self).__name__, "average parameters only, or load a state_dict"
            raise RuntimeError(f"integers of {title!r} were overwritten, so ids would read other rows: {hint}")
        self.__dict__["_version"] = version

    def dense(self, table: int = 0) -> Tensor:
        """The full table ``[n, D]`` that one table represents, computed directly from the paper's equations.

        It is ``[n, K, D]`` for feature generation. Differentiable.
        """
        spec, pad, stored = self.specs[table], self.padding[table], self.tables(table)
        place = places(spec, self.ranks_of[table]).to(self.live_stored.device)
        ids = torch.arange(spec.num_embeddings, device=place.device)
        composed, own = ids[place >= spec.num_own], ids[place < spec.num_own]
        dense = torch.empty(0)
        if len(composed):
            numbers, partitions, rows = place[composed] - spec.num_own, spec.partitions, stored[spec.num_own > 0 :]
            if pool := self.pool_of(table):
                numbers = pool.mixing(numbers + pool.offsets[table])
                partitions, rows = pool.partitions, self._views(pool.extents)
            dense = OPERATIONS[spec.operation](*(t[p(numbers)] for t, p in zip(rows, partitions, strict=False)))
            for group in self.networks():
                if table in (members := [self.table_of[f] for f in group.members]):
                    member = torch.full_like(composed, members.index(table))
                    dense = group(dense.to(self.dtype), composed, member, self.layout.ranks)
        if spec.num_own:
            vectors = stored[0].new_zeros(spec.num_embeddings, spec.width)
            vectors = vectors.index_copy(0, own, stored[0][place[own]])
            dense = vectors.index_copy(0, composed, dense.to(vectors.dtype)) if len(composed) else vectors
        dense = dense if pad is None else dense.index_fill(0, torch.tensor([pad], device=ids.device), 0)
        matrix = self.projection(table)
        dense = dense if matrix is None else dense @ matrix.to(dense.dtype)
        return dense.to(self.dtype)

    def num_duplicates(self, table: int = 0) -> int:
        """Number of ids whose vector equals that of a lower id; 0 if all vectors are distinct.

        Theorem 1 guarantees 0 for ``concat`` over distinct rows. ``add`` and ``mult`` can collide, and ``Hash`` does.
        The rest of a ``HotCold`` table shares one vector by design, which makes ``num_rest - 1`` duplicates.
        """
        vectors = self.dense(table).detach().flatten(1)
        return len(vectors) - len(vectors.unique(dim=0))

    def row_numbers(self, ids: Tensor) -> Tensor:
        """The rows of ``stored`` whose sum is the vector of each id, ``[..., K]``; -1 where there is no row.

        With them, any engine that sums rows can look up these tables. All rows of the padding id are -1.

        Args:
            ids: ``[B, F]``, of F features; of any shape for a module of one table.

        Raises:
            ValueError: if a scheme does not add rows, or widths differ.

        >>> from quorem import QR, Embedding
        >>> Embedding(10, 4, QR(2, operation="add")).row_numbers(torch.tensor([0, 7]))
        tensor([[0, 5],
                [2, 6]])
        """
        ids, features = self._checked(ids), len(self.features)
        if self.names != ("",) and (ids.dim() != 2 or ids.shape[1] != features):
            raise ValueError(f"ids has shape {tuple(ids.shape)} but must be [B, {features}]")
        for name, spec in zip(self.names, self.specs, strict=True):
            title, dim = f"table {name}: " if name else "", spec.embedding_dim
            if spec.hidden is not None or (spec.operation != "add" and len(spec.partitions) > 1):
                raise ValueError(f"{title}scheme ({spec.scheme}) must add rows: only then is a vector a sum of rows")
            if spec.is_narrow:
                raise ValueError(f"{title}width ({spec.width}) of rows must be embedding_dim ({dim})")
            if dim != self.width:
                raise ValueError(f"{title}embedding_dim ({dim}) must be that of all tables ({self.width})")
        known = self._within(ids.reshape(-1, features), None)
        raise_out_of_range(IdBatch(known), self.layout, self.titles)
        return rows_read(lookup_reads(known, self.layout)).view(*ids.shape, self.parts.shape[1])

    def _lookup(self, batch: IdBatch, pieces: Pieces | None = None) -> Tensor:
        """Composed vectors ``[B, S, W]`` of a batch; those of a bag are pooled. Narrow rows are not projected yet.

        With the ``pieces`` of all features, single ids are projected too, outside of any tracer: ``[B, sum of D]``.
        """
        updates = self.updates
        if (updates.lagging or updates.collector) and torch.compiler.is_dynamo_compiling() and not is_traced():
            return uncompiled(self._lookup, batch, pieces)
        if updates.lagging is not None and torch._C._is_torch_function_enabled():
            with unwatched():
                return self._lookup(batch, pieces)
        stored, ids, offsets = self._parameters.get("stored"), batch.ids, batch.offsets
        stored = self.live_stored if stored is None else stored  # asked for only if a parametrization computes it
        if offsets is not None or ids.device != stored.device:
            check_device(stored, self.ids_argument, ids, offsets, batch.sample_weights)
        eager = is_eager()
        if not eager and is_traced():
            updates.flush_()
            return plain.lookup(self, batch)
        if not self.bits and stored.shape[1] != self.width:  # kernels do not look
            raise ValueError(f"stored has rows of {stored.shape[1]} numbers but must have rows of {self.width}")
        if "id_rules" in self._buffers:
            ids = self._within(ids, offsets)
            batch = IdBatch(ids, offsets, batch.sample_weights, batch.mean)
        invalid = self._buffers["invalid_ids"] if self._counts_invalid(ids) else None  # faster than an attribute
        groups = self.networks() if self._modules else ()
        read, sparse = (batch, stored, self.layout, updates, self._read_options()), self.sparse
        if pieces is not None:  # torch 2.11's compiler takes an empty ``Pieces`` for true
            out = autograd.lookup_projected(*read, pieces, self.matrices(), sparse=sparse, invalid=invalid)
        elif offsets is not None and sum(len(group.members) for group in groups) == len(self.features):
            with torch.no_grad():  # _path_bag has the gradients of all features
                out = autograd.lookup(*read, invalid=invalid)
        else:
            out = autograd.lookup(*read, sparse=sparse, invalid=invalid, eager=eager)
        if invalid is not None:
            self._report_invalid()
        for group in groups:
            if offsets is None:
                out = group.transform(out, ids, self.layout.ranks)
            else:  # the op pooled rows that were not transformed: replace its output
                out = out.index_copy(1, group.columns, self._path_bag(group, batch))
        return out

    def _vectors(self, batch: IdBatch) -> Tensor:
        """The vectors of a batch: ``[B, S, W]``, or ``[B, sum of D]`` where narrow rows are multiplied by matrices.

        Bags are pooled before that: fewer products, and the same sums.
        """
        if not self.narrow:
            return self._lookup(batch)
        if batch.offsets is None and is_eager() and not self.networks():
            return self._lookup(batch, self.pieces)
        return project(self._lookup(batch).flatten(1), self.pieces, self.matrices())

    def _path_bag(self, group: PathNetworks, batch: IdBatch) -> Tensor:
        """Pooled vectors of the features of one group, ``[B, slots of the group, W]``; transformed before pooling."""
        stored, spans, (ids, offsets, _, _) = self.live_stored, self.spans, batch
        assert offsets is not None
        bag, feature = bag_and_feature(ids, offsets, spans)
        members, member = len(group.members), group.member[feature]
        inside = (member >= 0) & (torch.arange(ids.shape[0], device=ids.device) < offsets[-1])
        member = member.clamp(min=0)
        slot = group.columns.view(members, -1)[member]
        reads = reads_of(ids[:, None], self.slots[slot], self.parts[slot], self.layout)
        valid = reads.valid & inside[:, None]
        rows = torch.where(reads.used, reads.rows, 0).sum(-1)  # one is used: the id's own row, or its first partition's
        alone = len(group.members) == len(self.features)  # torch cannot add two sparse gradients in float16
        sparse = self.sparse and (alone or stored.dtype != torch.float16)
        vectors = autograd.gather_rows(rows, stored, self.updates, self._read_options(), sparse)
        vectors = vectors.to(self.dtype).flatten(1)
        vectors = group(vectors, ids, member, self.layout.ranks)
        vectors = vectors.to(accumulator(vectors))
        factor = pooling_factor(valid, bag, batch, vectors.dtype)[:, 0]
        vectors = torch.where(valid[:, :1], vectors * factor, 0)
        size = (offsets.shape[0] - 1) // spans.shape[0]
        position = bag % torch.sym_max(size, 1) * members + member
        pooled = vectors.new_zeros((size + 1) * members, vectors.shape[1]).index_add(0, position, vectors)
        return pooled[: size * members].view(size, group.columns.shape[0], self.width).to(self.dtype)

    def _within(self, ids: Tensor, offsets: Tensor | None) -> Tensor:
        """``ids`` with raw ids hashed to ids of their tables and unknown ids replaced."""
        if self.__dict__.get("_layout") is None:
            self._take_filled_integers()  # which may rebuild the rules
        rules: Tensor | None = self._buffers.get("id_rules")
        if rules is None:
            return ids
        feature = None if offsets is None else bag_and_feature(ids, offsets, self.spans)[1]
        limits = self.slots[self.spans[:, 0], LIMIT]
        return replaced_ids(ids, feature, rules, limits, self._listed)

    def _checked(self, ids: Tensor, name: str = "") -> Tensor:
        """The ids, of a type that ops take. Unsigned raw ids become int64: torch does not compute with uint64."""
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            if isinstance(ids, Tensor) and ids.dtype is torch.uint64 and any(self.raw_ids):
                return ids.view(torch.int64)
            check_ids(ids, name or self.ids_argument)
        return ids

    def _sample_weights(self, weights: Tensor | None, ids: Tensor) -> Tensor | None:
        """The weights of ids in bags, checked, in the dtype of the vectors."""
        if weights is None:
            return None
        if not isinstance(weights, Tensor) or not weights.is_floating_point():
            got = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
            raise TypeError(f"per_sample_weights ({got}) must be a floating-point Tensor")
        if weights.shape != ids.shape:
            rule = f"the shape of {self.ids_argument} {tuple(ids.shape)}"
            raise ValueError(f"per_sample_weights {tuple(weights.shape)} must have {rule}")
        return weights.to(self.dtype)

    def _read_options(self) -> autograd.ReadOptions:
        if self.bits:
            return {"names": self.titles, "width": self.width, "bits": self.bits, "dtype": self.vector_dtype}
        return {"names": self.titles}

    def _counts_invalid(self, ids: Tensor) -> bool:
        """Whether ids out of range are counted; CPU ops raise instead."""
        return ids.is_cuda and self.on_invalid_id != "trust"

    def _report_invalid(self) -> None:
        """Raise or warn about the counted ids out of range, as ``on_invalid_id`` says."""
        if self.on_invalid_id == "raise":
            torch._assert_async(self.invalid_ids == 0, f"an id is out of range in {self.titles!r}")
            return
        if self._warned or torch.compiler.is_compiling():
            return
        self.__dict__["_lookups"] = lookups = self._lookups + 1  # faster than assigning a module's attribute
        if lookups & (lookups - 1) == 0 and not torch.cuda.is_current_stream_capturing():
            self._warned = self.warn_invalid_ids() > 0

    def warn_invalid_ids(self) -> int:
        """Number of ids out of range so far in lookups on a GPU; warns if there were any.

        With ``on_invalid_id="warn"`` it is called automatically at the 1st, 2nd, 4th, 8th, ... lookup until it has
        warned. It is not called at every lookup, since reading the count waits for the GPU.
        """
        count = int(self.invalid_ids)
        if count:
            tables = ", ".join(self.titles.split("\n"))
            warnings.warn(f"{count} ids out of range in {tables}: each gave a vector of zeros", stacklevel=2)
        return count


def tables_in(module: nn.Module) -> list[Tables]:
    """The quorem modules in ``module``, of which there must be some."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module ({type(module).__name__}) must be an nn.Module, in which tables are looked for")
    members = [m for m in module.modules() if isinstance(m, Tables)]
    if not members:
        raise ValueError(f"module ({type(module).__name__}) must contain a quorem table")
    return members


def module_of(stored: Tensor) -> Tables | None:
    """A module that has this parameter as its ``stored``, or None."""
    updates = updates_of(stored)
    return None if updates is None else next(iter(updates.modules), None)
