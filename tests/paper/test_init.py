"""The distribution that the composed vectors start with."""

from dataclasses import replace
from math import sqrt

import pytest
import torch

from quorem import QR, ChineseRemainder, Embedding, Full, GeneralizedQR, Hash, Path
from quorem.paper.init import NOISE
from quorem.paper.schemes import Scheme

ROWS = 40_000
BOUND = sqrt(1 / ROWS)


def started(scheme: Scheme, seed: int = 0) -> Embedding:
    torch.manual_seed(seed)
    return Embedding(ROWS, 16, scheme, dtype=torch.float64)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_starts_in_half_precision(dtype: torch.dtype) -> None:
    """One plus noise survives rounding: the small tables do not start as all ones."""
    table = Embedding(4000, 8, QR(40), dtype=dtype)
    assert all(stored.isfinite().all() and stored.unique().numel() > 2 for stored in table.tables())


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
