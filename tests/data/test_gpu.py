"""Prepared and synthetic rows on a GPU; needs torch and numpy only."""

import pytest
import torch

from quorem.data.batches import Bags, Batch
from quorem.data.synthetic import ClickLog

ROWS = 60_000
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


def test_log_is_that_of_the_cpu():
    on_cpu, on_gpu = LOG.draw(5, ROWS), LOG.draw(5, ROWS, "cuda")
    equal = on_gpu.batch.ids.cpu() == on_cpu.batch.ids
    assert equal.double().mean() > 1 - 1e-5  # an exponential rounded otherwise may move an id that is at a border
    same = equal.all(1)
    torch.testing.assert_close(on_gpu.probability.cpu()[same], on_cpu.probability[same], rtol=0, atol=1e-5)
    torch.testing.assert_close(on_gpu.batch.dense.cpu(), on_cpu.batch.dense)
    assert (on_gpu.batch.labels.cpu() == on_cpu.batch.labels)[same].double().mean() > 1 - 1e-4


def test_rows_do_not_depend_on_chunks():
    whole = LOG.draw(0, ROWS, "cuda")
    parts = [LOG.draw(a, b, "cuda") for a, b in ((0, 1), (1, 777), (777, ROWS))]
    assert torch.equal(whole.batch.ids, torch.cat([part.batch.ids for part in parts]))
    assert torch.equal(whole.probability, torch.cat([part.probability for part in parts]))
