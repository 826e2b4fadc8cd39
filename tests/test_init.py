"""Starts: the distribution that the composed vectors have. Fits: exact where they can be, optimal where not."""

from dataclasses import replace
from itertools import pairwise
from math import sqrt

import pytest
import torch
from oracles import CASES, D, N, assert_near, fill_
from torch import Tensor

from quorem import QR, ChineseRemainder, Custom, Embedding, EmbeddingBag, Full, GeneralizedQR, Hash, Path
from quorem.init import METHODS, NOISE, fit_, matched_, path_
from quorem.partitions import ExplicitPartition
from quorem.schemes import Scheme

ROWS = 40_000
BOUND = sqrt(1 / ROWS)


def started(scheme: Scheme, start: str = "matched", seed: int = 0) -> Embedding:
    torch.manual_seed(seed)
    table = Embedding(ROWS, 16, scheme, dtype=torch.float64)
    table.reset_parameters(start)
    return table


# The standard error of a uniform deviation over M numbers is 0.45 / sqrt(M) of it, and M is 160,000 at least.


@pytest.mark.parametrize(
    "scheme",
    [Full(), Hash(4), *(QR(4, operation=o, large=side) for o in ("add", "mult") for side in ("remainder", "quotient"))],
    ids=str,
)
def test_vectors_start_as_the_full_table_would(scheme: Scheme) -> None:
    """U(-sqrt(1/n), sqrt(1/n)): mean, deviation, fourth moment and bounds."""
    vectors = started(scheme).to_dense().detach()
    assert abs(vectors.mean()) < 0.01 * BOUND
    assert vectors.std().item() == pytest.approx(BOUND / sqrt(3), rel=0.01)
    assert vectors.pow(4).mean().item() == pytest.approx(BOUND**4 / 5, rel=0.02)
    assert BOUND * 0.99 < vectors.abs().max() <= BOUND * (1 + NOISE)


@pytest.mark.parametrize("operation", ["concat", "feature"])
def test_vectors_kept_apart_all_start_as_the_full_table(operation: str) -> None:
    table = started(QR(200, operation=operation))
    for stored in table.tables():
        assert stored.std().item() == pytest.approx(BOUND / sqrt(3), rel=0.05)
        assert stored.abs().max() <= BOUND


@pytest.mark.parametrize("operation", ["add", "mult"])
@pytest.mark.parametrize("scheme", [GeneralizedQR(3), ChineseRemainder(2), GeneralizedQR(4)], ids=str)
def test_one_table_starts_large_and_the_others_neutral(scheme: Scheme, operation: str) -> None:
    table = started(replace(scheme, operation=operation))
    sizes = [len(stored) for stored in table.tables()]
    neutral = 1.0 if operation == "mult" else 0.0
    scale = 1.0 if operation == "mult" else BOUND
    for j, stored in enumerate(table.tables()):
        if j == sizes.index(max(sizes)):
            assert stored.abs().max() <= BOUND and stored.std().item() == pytest.approx(BOUND / sqrt(3), rel=0.2)
        else:
            assert 0 < (stored - neutral).abs().max() <= NOISE * scale


@pytest.mark.parametrize("operation", ["add", "mult", "concat", "feature"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_symmetric_start_has_the_full_tables_deviation(k: int, operation: str) -> None:
    """All tables alike. The tables are small, so the deviation is averaged over starts."""
    dims = {"dims": (4, 6, 6)[:k]} if operation == "concat" and k == 3 else {}
    scheme = GeneralizedQR(k, operation=operation, force=True, **dims)
    variances = []
    for seed in range(1 if k == 1 else 12):
        table = started(scheme, "symmetric", seed)
        bounds = [stored.abs().max().item() for stored in table.tables()]
        assert max(bounds) == pytest.approx(min(bounds), rel=0.1)
        variances.append(table.to_dense().detach().pow(2).mean().item())
    assert sum(variances) / len(variances) == pytest.approx(BOUND**2 / 3, rel=0.1)


def test_the_reference_start_is_the_public_codes() -> None:
    """U(sqrt(1/n), 1) in each factor, so products of mean 1/4 and deviation sqrt(1/9 - 1/16)."""
    table = started(QR(200), "reference")
    for stored in table.tables():
        assert stored.min() >= BOUND and stored.max() <= 1 and stored.mean().item() == pytest.approx(0.5, rel=0.05)
    vectors = table.to_dense().detach()
    assert vectors.mean().item() == pytest.approx(1 / 4, rel=0.05)
    assert vectors.std().item() == pytest.approx(sqrt(1 / 9 - 1 / 16), rel=0.05)


@pytest.mark.parametrize("start", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_starts_in_half_precision(start: str, dtype: torch.dtype) -> None:
    """One plus noise survives rounding: the small tables do not start as all ones."""
    table = Embedding(4000, 8, QR(40), dtype=dtype)
    table.reset_parameters(start)
    assert all(stored.isfinite().all() and stored.unique().numel() > 2 for stored in table.tables())


def test_starts_are_seeded() -> None:
    first, again, other = (started(QR(4), seed=seed).stored for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


# Path networks.


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize(
    ("hidden", "activation"),
    [((), "relu"), ((32,), "relu"), ((40, 33), "relu"), ((16,), "sigmoid"), ((20, 17), "sigmoid")],
)
def test_networks_wide_enough_start_as_the_identity(hidden: tuple[int, ...], activation: str, levels: int) -> None:
    table = started(Path(4, hidden, activation=activation, num_partitions=levels + 1, force=True))
    ids = torch.arange(2000)
    rows = table.tables()[0][table.specs[0].partitions[0](ids)]
    vectors = table(ids)
    error = (vectors - rows).norm() / rows.norm()
    assert 0 < error < 0.1 * (len(hidden) + 1) * levels
    assert vectors.mean(0).abs().max() < 0.2 * BOUND
    assert vectors.std().item() == pytest.approx(BOUND / sqrt(3), rel=0.1)


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
@pytest.mark.parametrize("hidden", [(1,), (2,), (6,), (6, 31)])
def test_narrow_networks_keep_the_variance(hidden: tuple[int, ...], activation: str) -> None:
    """They carry as many dimensions as they can; the others start at zero, give or take the noise."""
    table = started(Path(4, hidden, activation=activation, force=True))
    vectors = table(torch.arange(4000)).detach()
    carried = min(hidden[0] // (2 if activation == "relu" else 1) or 1, 16)
    strong = vectors.std(0) > 0.3 * BOUND
    assert strong.sum() == carried
    if hidden != (1,) or activation == "sigmoid":  # a single rectified unit passes one half of one direction
        assert vectors.var(0).sum().item() == pytest.approx(16 * BOUND**2 / 3, rel=0.15)
    assert vectors[:, ~strong].abs().mean() < 0.1 * BOUND
    assert vectors.mean(0).abs().max() < 0.1 * BOUND or (hidden, activation) == ((1,), "relu")


def test_networks_start_apart() -> None:
    """Equal networks would give ids of one row the same vector, and the same gradient for ever."""
    table = started(Path(4, (64,)))
    m = len(table.tables()[0])
    first, second = table(torch.tensor([5, m + 5]))
    assert not torch.equal(first, second)


def test_path_start_in_bfloat16() -> None:
    weights, biases = [torch.empty(3, 4, 8), torch.empty(3, 8, 4)], [torch.empty(3, 8), torch.empty(3, 4)]
    half = [w.bfloat16() for w in weights], [b.bfloat16() for b in biases]
    path_(*half, "relu")
    x = torch.randn(3, 5, 4)
    y = torch.relu(x @ half[0][0].float()) @ half[0][1].float()
    assert (y - x).norm() < 0.1 * x.norm() and not any(b.any() for b in half[1])


# Fits.


def residual(scheme: Scheme, dense: Tensor) -> float:
    """Squared error of the fit of ``dense``, over its squared norm."""
    table = Embedding.from_pretrained(dense, replace(scheme, force=True))
    return float((table.to_dense() - dense).pow(2).sum() / dense.pow(2).sum())


@pytest.mark.parametrize("permute", [None, 4])
@pytest.mark.parametrize("case", [c for c in CASES if not c.startswith("path") and "feature" not in c])
def test_what_a_scheme_can_hold_is_fitted_exactly(case: str, permute: int | None) -> None:
    """A table made by the scheme itself comes back, products that start near one included."""
    scheme = replace(CASES[case], permute=permute)
    source = fill_(Embedding(N, D, scheme, dtype=torch.float64))
    if source.specs[0].operation == "mult":
        with torch.no_grad():
            source.stored.mul_(0.2).add_(1)
    dense = source.to_dense().detach()
    fitted = Embedding(N, D, scheme, dtype=torch.float64)
    fit_(fitted.tables(), fitted.specs[0], dense, sweeps=300)
    assert_near(fitted.to_dense(), dense, torch.float32)


def test_fits_of_one_table_are_means_over_buckets() -> None:
    dense = torch.randn(N, D, dtype=torch.float64)
    mapped = CASES["explicit"]
    for scheme, buckets in ((Hash(4), torch.arange(N) % 15), (mapped, mapped.partitions[0].index)):
        (stored,) = Embedding.from_pretrained(dense, scheme).tables()
        for bucket in buckets.unique():
            torch.testing.assert_close(stored[bucket], dense[buckets == bucket].mean(0))


def test_feature_generation_fits_each_table_by_itself() -> None:
    dense = torch.randn(N, D, dtype=torch.float64)
    table = Embedding.from_pretrained(dense, QR(4, operation="feature"))
    for stored, part in zip(table.tables(), table.specs[0].partitions, strict=True):
        buckets = part(torch.arange(N))
        torch.testing.assert_close(stored, torch.stack([dense[buckets == b].mean(0) for b in range(len(stored))]))


@pytest.mark.parametrize("scheme", [QR(4), QR(7), GeneralizedQR(3), ChineseRemainder(3), CASES["mixed-add"]], ids=str)
@pytest.mark.parametrize("operation", ["add", "concat"])
def test_linear_fits_are_least_squares(scheme: Scheme, operation: str) -> None:
    """Against ``lstsq`` over the indicator matrix of the buckets."""
    scheme = replace(scheme, operation=operation, force=True)
    dense = torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spec = scheme.spec(N, D)
    hot = [torch.eye(p.size, dtype=torch.float64)[p(torch.arange(N))] for p in spec.partitions]
    if operation == "add":
        matrix = torch.cat(hot, 1)
        best = (matrix @ torch.linalg.lstsq(matrix, dense, driver="gelsd").solution - dense).pow(2).sum()
    else:
        parts = dense.split([width for _, width in spec.shapes], 1)
        best = sum(
            (m @ torch.linalg.lstsq(m, part, driver="gelsd").solution - part).pow(2).sum()
            for m, part in zip(hot, parts, strict=True)
        )
    assert residual(scheme, dense) == pytest.approx(float(best / dense.pow(2).sum()), rel=1e-4)


@pytest.mark.parametrize(("m", "q"), [(15, 4), (10, 6), (6, 10)])
@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_products_of_two_tables_are_the_best_rank_one(m: int, q: int, noise: float) -> None:
    """By Eckart and Young: for each dimension the table ``[q, m]`` loses all but its first singular value."""
    draw = torch.Generator().manual_seed(0)
    factors = torch.randn(q, 1, D, generator=draw, dtype=torch.float64), torch.randn(1, m, D, generator=draw)
    dense = factors[0] * factors[1] + noise * torch.randn(q, m, D, generator=draw)
    values = torch.linalg.svdvals(dense.permute(2, 0, 1))
    best = values[:, 1:].pow(2).sum() / values.pow(2).sum()
    found = residual(QR(q), dense.reshape(q * m, D))
    assert found == pytest.approx(float(best), rel=1e-2, abs=1e-12)


def test_more_sweeps_never_fit_worse() -> None:
    dense = torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for operation in ("add", "mult"):
        errors = []
        for sweeps in (1, 2, 4, 8, 16):
            table = Embedding(N, D, GeneralizedQR(3, operation=operation), dtype=torch.float64)
            fit_(table.tables(), table.specs[0], dense, sweeps=sweeps)
            errors.append((table.to_dense() - dense).pow(2).sum().item())
        assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(errors))


def test_weights_say_whose_error_counts() -> None:
    """A weight of zero leaves an id out; a weight of two is the id twice."""
    dense = torch.randn(8, 2, dtype=torch.float64)
    weights = torch.tensor([1.0, 0, 2, 1, 1, 1, 1, 1])
    table = Embedding(8, 2, Hash(2), dtype=torch.float64)
    fit_(table.tables(), table.specs[0], dense, weights=weights)
    (stored,) = table.tables()
    torch.testing.assert_close(stored[1], dense[5])
    torch.testing.assert_close(stored[2], (2 * dense[2] + dense[6]) / 3)
    for operation in ("add", "mult", "concat"):
        scheme = QR(4, operation=operation)
        table = Embedding(N, D, scheme, dtype=torch.float64)
        target = fill_(Embedding(N, D, scheme, dtype=torch.float64), 3).to_dense().detach().clone().abs().add(1)
        fit_(table.tables(), table.specs[0], target, weights=torch.ones(N))
        expected = table.to_dense().detach()
        fit_(table.tables(), table.specs[0], target)
        torch.testing.assert_close(table.to_dense(), expected)


@pytest.mark.parametrize("module", [Embedding, EmbeddingBag])
def test_the_padding_row_is_not_fitted(module: type[Embedding]) -> None:
    """Its vector is never read, so it must not move the ids that share its rows."""
    dense = torch.randn(N, D, dtype=torch.float64)
    first, second = (
        module.from_pretrained(dense.index_fill(0, torch.tensor([7]), value), Hash(4), padding_idx=7)
        for value in (0.0, 1e6)
    )
    torch.testing.assert_close(first.stored, second.stored)
    torch.testing.assert_close(first.tables()[0][7], dense[[22, 37, 52]].mean(0))


def test_fits_keep_dtype_and_stay_finite() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        dense = torch.randn(N, D).to(dtype)
        dense[:20] = 0
        for operation in ("add", "mult", "concat"):
            table = Embedding.from_pretrained(dense, QR(4, operation=operation))
            assert table.stored.dtype == dtype and table.stored.isfinite().all()


def test_unused_buckets_are_zero() -> None:
    part = ExplicitPartition([0, 4, 0, 4])
    table = Embedding.from_pretrained(torch.ones(4, 2), Custom([part], check=False, force=True))
    assert table.tables()[0][:, 0].tolist() == [1, 0, 0, 0, 1]


def test_refusals() -> None:
    table = Embedding(N, D, QR(4))
    with pytest.raises(ValueError, match=r"dense has shape \(60, 11\) but must be .* \(60, 12\)"):
        fit_(table.tables(), table.specs[0], torch.zeros(N, D - 1))
    with pytest.raises(ValueError, match=r"weights has shape \(3,\) but must be \[num_embeddings\] \(60\)"):
        fit_(table.tables(), table.specs[0], torch.zeros(N, D), weights=torch.ones(3))
    dense = torch.zeros(N, D)
    dense[7, 3] = torch.nan
    with pytest.raises(ValueError, match=r"dense, the table to fit, must be finite, but row 7 is \[0.0, 0.0, 0.0, nan"):
        fit_(table.tables(), table.specs[0], dense)
    path = Embedding(N, D, CASES["path-mlp"])
    with pytest.raises(ValueError, match=r"scheme \(Path\(.*\) must not be path-based"):
        fit_(path.tables(), path.specs[0], torch.zeros(N, D))
    with pytest.raises(ValueError, match=r"method \('normal'\) must be one of 'matched', 'symmetric', 'reference'"):
        table.reset_parameters("normal")


def test_a_fit_of_a_fallback_is_exact() -> None:
    dense = torch.randn(3, D)
    with pytest.warns(UserWarning, match="tables stay full"):
        table = Embedding.from_pretrained(dense, QR(4, permute=1))
    assert_near(table.to_dense(), dense, torch.float32)


def test_products_whose_factors_cancel_are_fitted() -> None:
    """The mean of every bucket of the large table is zero, where a fit from equal factors would stay."""
    rows = torch.linspace(1, 2, 10)[:, None]
    target = torch.cat([rows, -rows])
    torch.testing.assert_close(Embedding.from_pretrained(target, QR(2)).to_dense(), target)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_noise_bounds_the_small_table(noise: float) -> None:
    table = started(QR(4))
    with torch.no_grad():
        matched_(table.tables(), table.specs[0], noise=noise)
    assert noise * 0.9 <= (table.tables()[1] - 1).abs().max() <= noise
