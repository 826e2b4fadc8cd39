"""Starting values: distributions of the composed vectors; path networks near the identity; least-squares fits."""

from math import sqrt

import pytest
import torch
from torch import Tensor

from quorem import QR, ChineseRemainder, Embedding, Full, GeneralizedQR, Hash, Path, init
from quorem.schemes import Scheme

OPERATIONS = ("concat", "add", "mult", "feature")
COMPOSED = [
    pytest.param(scheme, id=f"{type(scheme).__name__}-{scheme.operation}")
    for operation in OPERATIONS
    for scheme in (
        QR(4, operation=operation),
        QR(4, operation=operation, large="quotient"),
        GeneralizedQR(2, operation=operation, num_rows=4000),
        ChineseRemainder(3, operation=operation, num_rows=6000),
    )
]
N, D = 12_000, 12


def composed(scheme: Scheme, start: str, n: int = N, d: int = D) -> tuple[Embedding, Tensor]:
    torch.manual_seed(0)
    module = Embedding(n, d, scheme, dtype=torch.float64)
    module.reset_parameters(start)
    return module, module.to_dense().detach()


@pytest.mark.parametrize("scheme", [Full(), Hash(4), *COMPOSED])
def test_matched_start_has_the_full_tables_distribution(scheme: Scheme) -> None:
    """Moments of U(-b, b), where 1,000 rows or more are drawn: mean 0, variance b^2 / 3, fourth b^4 / 5."""
    module, dense = composed(scheme, "matched")
    b = sqrt(1 / N)
    kept_apart = module.specs[0].operation in ("concat", "feature")
    for values in module.tables() if kept_apart else [dense]:
        assert values.abs().max() <= b * (1 + 2.01 * init.NOISE)
        if len(values) >= 1000:
            for power, moment in ((1, 0.0), (2, b**2 / 3), (4, b**4 / 5)):
                assert (values**power).mean().item() == pytest.approx(moment, rel=0.03, abs=0.03 * b**power)


@pytest.mark.parametrize("scheme", COMPOSED)
def test_symmetric_start_has_the_full_tables_variance(scheme: Scheme) -> None:
    module, dense = composed(scheme, "symmetric")
    rows = min(len(table) for table in module.tables())
    assert dense.var().item() == pytest.approx(1 / N / 3, rel=0.05 if rows > 1000 else 0.5)


@pytest.mark.parametrize("operation", ["add", "mult"])
def test_symmetric_start_treats_tables_alike(operation: str) -> None:
    module, _ = composed(ChineseRemainder(3, operation=operation, num_rows=6000), "symmetric")
    bounds = [table.abs().max().item() for table in module.tables()]
    expected = sqrt(1 / N / 3) if operation == "add" else sqrt(3) * (1 / N / 3) ** (1 / 6)
    assert bounds == pytest.approx([expected] * 3, rel=0.001)


def test_reference_start_is_positive_but_for_a_table_that_stands_alone() -> None:
    module, _ = composed(QR(4), "reference")
    for table in module.tables():
        assert sqrt(1 / N) <= table.min() and table.max() <= 1
    assert module.tables()[0].mean().item() == pytest.approx((1 + sqrt(1 / N)) / 2, rel=0.01)
    for scheme in (Full(), Hash(4)):
        _, alone = composed(scheme, "reference")
        assert -sqrt(1 / N) <= alone.min() < 0 < alone.max() <= sqrt(1 / N)


def test_noise_is_the_deviation_of_the_small_table() -> None:
    module = Embedding(N, D, QR(4))
    with torch.no_grad():
        init.matched_(module.tables(), module.specs[0], noise=0.0)
    assert torch.equal(module.tables()[1], torch.ones(4, D))
    with torch.no_grad():
        init.matched_(module.tables(), module.specs[0], noise=0.5)
    assert 0.4 < (module.tables()[1] - 1).abs().max() <= 0.5


def test_unknown_start_is_named() -> None:
    with pytest.raises(ValueError, match=r"start \('zeros'\) must be one of 'matched', 'symmetric', 'reference'"):
        Embedding(10, 2, Full()).reset_parameters("zeros")


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
@pytest.mark.parametrize("hidden", [(), (24,), (64,), (64, 24, 100)])
def test_path_networks_start_near_the_identity(hidden: tuple[int, ...], activation: str) -> None:
    """Wide enough networks pass the table's row, up to noise of relative size NOISE per layer."""
    module, dense = composed(Path(4, hidden, activation=activation), "matched")
    row = module.tables()[0].detach()[torch.arange(N) % (N // 4)]
    layers = len(hidden) + 1
    relative = (dense - row).norm() / row.norm()
    assert 0 < relative < 4 * layers * init.NOISE


@pytest.mark.parametrize("hidden", [(1,), (2,), (5,), (16,)])
def test_narrow_path_networks_keep_the_variance(hidden: tuple[int, ...]) -> None:
    module, dense = composed(Path(4, hidden), "matched", d=16)
    ratio = dense.var() / module.tables()[0].var()
    expected = 0.5 if hidden == (1,) else 1.0  # a single relu unit passes the positive half alone
    assert ratio.item() == pytest.approx(expected, rel=0.35 if hidden == (1,) else 0.05)


@pytest.mark.parametrize("permute", [None, 3])
@pytest.mark.parametrize("scheme", [Hash(4), *(QR(4, operation=o) for o in OPERATIONS)])
def test_fit_recovers_a_table_of_the_same_form(scheme: Scheme, permute: int | None) -> None:
    scheme = type(scheme)(4, **({} if isinstance(scheme, Hash) else {"operation": scheme.operation}), permute=permute)
    torch.manual_seed(1)
    source = Embedding(103, 6, scheme, dtype=torch.float64)
    with torch.no_grad():
        source.weight.normal_()
    if getattr(scheme, "operation", "") == "feature":
        dense = source.to_dense().detach().mean(1)
        fitted = Embedding.from_pretrained(dense, scheme)
        means = [torch.stack([dense[p == b].mean(0) for b in p.unique()]) for p in buckets(fitted)]
        torch.testing.assert_close(fitted.tables(), means)
    else:
        fitted = Embedding.from_pretrained(source.to_dense().detach(), scheme)
        torch.testing.assert_close(fitted.to_dense(), source.to_dense().detach())


def buckets(module: Embedding) -> list[Tensor]:
    spec, ids = module.specs[0], torch.arange(module.num_embeddings)
    return [p(ids if spec.permutation is None else spec.permutation(ids)) for p in spec.partitions]


def test_fit_by_add_is_least_squares() -> None:
    torch.manual_seed(2)
    target = torch.randn(103, 5, dtype=torch.float64)
    fitted = Embedding.from_pretrained(target, ChineseRemainder(3, operation="add"))
    design = torch.cat([torch.nn.functional.one_hot(p, int(p.max()) + 1) for p in buckets(fitted)], 1).double()
    expected = design @ torch.linalg.lstsq(design, target, driver="gelsd").solution
    torch.testing.assert_close(fitted.to_dense(), expected, rtol=1e-5, atol=1e-5)


def test_fit_by_mult_is_the_best_product() -> None:
    """Where every pair of buckets is an id, each column is a matrix and its best product the first singular pair."""
    torch.manual_seed(3)
    m, c, d = 25, 4, 5
    target = torch.randn(c, m, d, dtype=torch.float64) * 0.1 + torch.einsum(
        "cd,md->cmd", torch.randn(c, d).double(), torch.randn(m, d).double()
    )
    fitted = Embedding.from_pretrained(target.view(c * m, d), QR(c))
    U, S, Vh = torch.linalg.svd(target.permute(2, 0, 1), full_matrices=False)
    best = torch.einsum("dc,d,dm->cmd", U[..., 0], S[:, 0], Vh[:, 0]).reshape(c * m, d)
    torch.testing.assert_close(fitted.to_dense(), best, rtol=1e-5, atol=1e-5)


def test_fit_by_mult_finds_factors_that_cancel() -> None:
    rows = torch.linspace(1, 2, 10)[:, None]
    target = torch.cat([rows, -rows])  # quotient factors +1 and -1: the mean of each bucket is zero
    fitted = Embedding.from_pretrained(target, QR(2))
    torch.testing.assert_close(fitted.to_dense(), target)


def test_fit_weighs_ids() -> None:
    """Rows of a hash are weighted means; ids of weight zero count for nothing."""
    torch.manual_seed(4)
    target, weights = torch.randn(12, 3), torch.tensor([1.0, 0.0, 5.0] * 4)
    module = Embedding(12, 3, Hash(4))
    init.fit_(module.tables(), module.specs[0], target, weights=weights)
    expected = (target * weights[:, None]).view(4, 3, 3).sum(0) / weights.view(4, 3).sum(0)[:, None]
    torch.testing.assert_close(module.tables()[0].detach(), expected.nan_to_num())


@pytest.mark.parametrize(
    ("dense", "weights", "match"),
    [
        (
            torch.zeros(11, 3),
            None,
            r"dense has shape \(11, 3\) but must be \[num_embeddings, embedding_dim\] \(12, 3\)",
        ),
        (torch.zeros(12, 3), torch.ones(12, 1), r"weights has shape \(12, 1\) but must be \[num_embeddings\] \(12\)"),
    ],
)
def test_fit_refuses_other_shapes(dense: Tensor, weights: Tensor | None, match: str) -> None:
    module = Embedding(12, 3, Hash(4))
    with pytest.raises(ValueError, match=match):
        init.fit_(module.tables(), module.specs[0], dense, weights=weights)


def test_fit_refuses_paths() -> None:
    with pytest.raises(ValueError, match=r"scheme \(Path.*\) must not be path-based"):
        Embedding.from_pretrained(torch.zeros(1000, 4), Path(4, ()))
