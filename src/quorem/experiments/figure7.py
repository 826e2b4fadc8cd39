"""Figure 7: parameters against the threshold below which tables stay full, 4 collisions (section 5.3)."""

from dataclasses import replace

from . import figure6

points = figure6.points  # only their parameters are counted
AXES = replace(
    figure6.AXES,
    name="figure7",
    title="Figure 7: parameters against the threshold, 4 collisions",
    y="parameters",
    y_label="parameters",
    y_log=True,
    paper="Up to a threshold of 20000 the number of parameters hardly changes: a few tables hold nearly all rows.",
)
