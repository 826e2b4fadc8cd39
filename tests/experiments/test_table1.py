"""Table 1's parameter counts, as printed in the paper."""

import torch

from quorem import EmbeddingCollection, models
from quorem.data.shape import CARDINALITIES
from quorem.experiments.paper_figures import Study, table1_points
from quorem.training.config import RunConfig
from quorem.training.model import tables_of

PRINTED = {
    "dcn": {16: 135_464_410, 32: 135_519_322, 64: 135_629_146, 128: 135_848_794},
    "dlrm": {16: 135_581_537, 32: 135_636_449, 64: 135_746_273, 128: 135_965_921},
}


def test_all_eight_parameter_counts():
    counts: dict[str, dict[int, int]] = {"dcn": {}, "dlrm": {}}
    for point in table1_points(Study(cardinalities=CARDINALITIES, num_rows=1)):
        run = RunConfig(data="criteo", **point.options)
        tables = EmbeddingCollection(tables_of(CARDINALITIES, run.scheme), device="meta")
        model = models.build(run.network, tables, preset=run.preset, device=torch.device("meta"))
        counts[run.network][point.x] = sum(p.numel() for p in model.parameters())
    assert counts == PRINTED
