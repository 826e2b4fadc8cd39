"""Table 1: path-based embeddings, 4 collisions, one hidden layer of 16 to 128 (section 5.4)."""

import torch

from .. import models
from ..data.shape import CARDINALITIES
from ..modules.collection import EmbeddingCollection
from ..training.tables import scheme_of, tables_of
from .figures import Axes, Point
from .settings import Study

HIDDEN = (16, 32, 64, 128)
NUM_COLLISIONS = 4
LOSSES = {  # as printed
    "dcn": {16: 0.45263, 32: 0.45254, 64: 0.45252, 128: 0.4534},
    "dlrm": {16: 0.45349, 32: 0.45312, 64: 0.45306, 128: 0.45651},
}
AXES = Axes(
    name="table1",
    title="Table 1: path-based embeddings, 4 collisions",
    x_label="hidden layer",
    x_column="h =",
    x_log=True,
    paper=f"Test loss with hidden layers of {' / '.join(map(str, HIDDEN))}: "
    + ", ".join(f"{name.upper()} {' / '.join(map(str, row.values()))}" for name, row in LOSSES.items())
    + ": best at 64.",
)


def points(study: Study) -> list[Point]:
    """Every hidden width, with the architecture that gives the printed parameter counts."""
    points = []
    for hidden in HIDDEN:
        scheme = scheme_of("path", NUM_COLLISIONS, hidden=hidden)
        points += study.of_each_network("path", hidden, {"scheme": scheme, "preset": "table1"})
    return points


def parameter_counts() -> dict[tuple[str, int], int]:
    """Parameters of each cell of table 1, by network and hidden width, in the layout that gives the paper's numbers.

    Nothing is allocated: the models are built on the meta device.

    >>> parameter_counts()["dlrm", 64]
    135746273
    """
    counts = {}
    for network in models.PRESETS["table1"]:
        for hidden in HIDDEN:
            tables = tables_of(CARDINALITIES, scheme_of("path", NUM_COLLISIONS, hidden=hidden))
            embeddings = EmbeddingCollection(tables, device="meta")
            model = models.build(network, embeddings, preset="table1", device=torch.device("meta"))
            counts[network, hidden] = sum(p.numel() for p in model.parameters())
    return counts
