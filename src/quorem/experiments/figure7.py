"""Figure 7: parameters against the threshold below which tables stay full, 4 collisions (section 5.3)."""

from .figure6 import points
from .figures import Axes

__all__ = ["AXES", "points"]  # the points are those of figure 6; only their parameters are counted

AXES = Axes(
    name="figure7",
    title="Figure 7: parameters against the threshold, 4 collisions",
    x_label="threshold",
    x_column="threshold",
    x_log=True,
    y="parameters",
    y_label="parameters",
    y_log=True,
    paper="Up to a threshold of 20000 the number of parameters hardly changes: a few tables hold nearly all rows.",
    baseline="full",
)
