"""Figure 6: test loss against the threshold below which tables stay full, 4 collisions (section 5.3)."""

from .figures import Axes, Point
from .settings import METHODS_OF_FIGURES, Study

THRESHOLDS = (1, 20, 200, 2000, 20000)
AXES = Axes(
    name="figure6",
    title="Figure 6: test loss against the threshold, 4 collisions",
    x_label="threshold",
    x_column="threshold",
    x_log=True,
    paper="What thresholds bring depends on the operation: mult is best for DCN, concat for DLRM, where the distance to"
    " the full tables falls from 0.7% to 0.5% at about a quarter of their size.",
    baseline="full",
)


def points(study: Study) -> list[Point]:
    """Every operation at every threshold, and the full tables."""
    composed = [
        p for method in METHODS_OF_FIGURES for t in THRESHOLDS for p in study.points(method, 4, threshold=t, x=t)
    ]
    return study.points("full") + composed
