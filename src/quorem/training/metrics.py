"""Metrics of click prediction: log loss, AUC, accuracy, calibration. Updates do not wait for the device."""

from dataclasses import dataclass
from math import nan

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The result of ``Evaluation.compute``."""

    rows: int
    log_loss: float  # mean binary cross-entropy, in nats
    auc: float  # probability that a positive sample scores above a negative one, ties counted half
    accuracy: float  # share of samples on the right side of probability 1/2 (exactly 1/2 predicts 1)
    calibration: float  # mean prediction divided by mean label; 1 is ideal


class Evaluation:
    """Collects logits and labels, which are 0 or 1, batch by batch; then computes the metrics of all in float64."""

    def __init__(self) -> None:
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch of logits and labels ``[B]``; nothing is read back from the device."""
        if logits.shape != labels.shape:
            raise ValueError(f"logits {tuple(logits.shape)} must have the shape of labels {tuple(labels.shape)}")
        # Copies, because a captured graph writes its next batch into the same memory.
        self._logits.append(logits.detach().flatten().clone())
        self._labels.append(labels.flatten().clone())

    def compute(self) -> Metrics:
        """The metrics of all batches so far; NaN where a metric is undefined (AUC of a single class)."""
        rows = sum(map(len, self._labels))
        if not rows:
            raise ValueError("an Evaluation must be updated with at least one sample before compute()")
        logits, order = torch.cat(self._logits).double().sort()
        labels = torch.cat(self._labels)[order].double()
        predicted, positives = logits.sigmoid(), float(labels.sum())
        right = ((logits >= 0) == (labels == 1)) & ~logits.isnan()
        return Metrics(
            rows=rows,
            log_loss=float(F.binary_cross_entropy_with_logits(logits, labels)),
            auc=auc(logits, labels),
            accuracy=int(right.sum()) / rows,
            calibration=float(predicted.sum()) / positives if positives else nan,
        )


def auc(scores: Tensor, labels: Tensor) -> float:
    """Exact area under the ROC curve of rising scores ``[N]``: the share of (positive, negative) pairs in order.

    Ties count half. Pairs are counted in integers, so the result is the correctly rounded quotient. It is NaN if all
    labels are equal or a score is NaN.
    """
    positive = labels.long().cumsum(0)
    positives = int(positive[-1]) if len(labels) else 0
    negatives = len(labels) - positives
    if not positives or not negatives or bool(scores[-1].isnan()):
        return nan
    last = F.pad(scores[1:] != scores[:-1], (0, 1), value=True)  # last of each group of equal scores
    negative = torch.arange(1, len(labels) + 1, device=labels.device) - positive
    above = positive[last].diff(prepend=positive.new_zeros(1))  # positives of each group
    below = negative[last]  # negatives up to the end of each group
    twice = (above * (below + F.pad(below[:-1], (1, 0)))).sum()
    return int(twice) / (2 * positives * negatives)
