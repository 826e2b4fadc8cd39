"""Metrics against sums over all pairs and rows, and against values worked out by hand."""

from fractions import Fraction
from math import exp, isnan, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quorem.training.metrics import Evaluation
from quorem.training.metrics import auc as auc_in_order


def auc(scores, labels):
    ordered, order = scores.sort()
    return auc_in_order(ordered, labels[order])


samples = st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=1, max_size=60)


def evaluate(logits, labels, batch=None):
    evaluation = Evaluation()
    batch = batch or len(logits)
    for x, y in zip(logits.split(batch), labels.split(batch), strict=True):
        evaluation.update(x, y)
    return evaluation.compute()


def pairs(scores, labels):
    """AUC from its definition: every positive against every negative."""
    wins = [
        Fraction(1 + (a > b) - (a < b), 2)
        for a, is_a in zip(scores, labels, strict=True)
        for b, is_b in zip(scores, labels, strict=True)
        if is_a and not is_b
    ]
    return float(sum(wins) / len(wins)) if wins else float("nan")


def test_auc_has_no_meaning_without_both_classes_or_with_nan():
    for scores, labels in (([1.0, 2.0], [1, 1]), ([1.0, 2.0], [0, 0]), ([], []), ([1.0, torch.nan, 0.0], [1, 0, 1])):
        assert isnan(auc(torch.tensor(scores), torch.tensor(labels)))


def test_auc_counts_pairs_past_2_to_the_32():
    ones, zeros = 100_000, 150_000  # 1.5e10 pairs: all positives tie with half of the negatives
    scores = torch.cat([torch.ones(ones), torch.ones(zeros // 2), torch.zeros(zeros // 2)])
    labels = torch.cat([torch.ones(ones), torch.zeros(zeros)]).bool()
    assert auc(scores, labels) == 0.75


def brute_force(logits, labels):
    """Every metric but AUC, row by row."""
    p = [1 / (1 + exp(-x)) for x in logits]
    loss = -sum(log(q) if y else log(1 - q) for q, y in zip(p, labels, strict=True)) / len(p)
    accuracy = sum((q >= 0.5) == y for q, y in zip(p, labels, strict=True)) / len(p)
    calibration = sum(p) / sum(labels) if any(labels) else float("nan")
    return loss, accuracy, calibration


@given(samples, st.integers(1, 60))
def test_metrics_are_those_of_the_rows(rows, batch):
    logits, labels = zip(*rows, strict=True)
    got = evaluate(torch.tensor(logits, dtype=torch.float64), torch.tensor(labels), batch)
    expected = brute_force(logits, labels)
    values = (got.log_loss, got.accuracy, got.calibration)
    assert values == pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True)
    assert got.rows == len(rows)
    assert got.auc == pairs(logits, labels) or (isnan(got.auc) and len(set(labels)) == 1)


def test_logits_are_copied():
    logits, evaluation = torch.tensor([1.0, -1.0]), Evaluation()
    evaluation.update(logits, torch.tensor([1, 0]))
    logits.neg_()
    assert evaluation.compute().auc == 1.0


def test_a_diverged_model_is_not_a_number():
    got = evaluate(torch.tensor([torch.nan, 1.0]), torch.tensor([1, 0]))
    assert isnan(got.log_loss) and isnan(got.auc) and isnan(got.calibration)
    assert got.accuracy == 0.0


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match=r"logits \(2,\) must have the shape of labels \(3,\)"):
        Evaluation().update(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="updated with at least one sample"):
        Evaluation().compute()


@pytest.mark.gpu
def test_update_does_not_wait_for_the_gpu():
    torch.manual_seed(0)
    logits, labels = torch.randn(5000, device="cuda"), torch.randint(2, (5000,), device="cuda")
    evaluation = Evaluation()
    torch.cuda.set_sync_debug_mode("error")
    try:
        evaluation.update(logits, labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert vars(evaluation.compute()) == pytest.approx(vars(evaluate(logits.cpu(), labels.cpu())), rel=1e-12)
