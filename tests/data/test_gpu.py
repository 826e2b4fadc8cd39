"""Prepared rows on a GPU; needs torch and numpy only."""

import pytest
import torch

from quorem.data.batches import Bags, Batch
from quorem.data.synthetic import ClickLog

LOG = ClickLog(cardinalities=(400, 300, 50, 3, 2000, 1_000_000, 7, 120))

pytestmark = pytest.mark.gpu


def test_resident_batches_equal_those_on_the_cpu():
    batch = LOG.draw(0, 1000).batch
    lengths = torch.randint(0, 4, (1000,), generator=torch.Generator().manual_seed(0))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    bag = Bags(torch.arange(int(offsets[-1]), dtype=torch.int32), offsets)
    rows = Batch(batch.labels, batch.dense, batch.ids, {"tags": bag})
    on_gpu = rows.pin_memory().to("cuda", non_blocking=True)
    for seed in (None, 5):
        for expected, moved in zip(rows.batches(16, seed=seed), on_gpu.batches(16, seed=seed), strict=True):
            for name in ("labels", "dense", "ids"):
                assert torch.equal(getattr(expected, name), getattr(moved, name).cpu()), name
            assert torch.equal(expected.bags["tags"].values, moved.bags["tags"].values.cpu())
            assert torch.equal(expected.bags["tags"].offsets, moved.bags["tags"].offsets.cpu())
