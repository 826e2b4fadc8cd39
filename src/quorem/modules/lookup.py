"""Lookups of single ids and of bags, and the full tables that a module represents."""

import warnings
from typing import Literal

import torch
from torch import Tensor

from ..checks import check_device, is_exporting
from ..ops import autograd
from ..ops.cpu.pages import in_huge_pages
from ..ops.declare import is_eager
from ..ops.lagging import unwatched
from ..ops.layout import LIMIT, pool_key
from ..ops.lookup import pooling_factor
from ..ops.projection import Piece, pieces_of, project
from ..ops.rows import IdBatch, accumulator, bag_and_feature, larger, lookup_reads, raise_out_of_range, reads_of
from ..ops.updates import updates_of
from ..paper.operations import OPERATIONS
from ..paper.partitions import Partition
from ..paper.schemes.frequency import places
from . import plain
from .id_rules import replaced_ids
from .path_networks import PathNetworks
from .storage import StoredTables

AT_ONCE = 2048  # batch entries a thread of a lookup of narrow rows


class Tables(StoredTables):
    """The base of ``Embedding``, ``EmbeddingBag`` and ``EmbeddingCollection``: storage and lookup.

    A lookup is one op for any number of tables and any mix of schemes; path networks add their own.
    """

    ids_argument = "input"  # name of the ids in ``forward``
    exported_unknown: Literal["nan", "zeros"] = "nan"  # the vector of an id outside its table in an exported program
    _lookups = 0  # number of lookups in which ids out of range were counted
    _warned = False

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
            numbers, partitions = place[composed] - spec.num_own, spec.partitions
            if spec.pool is not None:
                first, mixing = self.pool_numbering(table)
                numbers = mixing(numbers + first)
                extents = self.pools[pool_key(self.pools, spec)]
                partitions = tuple(Partition(1, extent.rows) for extent in extents)
                rows = self._views(extents)
            else:
                numbers = numbers if spec.permutation is None else spec.permutation(numbers)
                rows = stored[spec.num_own > 0 :]
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

    def _row_numbers(self, ids: Tensor) -> Tensor:
        """The rows of ``stored`` whose sums are the vectors of ``ids`` ``[B, F]``: ``[B, F, K]``; -1 for no row."""
        for name, spec in zip(self.names, self.specs, strict=True):
            title = f"table {name}: " if name else ""
            if spec.hidden is not None or (spec.operation != "add" and len(spec.partitions) > 1):
                raise ValueError(f"{title}scheme ({spec.scheme}) must add rows: only then is a vector a sum of rows")
            if spec.is_narrow:
                raise ValueError(f"{title}width ({spec.width}) of rows must be embedding_dim ({spec.embedding_dim})")
            if spec.embedding_dim != self.width:
                rule = f"must be that of all tables ({self.width})"
                raise ValueError(f"{title}embedding_dim ({spec.embedding_dim}) {rule}")
        ids = self._within(ids, None)
        raise_out_of_range(IdBatch(ids), self.layout, self.titles)
        reads = lookup_reads(ids, self.layout)
        return torch.where(reads.valid[..., None] & reads.used, reads.rows, -1)

    def _lookup(self, batch: IdBatch, given: bool = True) -> Tensor:
        """Composed vectors ``[B, S, W]`` of a batch; those of a bag are pooled. Narrow rows are not projected yet.

        ``given``: the offsets are the caller's, so an exported program checks them.
        """
        if self.updates.lagging is not None and torch._C._is_torch_function_enabled():
            with unwatched():
                return self._lookup(batch, given)
        stored, ids, offsets = self.live_stored, batch.ids, batch.offsets
        if offsets is not None or ids.device != stored.device:
            check_device(stored, self.ids_argument, ids, offsets, batch.sample_weights)
        if is_exporting():
            self.updates.flush_before_capture_()
            return plain.lookup(self, batch, checks=given)
        if "id_rules" in self._buffers:
            ids = self._within(ids, offsets)
            batch = IdBatch(ids, offsets, batch.sample_weights, batch.mean)
        invalid = self._buffers["invalid_ids"] if self._counts_invalid(ids) else None  # faster than an attribute
        groups, options = self.networks() if self._modules else (), self._read_options()
        if offsets is not None and sum(len(group.members) for group in groups) == len(self.features):
            with torch.no_grad():  # _path_bag has the gradients of all features
                out = autograd.lookup(batch, stored, self.layout, self.updates, options, invalid=invalid)
        else:
            sparse = self.sparse
            out = autograd.lookup(batch, stored, self.layout, self.updates, options, sparse=sparse, invalid=invalid)
        if invalid is not None:
            self._report_invalid()
        for group in groups:
            if offsets is None:
                out = group.transform(out, ids, self.layout.ranks)
            else:  # the op pooled rows that were not transformed: replace its output
                out = out.index_copy(1, group.columns, self._path_bag(group, batch))
        return out

    def _project(self, composed: Tensor, out: Tensor | None = None) -> Tensor:
        """The vectors ``[B, sum of D]`` of composed rows ``[B, S, W]``: narrow ones times the matrices of their tables.

        Without gradients they are written to ``out``, where that is given.
        """
        if len(self.specs) == 1 and out is None:  # all vectors times one matrix
            return (composed.reshape(-1, self.specs[0].width) @ self.projections[0]).view(composed.shape[0], -1)
        return project(composed.flatten(1), self._pieces(), list(self.projections), out)

    def _pieces(self) -> list[Piece]:
        tables = [t for t in self.table_of for _ in range(self.specs[t].num_vectors)]
        widths, dims = [self.specs[t].width for t in tables], [self.specs[t].embedding_dim for t in tables]
        return pieces_of(widths, dims, [self.narrow.index(t) if t in self.narrow else -1 for t in tables])

    def _projected(self, ids: Tensor) -> Tensor:
        """The vectors of narrow rows of ids ``[B, F]``, in blocks whose composed rows stay in the processor's cache."""
        size = AT_ONCE * torch.get_num_threads()
        if not is_eager() or torch.is_grad_enabled() or not ids.is_cpu or len(ids) <= size:
            return self._project(self._lookup(IdBatch(ids)))
        length = sum(piece.dim for piece in self._pieces())
        out = in_huge_pages(torch.empty(len(ids), length, dtype=self.dtype))
        for block, vectors in zip(ids.split(size), out.split(size), strict=True):
            self._project(self._lookup(IdBatch(block)), vectors)
        return out

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
        position = bag % larger(size, 1) * members + member
        pooled = vectors.new_zeros((size + 1) * members, vectors.shape[1]).index_add(0, position, vectors)
        return pooled[: size * members].view(size, group.columns.shape[0], self.width).to(self.dtype)

    def _within(self, ids: Tensor, offsets: Tensor | None) -> Tensor:
        """``ids`` with raw ids hashed to ids of their tables and unknown ids replaced."""
        layout = self.layout  # first, since this may rebuild the rules
        rules: Tensor | None = self._buffers.get("id_rules")
        if rules is None:
            return ids
        feature = None if offsets is None else bag_and_feature(ids, offsets, layout.spans)[1]
        limits = layout.slots[layout.spans[:, 0], LIMIT]
        return replaced_ids(ids, feature, rules, limits, self._listed)

    def _signed(self, ids: Tensor) -> Tensor:
        """Unsigned raw ids reinterpreted as int64, since torch does not compute with uint64."""
        is_unsigned = isinstance(ids, Tensor) and ids.dtype is torch.uint64 and any(self.raw_ids)
        return ids.view(torch.int64) if is_unsigned else ids

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
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return
        self.__dict__["_lookups"] = self._lookups + 1  # faster than assigning a module's attribute
        if not self._warned and self._lookups & (self._lookups - 1) == 0:
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


def module_of(stored: Tensor) -> Tables | None:
    """A module that has this parameter as its ``stored``, or None."""
    updates = updates_of(stored)
    return None if updates is None else next(iter(updates.modules), None)
