"""Raw rows as a batch of ids and numbers, by the encoding of prepared data. Needs Polars."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..paper.hashing import hash_strings
from .batches import Bags, Batch
from .encoding import Encoding
from .ids import NULL
from .malformed import Malformed, ParsedRows
from .prepared import tokens_of
from .values import dense, features, flat, lengths, offsets_of


class Vocabulary:
    """The ids of a column's tokens, found by bisection in the sorted tokens.

    ``text`` has the bytes of the vocabulary file that ``prepare`` wrote, whose first token has the id ``first``.
    """

    def __init__(self, text: Tensor, first: int) -> None:
        data = text.numpy().tobytes()
        if b"\\" in data or not data:
            tokens = pl.Series(tokens_of(data), dtype=pl.String)
        else:
            tokens = pl.Series([data]).cast(pl.String).str.strip_suffix("\n").str.split("\n").explode()
        lines = tokens.arg_sort()
        self.tokens, self.line_ids = tokens.gather(lines), lines.to_numpy().astype(np.int32) + first

    def ids(self, values: pl.Series) -> NDArray[np.int32]:
        """The id of each value; -1 for those that are not in the vocabulary."""
        if not len(self.tokens) or not len(values):
            return np.full(len(values), -1, np.int32)
        places = self.tokens.search_sorted(values).to_numpy().clip(max=len(self.tokens) - 1)
        return np.where((self.tokens.gather(places) == values).to_numpy(), self.line_ids[places], -1)


def given_ids(size: int, values: pl.Series) -> NDArray[np.int32]:
    """The ids of a column that holds the ids themselves, as made-up data do; -1 for values that are none."""
    ids = values.cast(pl.Int64, strict=False)
    return ids.set((ids < 0) | (ids >= size), -1).fill_null(-1).cast(pl.Int32).to_numpy().copy()


class Encoder:
    """Turns raw rows into the ids and numbers that a model was trained on.

    ``texts`` has the bytes of each vocabulary, by column. A token that is not in it gets the data's id for unknown
    tokens. If the data have none, ``policies`` says for columns whose tables accept unknown ids (``id_rules``) how:
    ``"rest"`` gives -1, and ``"hash"`` gives ``-1 - h``, where h is the low 31 bits of ``hash_strings``. In other
    columns it is an error, or with ``unknown="missing"`` a missing value.

    ``unseen_counts`` has, for each column, how many values so far did not occur in the training rows.
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
        meta, first = encoding.meta, encoding.meta.first_token_id or 0
        self.columns = replace(meta.columns, label=None)
        self.unseen_counts: dict[str, int] = dict.fromkeys(self.columns.categorical, 0)
        sizes = dict(zip(self.columns.categorical, meta.cardinalities, strict=True))
        self._num_seen = sizes | dict(zip(encoding.vocabularies, encoding.num_seen, strict=True))
        with ThreadPoolExecutor(pl.thread_pool_size()) as pool:
            vocabularies = pool.map(lambda text: Vocabulary(text, first), texts.values())
        self._ids_of: dict[str, Callable[[pl.Series], NDArray[np.int32]]]
        self._ids_of = {name: partial(given_ids, size) for name, size in sizes.items()}
        for name, vocabulary in zip(texts, vocabularies, strict=True):
            if len(vocabulary.tokens) + first != sizes[name]:
                raise ValueError(f"the vocabulary of {name} has {len(vocabulary.tokens)} tokens for {sizes[name]} ids")
            self._ids_of[name] = vocabulary.ids

    def __call__(self, rows: Any) -> Batch:
        """The rows, in a form that ``Scorer`` takes, as a batch whose labels are all 0."""
        frame = _frame(rows, self.columns.all)
        numbered = ParsedRows(frame, np.arange(1, frame.height + 1), 1.0)
        transforms, malformed = self.encoding.meta.transforms, Malformed("the batch", None, "row")
        return self.encode(features(numbered, self.columns, transforms, malformed).frame)

    def encode(self, frame: pl.DataFrame) -> Batch:
        """Features of the types that ``values.features`` gives, as ``__call__`` returns them."""
        ids = np.empty((frame.height, len(self.columns.single)), np.int32)
        for k, name in enumerate(self.columns.single):
            ids[:, k] = self._ids(name, frame[name])
        bags = {}
        for name in self.columns.bags:
            offsets = torch.from_numpy(offsets_of(lengths(frame[name])))
            bags[name] = Bags(torch.from_numpy(self._ids(name, flat(frame[name]))), offsets)
        labels = torch.zeros(frame.height, dtype=torch.uint8)
        return Batch(labels, torch.from_numpy(dense(frame, self.columns.dense)), torch.from_numpy(ids), bags)

    def _ids(self, name: str, text: pl.Series) -> NDArray[np.int32]:
        """The ids of one column's values; ``NULL`` for a missing value."""
        ids = self._ids_of[name](text.fill_null(""))
        ids[text.is_null().to_numpy()] = NULL
        is_unknown = ids < 0
        self.unseen_counts[name] += int(np.count_nonzero(is_unknown | (ids >= self._num_seen[name])))
        if self.encoding.meta.unknown_id is not None:
            ids[is_unknown] = self.encoding.meta.unknown_id
        elif is_unknown.any():
            policy = self.policies.get(name, self.unknown)
            if policy == "error":
                raise ValueError(
                    f"{name} ({text[int(np.argmax(is_unknown))]!r}) is not in the vocabulary of the training data:"
                    " unknown='missing' (--unknown missing) takes such values for missing ones; data prepared with"
                    " vocabulary='train' have an id for them"
                )
            if policy == "hash":
                hashes = hash_strings(text.filter(pl.Series(is_unknown)).to_list()).numpy()
                ids[is_unknown] = -1 - (hashes & (2**31 - 1))
            elif policy == "missing":
                ids[is_unknown] = NULL
        return ids


def _frame(rows: Any, columns: tuple[str, ...]) -> pl.DataFrame:
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
    try:
        return pl.DataFrame({name: pl.Series(name, rows[name], strict=True) for name in columns})
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
        reason = str(error).partition("\n")[0]  # Polars appends where the error occurred
        raise ValueError(f"rows must be columns of one length and of one type each: {reason}") from None
