"""Figure 4: validation loss while training, for full tables, hashing and the quotient-remainder trick (section 5.3)."""

from .figures import Axes, Point
from .settings import Study

AXES = Axes(
    name="figure4",
    title="Figure 4: validation loss over training, 4 collisions",
    x="step",
    x_label="iterations",
    y="validation",
    y_label="validation log loss",
    paper="The quotient-remainder trick (mult) lies between hashing and the full tables throughout training, at the"
    " size of hashing: a quarter of the full tables.",
)


def points(study: Study) -> list[Point]:
    """Full tables, hashing and ``mult``."""
    return [point for method in ("full", "hash", "mult") for point in study.points(method, 4)]
