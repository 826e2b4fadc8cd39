"""The fit of sums against the normal equations, and of products against rank one and plain alternation."""

from dataclasses import replace

import pytest
import torch
from fit_cases import buckets_of, compose, fitted, noise, uneven
from oracles import CASES, D, N
from torch import Tensor

from quorem import QR, ChineseRemainder, Embedding, GeneralizedQR
from quorem.fit import solvers
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


@pytest.mark.parametrize(("m", "q"), [(15, 4), (200, 150), (6, 10)])
@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_products_of_two_tables_are_the_best_rank_one(m: int, q: int, sigma: float) -> None:
    """By Eckart and Young: for each dimension the table ``[q, m]`` loses all but its first singular value."""
    grid = noise(q, 4, 1)[:, None] * noise(m, 4, 2) + sigma * noise(q * m, 4).view(q, m, 4)
    values = torch.linalg.svdvals(grid.permute(2, 0, 1))
    spec = QR(q, force=True).spec(q * m, 4)
    dense = grid.flatten(0, 1)
    error = (compose(fitted(spec, dense), spec) - dense).pow(2).sum()
    assert float(error) == pytest.approx(float(values[:, 1:].pow(2).sum()), rel=1e-3)


@pytest.mark.parametrize("scheme", [QR(4), GeneralizedQR(3), ChineseRemainder(2)], ids=str)
def test_weighted_products_are_no_worse_than_plain_alternation(scheme: Scheme) -> None:
    """For each dimension, the best of six random starts, alternated one bucket at a time for as long as it takes."""
    spec = replace(scheme, force=True).spec(N, 2)
    dense, weights = noise(N, 2) + 1, uneven(N).double()[:, None] + 0.01
    buckets, errors = buckets_of(spec), []
    for seed in range(6):
        tables = [noise(size, 2, seed) for size, _ in spec.shapes]
        for _ in range(100):
            for j, table in enumerate(tables):
                others = [t[b] for i, (t, b) in enumerate(zip(tables, buckets, strict=True)) if i != j]
                factor = torch.stack(others).prod(0)
                for b in range(len(table)):
                    ids = buckets[j] == b
                    table[b] = (weights * dense * factor)[ids].sum(0) / (weights * factor * factor)[ids].sum(0)
        errors.append((weights * (compose(tables, spec) - dense) ** 2).sum(0))
    error = (weights * (compose(fitted(spec, dense, weights[:, 0]), spec) - dense) ** 2).sum(0)
    assert float(error.sum()) <= 1.01 * float(torch.stack(errors).amin(0).sum())


def test_products_whose_factors_cancel_are_fitted() -> None:
    """The mean of every bucket of the large table is zero, where a fit from equal factors would stay."""
    rows = torch.linspace(1, 2, 10)[:, None]
    spec, target = QR(2).spec(20, 1), torch.cat([rows, -rows])
    torch.testing.assert_close(compose(fitted(spec, target), spec), target)


@pytest.mark.parametrize("seed", range(3))
def test_weighted_products_have_no_factors_close_to_zero_at_next_to_no_cost(seed: int, monkeypatch) -> None:
    """A factor near zero makes rows that the first step of an optimizer would blow up."""
    draw = torch.Generator().manual_seed(seed)
    trained, counts = torch.randn(400, 8, generator=draw), (270 / torch.arange(1, 401)).floor()  # a third is unseen
    errors, smallest = [], []
    for floor in (0.0, solvers.FLOOR):
        monkeypatch.setattr(solvers, "FLOOR", floor)
        table = Embedding(400, 8, QR(4))
        table.fit_(trained, counts)
        errors.append((table.to_dense() - trained).square().mul(counts[:, None]).sum())
        smallest.append(min(dict(table.named_tables()).values(), key=len).abs().min())
    assert smallest[0] < 0.06 and smallest[1] > 0.09
    assert errors[1] <= (1 + solvers.COST) * errors[0]
