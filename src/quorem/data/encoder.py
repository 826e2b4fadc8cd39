"""Raw rows as a batch of ids and numbers, by the encoding of prepared data. Needs Polars.

A vocabulary is a sorted index of 64-bit hashes with the id of each. The distinct values of a block are searched for in
it together. A value whose hash is found is also compared with the token, so that two strings with one hash do no harm.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..paper.hashing import hash_strings
from .batches import Bags, Batch
from .dense import Dense
from .encoding import Encoding
from .ids import NULL, raw_ids
from .malformed import Malformed, ParsedRows
from .prepared import tokens_of
from .values import category_lists, category_text, check_category


class Vocabulary:
    """The ids of a column's tokens.

    Args:
        text: the bytes of the vocabulary file that ``prepare`` wrote: one token per line, in order of id.
        first: id of the first token.
    """

    def __init__(self, text: Tensor, first: int) -> None:
        data = text.numpy().tobytes()
        if b"\\" in data or not data:
            self.tokens = pl.Series(tokens_of(data), dtype=pl.String)
        else:
            self.tokens = pl.Series([data]).cast(pl.String).str.strip_suffix("\n").str.split("\n").explode()
        hashes = self.tokens.hash().to_numpy()
        self.first, self.lines = first, np.argsort(hashes).astype(np.int32)
        self.hashes = hashes[self.lines]

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def ids(self, values: pl.Series, unknown: int) -> NDArray[np.int32]:
        """The id of each value; ``unknown`` for those that are not in the vocabulary.

        >>> text = torch.frombuffer(bytearray(b"a\\nb\\n"), dtype=torch.uint8)
        >>> Vocabulary(text, first=1).ids(pl.Series(["b", "c", "a"]), unknown=-1).tolist()
        [2, -1, 1]
        """
        if not len(self.tokens) or not len(values):
            return np.full(len(values), unknown, np.int32)
        hashes, first, inverse = np.unique(values.hash().to_numpy(), return_index=True, return_inverse=True)
        positions = np.searchsorted(self.hashes, hashes).clip(max=len(self.hashes) - 1)
        lines = self.lines[positions]
        is_equal = (self.tokens.gather(lines) == values.gather(first)).to_numpy()
        is_token = (self.hashes[positions] == hashes) & is_equal
        return np.where(is_token, lines + self.first, unknown).astype(np.int32)[inverse]


class Encoder:
    """Turns raw rows into the ids and numbers that a model was trained on.

    Args:
        encoding: the encoding of the prepared data.
        texts: the bytes of each vocabulary, by column.
        unknown: how a token that is not in the vocabulary is treated: ``"error"``, or ``"missing"``, as a missing
            value. If the data have an id for unknown tokens, they get that id instead.
        policies: ``"rest"`` or ``"hash"`` for columns whose tables accept unknown ids (``id_rules``), by name. Unknown
            tokens of these columns get negative ids: -1 for ``"rest"``, and ``-1 - h`` for ``"hash"``, where h is the
            low 31 bits of ``hash_strings``.

    ``unseen_counts`` has, for each column, how many values so far did not occur in the training rows. Raw ids do not
    tell.

    Raises:
        ValueError: if a vocabulary has the wrong size.
    """

    def __init__(
        self,
        encoding: Encoding,
        texts: Mapping[str, Tensor],
        *,
        unknown: Literal["error", "missing"] = "error",
        policies: Mapping[str, str] | None = None,
    ) -> None:
        self.encoding, self.unknown, self.policies = encoding, unknown, dict(policies or {})
        self.dense = Dense(encoding.dense, "none", encoding.transforms)
        self.unseen_counts: dict[str, int] = dict.fromkeys(encoding.categorical, 0)
        with ThreadPoolExecutor(pl.thread_pool_size()) as pool:
            built = pool.map(lambda text: Vocabulary(text, encoding.first_token), texts.values())
            self.vocabularies = dict(zip(texts, built, strict=True))
        for name, size in zip(encoding.categorical, encoding.cardinalities, strict=True):
            if name in self.vocabularies and len(self.vocabularies[name]) + encoding.first_token != size:
                raise ValueError(f"the vocabulary of {name} has {len(self.vocabularies[name])} tokens for {size} ids")

    def __call__(self, rows: Any) -> Batch:
        """The rows as a batch whose labels are all 0.

        Args:
            rows: values by column: strings or numbers; in columns with several values per row lists of them, or strings
                that are split as when the data were prepared; None if a value is missing. Other columns are ignored.
                Or a data frame (Polars, Arrow, pandas).

        Raises:
            TypeError: if ``rows`` is neither a mapping nor a data frame.
            ValueError: if a column is missing, has values of the wrong type or, with ``unknown="error"``, a value that
                is not in the vocabulary.
        """
        columns = [*self.encoding.dense, *self.encoding.categorical]
        frame = _frame(rows, columns)
        frame = frame.with_columns(_numbers(frame[name], self.encoding.missing) for name in self.encoding.dense)
        self.dense.checked(ParsedRows(frame, np.arange(1, frame.height + 1), 1.0), Malformed("the batch", 0, "row"))
        dense = self.dense.array(frame)
        single = [name for name in self.encoding.categorical if name not in self.encoding.bags]
        wide = self.encoding.ids == "raw" or (self.encoding.ids == "none" and len(self.policies) > 0)
        ids = np.empty((frame.height, len(single)), np.int64 if wide else np.int32)
        for k, name in enumerate(single):
            ids[:, k] = self._ids(name, frame[name])
        bags = {name: self._bags(name, frame[name]) for name in self.encoding.bags}
        labels = torch.zeros(frame.height, dtype=torch.uint8)
        return Batch(labels, torch.from_numpy(dense), torch.from_numpy(ids), bags)

    def _bags(self, name: str, values: pl.Series) -> Bags:
        if values.dtype == pl.Null:  # no row has a value
            values = values.cast(pl.List(pl.String))
        separator, missing = self.encoding.multi_separator, tuple(self.encoding.missing)
        values = values.to_frame().select(category_lists(values, separator, missing)).to_series()
        lengths = values.list.len().fill_null(0).cast(pl.Int64).to_numpy()
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        inner = values.filter(values.list.len().fill_null(0) > 0).explode()
        return Bags(torch.from_numpy(self._ids(name, inner)), torch.from_numpy(offsets))

    def _ids(self, name: str, values: pl.Series) -> NDArray[Any]:
        """The ids of one column's values; ``NULL`` for a missing value."""
        check_category(values)
        if self.encoding.ids == "none":
            return self._given_ids(name, values)
        text = pl.select(category_text(pl.lit(values), values.dtype, tuple(self.encoding.missing))).to_series()
        if self.encoding.ids == "raw":
            return raw_ids(text)
        ids = self.vocabularies[name].ids(text.fill_null(""), -1)
        ids[text.is_null().to_numpy()] = NULL
        is_unknown = ids < 0
        num_seen = self.encoding.num_seen[self.encoding.categorical.index(name)]
        self.unseen_counts[name] += int(np.count_nonzero(is_unknown | (ids >= num_seen)))
        if self.encoding.unknown is not None:
            ids[is_unknown] = self.encoding.unknown
        elif is_unknown.any():
            policy = self._policy(
                name,
                f"{name} ({text[int(np.argmax(is_unknown))]!r}) is not in the vocabulary of the training data:"
                " unknown='missing' (--unknown missing) takes such values for missing ones; data prepared with"
                " vocabulary='train' have an id for them",
            )
            if policy == "hash":
                hashes = hash_strings(text.filter(pl.Series(is_unknown)).to_list()).numpy()
                ids[is_unknown] = -1 - (hashes & (2**31 - 1))
            elif policy == "missing":
                ids[is_unknown] = NULL
        return ids

    def _given_ids(self, name: str, values: pl.Series) -> NDArray[np.int64]:
        size = self.encoding.cardinalities[self.encoding.categorical.index(name)]
        numbers = values.cast(pl.Int64, strict=False) if values.dtype == pl.String else values  # a field of a CSV file
        if numbers.null_count() > values.null_count() or not (numbers.dtype.is_integer() or numbers.dtype == pl.Null):
            raise ValueError(f"{name} is {values.dtype} but must hold ids: the data were made up")
        is_outside = ((numbers < 0) | (numbers >= size)).fill_null(False).to_numpy()
        ids = numbers.cast(pl.Int64, strict=False).fill_null(NULL).to_numpy().copy()
        if is_outside.any():
            first = numbers.filter(pl.Series(is_outside))[0]
            self.unseen_counts[name] += int(np.count_nonzero(is_outside))
            policy = self._policy(name, f"{name} ({first}) must be in [0, {size})")
            ids[is_outside & ((ids == NULL) | (policy == "missing"))] = NULL if policy == "missing" else -1
        return ids

    def _policy(self, name: str, error: str) -> str:
        """How unknown values are treated: ``"rest"``, ``"hash"`` or ``"missing"``; raises if they are errors."""
        policy = self.policies.get(name, self.unknown)
        if policy == "error":
            raise ValueError(error)
        return policy


def _frame(rows: Any, columns: list[str]) -> pl.DataFrame:
    """The columns of a mapping or a data frame."""
    if hasattr(rows, "__arrow_c_stream__") and not isinstance(rows, pl.DataFrame):
        try:
            rows = pl.DataFrame(rows)
        except ImportError:  # pandas needs pyarrow for it
            rows = {name: [None if value != value else value for value in rows[name].tolist()] for name in rows}
    if not isinstance(rows, Mapping | pl.DataFrame):
        raise TypeError(f"rows ({type(rows).__name__}) must be a mapping of columns, or a data frame")
    if missing := [name for name in columns if name not in rows]:
        raise ValueError(f"rows have no column {', '.join(missing)}")
    if isinstance(rows, pl.DataFrame):
        return rows.select(columns)
    try:
        return pl.DataFrame({name: pl.Series(name, rows[name], strict=True) for name in columns})
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
        reason = str(error).partition("\n")[0]  # Polars appends where the error occurred
        raise ValueError(f"rows must be columns of one length and of one type each: {reason}") from None


def _numbers(values: pl.Series, missing: list[str]) -> pl.Series:
    """A column of numbers, which may be written as text, as in a CSV file."""
    if values.dtype == pl.String:
        text = values.str.strip_chars(" ")
        text = text.set(text.is_in(["", *missing]), None)
        numbers = text.cast(pl.Float64, strict=False)
        if len(wrong := text.filter(numbers.is_null() & text.is_not_null())):
            raise ValueError(f"{values.name} ({wrong[0]!r}) must be a number")
        return numbers
    if not (values.dtype.is_numeric() or values.dtype in (pl.Boolean, pl.Null)):
        raise ValueError(f"{values.name} is {values.dtype} but must be numeric")
    return values
