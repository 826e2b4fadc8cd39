"""Map ids to rows of TorchRec's tables, in a module without parameters that input pipelines may run early.

The stored tables of quorem's are divided among a few pooled tables of TorchRec's, the shards, that are read about
equally often. A rank asks for the distinct rows of its batch, each once, in a bag of its own.
"""

import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from ...checks import check_ids
from ...modules.collection import EmbeddingCollection
from ...modules.id_rules import replaced_ids, rules_of
from ...modules.meaning import meaning_of
from ...ops import layout as column
from ...ops.layout import Layout, build
from ...ops.rows import out_of_range, raise_first, reads_of, rows_read
from ...paper import init
from ...paper.schemes.frequency import Ranks, list_sizes

NOMINAL_BATCH = 8192  # batch size for which shards are balanced


class Part(NamedTuple):
    """A stored table of quorem's, and the interval that its initial values come from."""

    name: str  # in the single-device collection, such as ``tables.user.0``
    num_rows: int
    width: int
    low: float
    high: float


class Shard(NamedTuple):
    """A table of TorchRec's: the rows of some parts of one width, one after another."""

    name: str
    width: int
    parts: tuple[Part, ...]

    @property
    def num_rows(self) -> int:
        """Number of rows of all parts."""
        return sum(part.num_rows for part in self.parts)


class Ids(NamedTuple):
    """A feature's ids in a batch, U of them distinct."""

    distinct: Tensor  # [U]
    valid: Tensor  # bool [U]: the id is neither padding nor out of range
    positions: tuple[Tensor, ...]  # [U] for each part: the position of the id's row (see ``_request``)
    inverse: Tensor  # for each id of the bags, its position in ``distinct``
    lengths: Tensor  # [B]
    bag: Tensor | None  # for each id of the bags, its bag; None if every bag has one id
    weights: Tensor | None  # one for each id of the bags


class RowBatch(NamedTuple):
    """The rows that a batch reads, of the shards of each width, and the ids that read them."""

    rows: tuple[KeyedJaggedTensor, ...]
    features: tuple[Ids, ...]
    ranks: Tensor  # the lists of hot and cold ids


class RowNumbers(nn.Module):
    """Maps the ids of a KeyedJaggedTensor to row numbers, whatever the order of its keys.

    An id out of range raises IndexError on the CPU. On a GPU it reads no row, so its vector is zero, and
    ``on_invalid_id`` says whether that is reported. The padding id reads no row either.

    Its ``state_dict`` has what the rows mean, which is compared when it is loaded, and the lists of hot and cold ids.

    ``template`` is a single-device collection of the tables, on the meta device. One width has at most ``num_shards``.
    """

    slots: Tensor
    parts: Tensor
    maps: Tensor
    spans: Tensor
    ranks: Tensor
    id_rules: Tensor
    meaning: Tensor

    weighted = False  # whether the features have weights

    def __init__(self, template: EmbeddingCollection, num_shards: int) -> None:
        super().__init__()
        self.names, self.titles = template.features, [f"table {template.names[t]}" for t in template.table_of]
        self.on_invalid_id, self.warned = template.on_invalid_id, False
        layout = build(template.specs, template.padding, template.table_of, template.ranks_of).layout
        self.limits = layout.slots[layout.spans[:, 0], column.LIMIT].tolist()
        by_base = dict(zip((extent.base for extent in template.all_extents), parts_of(template), strict=True))
        self.parts_read: list[list[Part]] = []  # by each feature
        parts = []
        for first, count in layout.spans.tolist():
            slots = layout.parts[first : first + count].tolist()
            found = {part[column.BASE]: part for slot in slots for part in slot if part[column.BASE] in by_base}
            self.parts_read.append([by_base[base] for base in found])
            parts.append(list(found.values()))
        distinct = self.expected_rows(NOMINAL_BATCH, {})
        widths = list(dict.fromkeys(part.width for part in by_base.values()))
        self.groups = [
            balanced_shards([part for part in by_base.values() if part.width == width], distinct, num_shards)
            for width in widths
        ]
        # A slot for each feature, whose parts' rows are counted within the shards of their width.
        first_row: dict[str, int] = {}
        for group in self.groups:
            in_order = [part for shard in group for part in shard.parts]
            starts = accumulate((part.num_rows for part in in_order), initial=0)
            first_row |= {part.name: start for part, start in zip(in_order, starts, strict=False)}
        for of_feature in parts:
            for part in of_feature:
                part[column.BASE], part[column.PITCH] = first_row[by_base[part[column.BASE]].name], 1
        most = max(map(len, parts))
        parts = [part + [[*column.UNUSED_PART]] * (most - len(part)) for part in parts]
        rules, self.listed = rules_of(template, layout)
        integers: dict[str, Any] = {"slots": layout.slots[layout.spans[:, 0]].long(), "parts": parts}
        integers |= {"maps": layout.maps, "spans": layout.spans, "id_rules": rules}
        for name, values in integers.items():
            self.register_buffer(name, torch.as_tensor(values, device="cpu"), persistent=False)
        self.register_buffer("ranks", layout.ranks, persistent=len(layout.ranks) > 0)
        self.register_buffer("meaning", meaning_of(template))
        self.expected = self.meaning.tolist()

    def forward(self, features: KeyedJaggedTensor) -> RowBatch:
        """The rows that the batch reads."""
        self._check(features)
        layout = Layout(self.slots, self.parts, self.maps, self.spans, self.ranks)
        single = features.values().numel() == features.lengths().numel() and bool(features.lengths().all())
        every = [features[name] for name in self.names]
        distinct = [torch.unique(ids, return_inverse=True) for ids in self._ids_of(every)]
        reads = [
            reads_of(ids[:, None], self.slots[f : f + 1], self.parts[f : f + 1], layout)
            for f, (ids, _) in enumerate(distinct)
        ]
        rows = [rows_read(each)[:, 0] for each in reads]
        requests: list[KeyedJaggedTensor] = []
        positions: dict[tuple[int, int], Tensor] = {}
        read = [(f, j, part) for f, parts in enumerate(self.parts_read) for j, part in enumerate(parts)]
        for group in self.groups:
            readers = [(f, j) for f, j, part in read if part.width == group[0].width]
            request, index = _request(group, torch.cat([rows[f][:, j] for f, j in readers]))
            positions |= zip(readers, index.split([len(rows[f]) for f, _ in readers]), strict=True)
            requests.append(request)
        batches = []
        for f, (jagged, (ids, inverse)) in enumerate(zip(every, distinct, strict=True)):
            lengths, weights = jagged.lengths(), jagged.weights() if self.weighted else None
            bag = None if single else torch.arange(len(lengths), device=ids.device).repeat_interleave(lengths)
            of_parts = tuple(positions[f, j] for j in range(len(self.parts_read[f])))
            batches.append(Ids(ids, reads[f].valid[:, 0], of_parts, inverse, lengths, bag, weights))
        return RowBatch(tuple(requests), tuple(batches), self.ranks)

    def expected_rows(self, batch_size: int, ids_per_sample: Mapping[str, float]) -> dict[str, float]:
        """How many distinct rows of each part a batch reads, by the part's name, if ids follow Zipf's law.

        The i-th most frequent of n ids then has a share of about ``1 / (i log(1 + n))`` of the lookups. So the first
        ``common`` ids occur in every batch, and others in proportion to their shares.
        """
        distinct: dict[str, float] = {}
        for name, n, parts in zip(self.names, self.limits, self.parts_read, strict=True):
            ids = batch_size * ids_per_sample.get(name, 1)
            common = min(ids / log(1 + n), n)
            for part in parts:
                rows = min(common * (1 + log(n / common)), part.num_rows)
                distinct[part.name] = min(distinct.get(part.name, 0) + rows, part.num_rows)
        return distinct

    def _ids_of(self, features: Sequence[JaggedTensor]) -> Sequence[Tensor]:
        """The ids of each feature; raw ids are hashed to ids of their tables, and unknown ids replaced."""
        sizes = [each.values().numel() for each in features]
        ids = torch.cat([each.values().long() for each in features])
        feature = torch.cat([torch.full((size,), f, device=ids.device) for f, size in enumerate(sizes)])
        if len(self.id_rules):
            listed = []
            for each in self.listed:
                start, lengths = int(self.slots[each.feature, column.HOT]), list_sizes(each.spec)
                lists = self.ranks[start : start + sum(lengths)].split(lengths)
                listed.append(each._replace(ranks=Ranks(*lists)))
            ids = replaced_ids(ids, feature, self.id_rules, self.slots[:, column.LIMIT], listed)
        self._report(ids, feature)
        return ids.split(sizes)

    def _check(self, features: KeyedJaggedTensor) -> None:
        keys = features.keys()
        if missing := [name for name in self.names if name not in keys]:
            raise KeyError(f"features has keys {keys} but must have {', '.join(map(repr, missing))}")
        if self.weighted and features.weights_or_none() is None:
            raise ValueError("features must have weights: the collection was made with is_weighted=True")
        if features.variable_stride_per_key():
            raise ValueError("features must have one batch size for all keys")
        check_ids(features.values(), "features")

    def _report(self, ids: Tensor, feature: Tensor) -> None:
        """Raise IndexError for ids out of range on the CPU; handle them on a GPU as ``on_invalid_id`` says."""
        limits = self.slots[feature, column.LIMIT]
        outside = out_of_range(ids, limits)
        if raises_at_once(ids):
            raise_first(ids, outside, limits, feature, self.titles)
        elif self.on_invalid_id == "raise" or (self.on_invalid_id == "warn" and not self.warned):
            counts = torch.bincount(feature[outside], minlength=len(self.names)).tolist()  # waits for the GPU
            if not any(counts):
                return
            titles = ", ".join(title for title, count in zip(self.titles, counts, strict=True) if count)
            if self.on_invalid_id == "raise":
                raise IndexError(f"{sum(counts)} ids are out of range in {titles}")
            self.warned = True
            warnings.warn(f"{sum(counts)} ids out of range in {titles}: each gave a vector of zeros", stacklevel=2)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        saved = state_dict.get(f"{prefix}meaning")
        if saved is not None and saved.tolist() != self.expected:
            rule = "must be tables of the same names, sizes, partitions and operations"
            raise ValueError(f"the tables of {prefix.removesuffix('rows.') or 'the collection'} {rule} as were saved")
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def parts_of(template: EmbeddingCollection) -> list[Part]:
    """The stored tables of a collection, then those of its pools."""
    intervals: list[tuple[float, float]] = []
    for t, spec in enumerate(template.specs):
        intervals += init.intervals(spec, std=template.initial_std([t]))
    for pool in template.pools.values():
        specs, std = [template.specs[t] for t in pool.offsets], template.initial_std(pool.offsets)
        bound = init.pool_bound(len(pool.extents), specs, std)
        intervals += [(-bound, bound)] * len(pool.extents)
    named = zip(template.named_tables(), intervals, strict=True)
    return [Part(name, len(view), view.shape[1], *interval) for (name, view), interval in named]


def balanced_shards(parts: Sequence[Part], distinct: Mapping[str, float], num_shards: int) -> list[Shard]:
    """Divide parts of one width among tables that are read about equally often; a part is not split."""
    divided: list[list[Part]] = [[] for _ in range(min(num_shards, len(parts)))]
    loads = [0.0] * len(divided)
    for part in sorted(parts, key=lambda part: -distinct[part.name]):
        shard = loads.index(min(loads))
        loads[shard] += distinct[part.name]
        divided[shard].append(part)
    width = parts[0].width
    return [Shard(f"rows{width}:{s}", width, tuple(of_shard)) for s, of_shard in enumerate(divided)]


def _request(shards: Sequence[Shard], rows: Tensor) -> tuple[KeyedJaggedTensor, Tensor]:
    """A bag for each distinct row of some shards, and the position of each of ``rows`` among their vectors.

    Position 0 is that of no row (UNUSED); the vectors of the first shard follow, then those of the second, and so on.
    Shards with fewer rows than others end with empty bags.
    """
    none = rows.new_full((1,), column.UNUSED)  # lower than all rows
    distinct, inverse = torch.unique(torch.cat([none, rows]), return_inverse=True)
    bounds = torch.tensor([0, *accumulate(shard.num_rows for shard in shards)], device=rows.device)
    first = torch.searchsorted(distinct, bounds)  # the position of each shard's first row
    counts = first.diff()
    stride = max(1, int(counts.max()))  # TorchRec does not support an empty batch
    shard = torch.arange(len(shards), device=rows.device).repeat_interleave(counts)
    index = torch.arange(1, len(distinct), device=rows.device) - first[shard] + shard * stride + 1
    values = distinct[1:] - bounds[shard]
    if max(each.num_rows for each in shards) < 2**31:
        values = values.int()  # half as many bytes to send
    lengths = (torch.arange(stride, device=rows.device) < counts[:, None]).int()
    keyed = KeyedJaggedTensor([each.name for each in shards], values, lengths=lengths.flatten(), stride=stride)
    return keyed, torch.cat([torch.zeros_like(none), index])[inverse[1:]]


def raises_at_once(ids: Tensor) -> bool:
    """Whether an id out of range raises IndexError at once: not on a GPU, where the check would wait for the GPU."""
    return ids.device.type == "cpu"
