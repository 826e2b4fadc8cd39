"""The paper's figures 4 to 7 and table 1 (sections 5.3 and 5.4): what each draws and trains.

Settings that figures share are the same runs, so each is trained once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..paper.sizes import ceil_div
from ..training.config import RunConfig
from ..training.model import scheme_of
from .figures import Axes, Point

METHODS = ("hash", "feature", "concat", "add", "mult")  # the lines of figures 5 to 7, beside the full tables
CURVE_POINTS = 20  # number of validations of a run whose curve is drawn
THRESHOLDS = (1, 20, 200, 2000, 20000)
HIDDEN = (16, 32, 64, 128)
TABLE_1_COLLISIONS = 4
TABLE_1_LOSSES = {  # as printed
    "dcn": {16: 0.45263, 32: 0.45254, 64: 0.45252, 128: 0.4534},
    "dlrm": {16: 0.45349, 32: 0.45312, 64: 0.45306, 128: 0.45651},
}


@dataclass(frozen=True, kw_only=True)
class Study:
    """What all figures of one reproduction have in common."""

    cardinalities: Sequence[int]  # number of ids of each feature
    num_rows: int  # of the training data
    networks: Sequence[str] = ("dcn", "dlrm")
    max_rows: int | None = None  # train on so many first rows only
    collisions: Sequence[int] = (2, 3, 4, 5, 6, 7, 60)  # of figure 5

    def points(
        self, method: str, num_collisions: int = 4, *, threshold: int = 0, x: float | None = None
    ) -> list[Point]:
        """A point for each network; ``method`` is as in ``training.model.scheme_of``.

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


def figure5_points(study: Study) -> list[Point]:
    """Every operation at every number of collisions, and the full tables."""
    composed = [p for method in METHODS for c in study.collisions for p in study.points(method, c, x=c)]
    return study.points("full") + composed


def figure6_points(study: Study) -> list[Point]:
    """Every operation at every threshold, and the full tables."""
    composed = [p for method in METHODS for t in THRESHOLDS for p in study.points(method, 4, threshold=t, x=t)]
    return study.points("full") + composed


def table1_points(study: Study) -> list[Point]:
    """Every hidden width, with the architecture that gives the printed parameter counts."""
    points = []
    for hidden in HIDDEN:
        scheme = scheme_of("path", TABLE_1_COLLISIONS, hidden=hidden)
        points += study.of_each_network("path", hidden, {"scheme": scheme, "preset": "table1"})
    return points


FIGURE4 = Axes(
    name="figure4",
    title="Figure 4: validation loss over training, 4 collisions",
    x="step",
    x_label="iterations",
    y="validation",
    y_label="validation log loss",
    paper="The quotient-remainder trick (mult) lies between hashing and the full tables throughout training, at the"
    " size of hashing: a quarter of the full tables.",
)
FIGURE5 = Axes(
    name="figure5",
    title="Figure 5: test loss against parameters, by number of collisions",
    x="parameters",
    x_label="parameters",
    x_log=True,
    paper="mult is best overall: ahead of every other operation for DCN, and close to feature generation for DLRM,"
    " which has half a million parameters more. With 4 collisions it is within 0.3% (DCN) and 0.7% (DLRM) of the full"
    " tables; with 60 it is as good as hashing with 4, in a model 15 times smaller.",
    baseline="full",
)
FIGURE6 = Axes(
    name="figure6",
    title="Figure 6: test loss against the threshold, 4 collisions",
    x_label="threshold",
    x_log=True,
    paper="What thresholds bring depends on the operation: mult is best for DCN, concat for DLRM, where the distance to"
    " the full tables falls from 0.7% to 0.5% at about a quarter of their size.",
    baseline="full",
)
FIGURE7 = replace(
    FIGURE6,
    name="figure7",
    title="Figure 7: parameters against the threshold, 4 collisions",
    y="parameters",
    y_label="parameters",
    y_log=True,
    paper="Up to a threshold of 20000 the number of parameters hardly changes: a few tables hold nearly all rows.",
)
TABLE1 = Axes(
    name="table1",
    title="Table 1: path-based embeddings, 4 collisions",
    x_label="hidden layer",
    x_log=True,
    paper=f"Test loss with hidden layers of {' / '.join(map(str, HIDDEN))}: "
    + ", ".join(f"{name.upper()} {' / '.join(map(str, row.values()))}" for name, row in TABLE_1_LOSSES.items())
    + ": best at 64.",
)


class Definition(NamedTuple):
    """How a figure is drawn, and the points that it needs in a study."""

    axes: Axes
    points: Callable[[Study], list[Point]]


FIGURES = {
    "figure4": Definition(FIGURE4, lambda study: [p for name in ("full", "hash", "mult") for p in study.points(name)]),
    "figure5": Definition(FIGURE5, figure5_points),
    "figure6": Definition(FIGURE6, figure6_points),
    "figure7": Definition(FIGURE7, figure6_points),  # only their parameters are counted
    "table1": Definition(TABLE1, table1_points),
}
