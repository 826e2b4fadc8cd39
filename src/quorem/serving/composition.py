"""From ids to composed vectors, written once for ONNX graphs and for ``torch.export``.

A value is a tensor, or a ``Value`` of an ONNX graph: both have Python's operators, which broadcast. ``Operators`` has
what these cannot say. ``ops.rows`` defines what every step computes.

Shapes: N ids of each feature, G features of a group, W output columns of a table.

An id outside ``[0, n)`` gets the row of the rest or a composed vector if ``unknown`` of its table says so. Otherwise it
is clamped into the table before the arithmetic, and its vector is replaced by NaN or zeros afterwards. Without
clamping, -1 would read the last row, and an id past n could give some valid row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ..renumbering import MIXING_FACTORS
from .groups import Buckets, FeatureGroup, JoinedTables, OwnRows
from .signature import UnknownVector

Value = Any


class Operators(Protocol):
    """What Python's operators cannot say, for one kind of values. ``values`` has one integer for each feature."""

    def constant(self, values: Sequence[int]) -> Value:
        """One integer for each feature."""

    def where(self, mask: Value, value: Value, other: Value) -> Value:
        """``value`` where ``mask`` is true, else ``other``; either may be a number."""

    def column(self, mask: Value) -> Value:
        """A mask ``[N, G, 1]`` of vectors, from one of ids."""

    def clamped(self, ids: Value, last: Sequence[int]) -> Value:
        """Ids, at least 0 and at most ``last``."""

    def hashed(self, ids: Value, sizes: Sequence[int]) -> Value:
        """``hashing.mixed_ids``."""

    def entries(self, tables: JoinedTables, row: Value) -> Value:
        """Integers at rows that count from the start of each feature's table, clamped to the last row of all."""

    def numbers(self, tables: JoinedTables, row: Value, in_range: Value | None = None) -> Value:
        """Numbers at rows that count from the start of each feature's table; NaN where ``in_range`` is false."""

    def concatenated(self, vectors: Sequence[Value]) -> Value:
        """Vectors side by side."""

    def product(self, vectors: Value, matrices: Value) -> Value:
        """The product of each vector ``[N, G, w]`` with its matrix ``[N, G, w, v]``."""

    def activated(self, vectors: Value, activation: str | None) -> Value:
        """``"relu"`` or ``"sigmoid"`` of the numbers."""


class ComposedVectors(NamedTuple):
    """Composed vectors ``[N, G, W]``, and masks ``[N, G]``."""

    vectors: Value
    in_range: Value | None  # None if the vectors of ids out of range are final already
    is_padding: Value | None  # None if no table has padding


def composed(operators: Operators, ids: Value, group: FeatureGroup, *, with_nan: bool = False) -> ComposedVectors:
    """Vectors of int64 ``ids`` ``[N, G]`` of one group.

    Ids out of range give the vector of another id, which the caller replaces. With ``with_nan``, and if rows are added
    or multiplied, they read a row of NaN instead, which costs less than replacing their vectors.
    """
    in_range = hashed = None
    if group.raw:
        number = ids = operators.hashed(ids, group.limits)
    else:
        number = operators.clamped(ids, [limit - 1 for limit in group.limits])
        in_range = number == ids
    if group.unknown_ids == "hash":
        hashed = operators.hashed(ids, group.num_composed)
        if group.skipped is not None:
            following = (hashed + 1) % operators.constant(group.num_composed)
            hashed = operators.where(hashed == operators.constant(group.skipped), following, hashed)
    by_row = with_nan and group.unknown_ids == "error" and in_range is not None and _is_sum_or_product(group)
    if group.own_rows is None:
        number = number if hashed is None else operators.where(in_range, number, hashed)
        vectors = _vectors(operators, number, group, in_range if by_row else None)
    else:
        place, num_own = _place(operators, number, group.own_rows)
        if group.unknown_ids != "error":  # the row of the rest comes after those of the hot ids
            other = operators.constant(group.own_rows.num_hot) if hashed is None else hashed + num_own
            place = operators.where(in_range, place, other)
        is_composed = place >= num_own
        vectors = operators.numbers(group.own_rows.rows, operators.where(is_composed, 0, place))
        if group.rows:
            cold = _vectors(operators, operators.where(is_composed, place - num_own, 0), group)
            vectors = operators.where(operators.column(is_composed), cold, vectors)
    is_padding = None
    if group.padding is not None:
        is_padding = ids == operators.constant(group.padding)
        is_padding = is_padding if in_range is None else is_padding & in_range  # the id -1 is not padding
    return ComposedVectors(vectors, None if by_row or group.unknown_ids != "error" else in_range, is_padding)


def filled(operators: Operators, vectors: ComposedVectors, unknown_vector: UnknownVector) -> Value:
    """The vectors, with zeros for padding, and NaN or zeros for ids out of range."""
    result, fill = vectors.vectors, float("nan") if unknown_vector == "nan" else 0.0
    if vectors.in_range is not None:
        result = operators.where(operators.column(vectors.in_range), result, fill)
    return result if vectors.is_padding is None else operators.where(operators.column(vectors.is_padding), 0.0, result)


def _is_sum_or_product(group: FeatureGroup) -> bool:
    """Whether a NaN row in the first stored table makes the vector NaN, and no other group reads that table."""
    alone = group.own_rows is None and group.mixing is None and not group.levels
    return alone and (len(group.rows) == 1 or group.operation in ("add", "mult"))


def _vectors(operators: Operators, number: Value, group: FeatureGroup, in_range: Value | None = None) -> Value:
    """Composed vectors of numbers, the arguments of the partitions; NaN where ``in_range`` is given and false."""
    if group.permutation is not None:
        multiplier, shift, modulus = (operators.constant(values) for values in group.permutation)
        number = (number * multiplier + shift) % modulus
    if group.mixing is not None:
        offsets, bits = group.mixing
        number = _mixed(number + operators.constant(offsets), bits)
    first, *others = [_bucket(operators, number, buckets) for buckets in group.buckets]
    rows = [operators.numbers(group.rows[0], first, in_range)]
    rows += [operators.numbers(tables, row) for tables, row in zip(group.rows[1:], others, strict=True)]
    if group.operation in ("concat", "feature"):
        return operators.concatenated(rows)
    vectors = rows[0]
    for row in rows[1:]:
        vectors = vectors * row if group.operation == "mult" else vectors + row
    for level in group.levels:  # path networks (section 4.1); the weights are gathered for each id
        network = _bucket(operators, number, level.buckets)
        for i, (weights, biases) in enumerate(zip(level.weights, level.biases, strict=True)):
            vectors = vectors if i == 0 else operators.activated(vectors, group.activation)
            vectors = operators.product(vectors, operators.numbers(weights, network)) + operators.numbers(
                biases, network
            )
    return vectors


def _bucket(operators: Operators, number: Value, buckets: Buckets) -> Value:
    """The row or network of a number under one partition, counted from the start of each feature's table."""
    if buckets.maps is not None:
        number = operators.entries(buckets.maps, number)
    if buckets.strides is not None:
        number = number // operators.constant(buckets.strides)
    return number if buckets.sizes is None else number % operators.constant(buckets.sizes)


def _place(operators: Operators, ids: Value, own_rows: OwnRows) -> tuple[Value, Value]:
    """The place of each id in its ``HotCold`` table, where own rows come first; and the number of own rows."""
    hot, rest = operators.constant(own_rows.num_hot), operators.constant(own_rows.has_rest)
    num_own = operators.constant([sum(pair) for pair in zip(own_rows.num_hot, own_rows.has_rest, strict=True)])
    if own_rows.hot is None or own_rows.cold is None:
        place = operators.where(ids < hot, ids, ids + rest)
        return operators.where(ids >= operators.constant(own_rows.rest_from), hot, place), num_own
    below_hot, is_hot = _search(operators, ids, own_rows.hot, own_rows.num_hot)
    below_cold, is_cold = _search(operators, ids, own_rows.cold, own_rows.num_listed)
    listed, unlisted = operators.where(is_cold, below_cold + num_own, hot), ids - below_hot + num_own
    return operators.where(is_hot, below_hot, operators.where(rest > 0, listed, unlisted)), num_own


def _search(operators: Operators, ids: Value, lists: JoinedTables, lengths: Sequence[int]) -> tuple[Value, Value]:
    """For each id, how many entries of its sorted list are below it, and whether the list has it; by bisection."""
    below = ids * 0
    if not any(len(part) for part in lists.tables):
        return below, below > 0
    length = operators.constant(lengths)
    for step in reversed(range(max(lengths).bit_length())):
        further = below + 2**step
        is_below = operators.entries(lists, further - 1) < ids
        below = operators.where(is_below & (further <= length), further, below)
    return below, (operators.entries(lists, below) == ids) & (below < length)


def _mixed(number: Value, bits: int) -> Value:
    """``renumbering.mixed_numbers`` of numbers in ``[0, 2**bits)``; ONNX has no shift of signed integers."""
    divisor = 2 ** (bits // 2 + 1)
    for factor in MIXING_FACTORS:
        number = ((number ^ (number // divisor)) * factor) & (2**bits - 1)
    return number ^ (number // divisor)
