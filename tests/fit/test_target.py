"""The trained table in blocks: their size, and padding."""

import pytest
import torch
from fit_cases import FITTED, compose, fitted, noise
from oracles import D, N

import quorem.fit.target
from quorem import Custom, Hash
from quorem.paper.partitions import Partition


def test_the_padding_row_counts_for_nothing() -> None:
    """Whatever it holds: the others are fitted as by weights of zero and one."""
    dense = noise(N, D) + 2
    holed = dense.index_fill(0, torch.tensor([7]), torch.nan)
    others = torch.arange(N) != 7
    for case in ("hash", "qr-add", "qr-mult", "generalized3-mult", "mixed-concat"):
        spec = FITTED[case].spec(N, D)
        vectors = compose(fitted(spec, holed, padding_idx=7 - N), spec)
        expected = compose(fitted(spec, dense, others.float()), spec)
        torch.testing.assert_close(vectors[others], expected[others], rtol=0.01, atol=0.01)
    (stored,) = fitted(Hash(4).spec(N, D), holed, padding_idx=7)
    torch.testing.assert_close(stored[7], dense[[22, 37, 52]].mean(0))


def test_the_size_of_blocks_and_columns_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = ["hash", "qr-add", "qr-mult", "qr-quotient-mult", "chinese2-add", "generalized3-add", "mixed-mult"]
    wide = Custom((Partition(20, 3), Partition(1, 20)), operation="add", force=True)
    schemes = [FITTED[case] for case in cases]
    specs = [scheme.spec(N, 3) for scheme in (wide, *schemes)]
    dense, frequencies = noise(N, 3) + 2, torch.arange(1.0, N + 1)
    expected = [fitted(spec, dense, frequencies) for spec in specs]
    for numbers in (7, 40):
        monkeypatch.setattr(quorem.fit.target, "BLOCK_NUMBERS", numbers)
        monkeypatch.setattr(quorem.fit, "MEMORY", 0)  # a column at a time
        for spec, tables in zip(specs, expected, strict=True):
            vectors = compose(fitted(spec, dense, frequencies), spec)
            torch.testing.assert_close(vectors, compose(tables, spec), rtol=0.01, atol=0.01)
