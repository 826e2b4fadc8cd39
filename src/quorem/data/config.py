"""How a click log is prepared."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..checks import check_choice, check_options
from .meta import Transform
from .shape import MOST_DAYS


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """How a click log is prepared.

    Args:
        ids: how tokens are given ids: ``"frequency"`` (by falling frequency in the training days, ties in order of
            first appearance; tokens that occur only in later days come last) or ``"appearance"`` (in order of first
            appearance, as in the public reference code).
        vocabulary: ``"all"`` has the tokens of all days; ``"train"`` has those of the training days, and all others
            share id 1.
        days: number of equal parts of the log. The last part is halved into validation and test; the others train.
        max_malformed: number of malformed lines that may be left out; with one more, the run stops.
        transform: transform of dense features: ``"log"``, ``log(max(x, 0) + 1)`` as in the paper; ``"signed_log"``,
            ``sign(x) log(|x| + 1)``; or ``"none"``. None means ``"log"`` for Criteo, ``"signed_log"`` for other tables.
        transforms: other transforms of single columns, by name.

    >>> PrepareConfig(days=5, transform="none").ids
    'frequency'
    """

    ids: Literal["frequency", "appearance"] = "frequency"
    vocabulary: Literal["all", "train"] = "all"
    days: int = field(default=7, metadata={"low": 2, "high": MOST_DAYS})
    max_malformed: int = field(default=10, metadata={"low": 0})
    transform: Transform | None = None
    transforms: Mapping[str, Transform] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_options(self)
        for name, kind in self.transforms.items():
            check_choice(f"transform of {name}", kind, Transform)

    @property
    def first_token(self) -> int:
        """The id of the first token. NULL and, with a training vocabulary, the unknown token come before it."""
        return 2 if self.vocabulary == "train" else 1
