"""The settings that the paper's figures share, so that a run that two figures need is trained once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..paper.sizes import ceil_div
from ..training.config import RunConfig
from ..training.tables import scheme_of
from .figures import Point

METHODS_OF_FIGURES = ("hash", "feature", "concat", "add", "mult")  # the lines of figures 5 to 7, beside the full tables
CURVE_POINTS = 20  # number of validations of a run whose curve is drawn


@dataclass(frozen=True, kw_only=True)
class Study:
    """What all figures of one reproduction have in common.

    Args:
        cardinalities: number of ids of each feature.
        num_rows: number of rows of the training data.
        networks: networks to train.
        max_rows: train on so many first rows only; None for all.
        collisions: numbers of collisions of figure 5.
        frequencies: how often each id occurs in the training rows, by feature; for plans.
    """

    cardinalities: Sequence[int]
    num_rows: int
    networks: Sequence[str] = ("dcn", "dlrm")
    max_rows: int | None = None
    collisions: Sequence[int] = (2, 3, 4, 5, 6, 7, 60)
    frequencies: Mapping[str, Tensor] | None = None

    def points(
        self, method: str, num_collisions: int = 4, *, threshold: int = 0, x: float | None = None
    ) -> list[Point]:
        """A point for each network; ``method`` is as in ``training.tables.scheme_of``.

        So that figures share runs, the runs of figure 4 are validated during training in every figure, and a threshold
        below the smallest table is left out.
        """
        options: dict[str, Any] = {"scheme": scheme_of(method, num_collisions)}
        if threshold >= min(self.cardinalities):
            options["threshold"] = threshold
        elif method == "full" or (method in ("hash", "mult") and num_collisions == 4):
            options["validate_every"] = validation_interval(self.num_rows, self.max_rows, CURVE_POINTS)
        return self.of_each_network(method, x, options)

    def of_each_network(self, series: str, x: float | None, options: Mapping[str, Any]) -> list[Point]:
        """A point for each network with those options, trained on the rows of the study."""
        options = {"max_rows": self.max_rows, **options}
        return [Point(series=series, x=x, options={"network": name, **options}) for name in self.networks]


def validation_interval(num_rows: int, max_rows: int | None, points: int) -> int:
    """Steps between two validations of a run, at the default batch size, whose curve has about so many points.

    >>> validation_interval(12_800, None, 20), validation_interval(12_800, 6400, 20)
    (5, 3)
    """
    steps = ceil_div(min(max_rows or num_rows, num_rows), RunConfig.batch_size)
    return max(1, ceil_div(steps, points))
