"""The compiled parts of a step, which a GPU runs, against torch's: loss, gradients, optimizer; here on the CPU."""

import copy
from typing import get_args

import pytest
import torch
from runs_of_training import TORCHS, small_run
from torch import nn
from torch.nn import functional as F

import quorem
from quorem import models
from quorem.optimizer_names import Optimizer
from quorem.training.model import tables_of
from quorem.training.trial import Trial, compiled_loss, dense_optimizer, update_

NETWORKS = {
    "dlrm": lambda tables: models.DLRM(tables, num_dense=3, bottom=(16,), top=(24, 8)),
    "dcn": lambda tables: models.DCN(tables, num_dense=3, deep=(24, 8), num_cross=2),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_compiled_steps_are_plain_ones_and_go_on_from_their_tensors(log, network):
    def small_trial(compiled):
        torch.manual_seed(0)
        tables = quorem.EmbeddingCollection(tables_of(log.cardinalities, quorem.QR(4), embedding_dim=4))
        trial = Trial(small_run(log, network=network, batch_size=16), NETWORKS[network](tables), log.names)
        if compiled:  # as on a GPU
            trial.compiles, trial._compiled_loss = True, compiled_loss(trial.model)
        return trial

    def step(trial, batch):
        trial._step(batch)
        trial.steps += 1

    batches = list(log.split("train").rows(0, 40).batches(16))  # the last has fewer rows
    compiled, plain = small_trial(True), small_trial(False)
    start = {name: tensor.clone() for name, tensor in plain.tensors().items() if name.startswith("model.")}
    for trial in (compiled, plain):
        for batch in batches[:2]:
            step(trial, batch)
    saved = {name: tensor.clone() for name, tensor in compiled.tensors().items()}
    for trial in (compiled, plain):
        step(trial, batches[2])
    ours, truth = compiled.tensors(), plain.tensors()
    assert ours.keys() == truth.keys()
    assert float(ours["loss.sum"]) == pytest.approx(float(truth["loss.sum"]), rel=1e-6)
    for name, first in start.items():
        change, expected = ours[name] - first, truth[name] - first
        assert (change - expected).norm() <= 1e-3 * expected.norm(), name  # small gradients have steps as large as any
    resumed = small_trial(True)
    resumed.restore(2, saved)
    step(resumed, batches[2])
    for name, tensor in resumed.tensors().items():
        assert torch.equal(tensor, ours[name]), name


def test_a_network_without_logits_is_not_compiled():
    assert compiled_loss(nn.Linear(3, 1)) is None


@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_the_captured_update_is_that_of_torch(log, optimizer):
    """In float64, so that nothing but the rule is compared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.Linear(3, 1)).double()
    model[2].bias.requires_grad_(False)  # gets no gradient
    twin = copy.deepcopy(model)
    ours = dense_optimizer(small_run(log, optimizer=optimizer), list(model.parameters()))
    truth = TORCHS[optimizer](twin.parameters())
    for _ in range(5):
        x = torch.randn(8, 5, dtype=torch.float64)
        for network, step in ((model, lambda: update_(ours)), (twin, truth.step)):
            network.zero_grad()
            F.softplus(network(x)).mean().backward()
            step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
