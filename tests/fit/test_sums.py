"""The fit of sums against the normal equations."""

from dataclasses import replace

import pytest
import torch
from fit_cases import buckets_of, compose, fitted, noise, uneven
from oracles import CASES, D, N
from torch import Tensor

from quorem import QR, ChineseRemainder, GeneralizedQR
from quorem.paper.schemes import Scheme


@pytest.mark.parametrize("frequencies", [None, uneven(N) + 1e-3], ids=["even", "uneven"])
@pytest.mark.parametrize("scheme", [QR(4), QR(7), GeneralizedQR(3), ChineseRemainder(3), CASES["mixed-add"]], ids=str)
def test_sums_are_least_squares(scheme: Scheme, frequencies: Tensor | None) -> None:
    """Against ``lstsq`` over the indicator matrix of the buckets."""
    spec = replace(scheme, operation="add", force=True).spec(N, D)
    dense = noise(N, D)
    root = torch.ones(N, 1) if frequencies is None else frequencies.double().sqrt()[:, None]
    hot = [torch.eye(p.size, dtype=torch.float64)[b] for p, b in zip(spec.partitions, buckets_of(spec), strict=True)]
    matrix = torch.cat(hot, 1)
    best = matrix @ torch.linalg.lstsq(matrix * root, dense * root, driver="gelsd").solution
    torch.testing.assert_close(compose(fitted(spec, dense, frequencies), spec), best, rtol=1e-7, atol=1e-7)
