"""Runs whose layers are updated in few launches: as the plain runs, and resumed bit for bit."""

import pytest
import torch
from runs_of_training import small_run

import quorem
from quorem import models
from quorem.training.tables import tables_of
from quorem.training.trial import OPTIMIZER_CLASSES, Trial

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.dense import foreach
from quorem.dense.step import FusedStep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NETWORKS = {
    "dlrm": lambda tables: models.DLRM(tables, num_dense=3, bottom=(16,), top=(24, 8), device=DEVICE),
    "dcn": lambda tables: models.DCN(tables, num_dense=3, deep=(24, 8), num_cross=2, device=DEVICE),
}
CASES = [
    ("dlrm", "adagrad", quorem.QR(4)),
    ("dcn", "amsgrad", quorem.QR(4)),
    ("dlrm", "amsgrad", quorem.Path(4, (5,), force=True)),
]


def small_trial(log, network, optimizer, scheme, fused):
    config = small_run(log, network=network, optimizer=optimizer, scheme=scheme, batch_size=16)
    torch.manual_seed(0)
    tables = quorem.EmbeddingCollection(tables_of(log.cardinalities, scheme, embedding_dim=4), device=DEVICE)
    trial = Trial(config, NETWORKS[network](tables), log.names)
    params = trial.dense.param_groups[0]["params"]
    trial.dense = OPTIMIZER_CLASSES[optimizer](params, lr=config.learning_rate)  # as on a GPU
    trial.layers = FusedStep(trial.model, trial.dense) if fused else None
    return trial


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("network", "optimizer", "scheme"), CASES)
def test_fused_steps_are_plain_ones_and_go_on_from_their_tensors(
    log, network, optimizer, scheme, deterministic, monkeypatch
):
    if DEVICE == "cpu":  # the rest of the parameters, too, takes the way it has on a GPU
        monkeypatch.setattr(foreach, "on_gpu", lambda tensor: True)
    batches = list(log.split("train").rows(0, 40).to(DEVICE).batches(16))  # the last has fewer rows
    trials = [small_trial(log, network, optimizer, scheme, fused) for fused in (True, False)]
    start = {name: tensor.clone() for name, tensor in trials[0].tensors().items() if name.startswith("model.")}
    for trial in trials:
        for batch in batches[:2]:
            trial.step(batch)
    saved = {name: tensor.clone() for name, tensor in trials[0].tensors().items()}
    for trial in trials:
        trial.step(batches[2])
    fused, plain = (trial.tensors() for trial in trials)
    assert fused.keys() == plain.keys()
    assert float(fused["loss_sum"]) == pytest.approx(float(plain["loss_sum"]), rel=1e-6)
    for name, first in start.items():
        change, truth = fused[name] - first, plain[name] - first
        assert (change - truth).norm() <= 1e-3 * truth.norm(), name  # small gradients have steps as large as any
    resumed = small_trial(log, network, optimizer, scheme, fused=True)
    resumed.restore(2, saved)
    resumed.step(batches[2])
    for name, tensor in resumed.tensors().items():
        assert torch.equal(tensor, fused[name]), name
