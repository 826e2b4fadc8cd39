"""The fit of products against the best matrix of rank one, and against plain alternation."""

from dataclasses import replace

import pytest
import torch
from fit_cases import buckets_of, compose, fitted, made_by, noise, uneven
from oracles import N

from quorem import QR, ChineseRemainder, Embedding, GeneralizedQR
from quorem.fit import products
from quorem.paper.schemes import Scheme


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


@pytest.mark.parametrize("scheme", [QR(4), QR(4, permute=1), GeneralizedQR(3), ChineseRemainder(3)], ids=str)
def test_exact_products_are_recovered(scheme: Scheme) -> None:
    spec = scheme.spec(6_400, 4)
    exact = made_by(spec)
    torch.testing.assert_close(compose(fitted(spec, exact, uneven(6_400)), spec), exact)


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
    for floors in ((), products.FLOORS):
        monkeypatch.setattr(products, "FLOORS", floors or (0.0,))
        table = Embedding(400, 8, QR(4))
        table.fit_(trained, counts)
        errors.append((table.to_dense() - trained).square().mul(counts[:, None]).sum())
        smallest.append(min(dict(table.named_tables()).values(), key=len).abs().min())
    assert smallest[0] < 0.05 and smallest[1] > 0.09
    assert errors[1] <= (1 + products.COST) * errors[0]
