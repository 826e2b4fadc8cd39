"""Real click-log rows: the losses that issue-sized bounds ask for, averaged over five seeds."""

import statistics

import pytest
from click_logs import SAMPLE

from quorem import QR, Full
from quorem.data.config import PrepareConfig
from quorem.data.criteo import prepare_criteo
from quorem.training.config import RunConfig
from quorem.training.loop import train_many
from quorem.training.model import data_identity

RAW = SAMPLE / "train.txt.gz"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    if not RAW.exists():
        pytest.skip("needs 80,000 rows of the Criteo Kaggle log: QUOREM_CRITEO_SAMPLE names their folder")
    days = PrepareConfig(days=5)  # of 16,000 rows: four train, the last is halved
    return prepare_criteo(RAW, tmp_path_factory.mktemp("sample") / "log", days)


@pytest.mark.parametrize(("scheme", "bound"), [(Full(), 0.447), (QR(4, operation="mult"), 0.450)], ids=["full", "mult"])
def test_mean_test_log_loss_of_five_seeds(prepared, scheme, bound):
    assert [len(prepared.split(name)) for name in ("train", "validation", "test")] == [64_000, 8_000, 8_000]
    config = {"data": data_identity(prepared), "network": "dlrm", "embedding_dim": 16, "batch_size": 128, "lr": 0.01}
    runs = [RunConfig(scheme=scheme, optimizer="adagrad", seed=seed, **config) for seed in range(5)]
    results = train_many(runs, prepared)
    assert statistics.mean(result["test"]["log_loss"] for result in results) <= bound
