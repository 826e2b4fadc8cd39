"""How a click log is prepared."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..checks import check_choice
from . import shape
from .meta import Transform

RAW_IDS = 2**40  # ids of a table of raw ids
Ids = Literal["appearance", "frequency", "raw"]


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """How a click log is prepared.

    Args:
        ids: how tokens are given ids: ``"frequency"`` (by falling frequency in the training days, ties in order of
            first appearance; tokens that occur only in later days come last), ``"appearance"`` (in order of first
            appearance, as in the public reference code) or ``"raw"`` (``hash_strings`` of each token: 64-bit integers
            without a vocabulary, for ``Table(raw_ids=True)``).
        vocabulary: ``"all"`` has the tokens of all days; ``"train"`` has those of the training days, and all others
            share id 1.
        days: number of equal parts of the log. The last part is halved into validation and test; the others train.
        max_malformed: number of malformed lines that may be left out; with one more, the run stops.
        transform: transform of dense features: ``"log"``, ``log(max(x, 0) + 1)`` as in the paper; ``"signed_log"``,
            ``sign(x) log(|x| + 1)``; or ``"none"``. None means ``"log"`` for Criteo, ``"signed_log"`` for other tables.
        transforms: exceptions to ``transform``, by name of the dense feature.

    Raises:
        ValueError: if a value is out of range or unknown, or options contradict each other.

    >>> PrepareConfig(days=5, transform="none", transforms={"price": "log"}).ids
    'frequency'
    """

    ids: Ids = "frequency"
    vocabulary: Literal["all", "train"] = "all"
    days: int = 7
    max_malformed: int = 10
    transform: Transform | None = None
    transforms: Mapping[str, Transform] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the options."""
        check_choice("ids", self.ids, Ids)
        check_choice("vocabulary", self.vocabulary, Literal["all", "train"])
        if self.ids == "raw" and self.vocabulary == "train":
            raise ValueError("vocabulary ('train') must be 'all' with ids='raw', which knows no unknown token")
        shape.check_days(self.days)
        if self.max_malformed < 0:
            raise ValueError(f"max_malformed ({self.max_malformed}) must be at least 0")
        given = {} if self.transform is None else {"transform": self.transform}
        for name, kind in {**given, **self.transforms}.items():
            check_choice(f"transform of {name}", kind, Transform)

    @property
    def id_dtype(self) -> type[np.integer[Any]]:
        """The dtype of ids."""
        return np.int64 if self.ids == "raw" else np.int32

    @property
    def first_token(self) -> int:
        """The id of the first token. NULL and, with a training vocabulary, the unknown token come before it."""
        return 2 if self.vocabulary == "train" else 1
