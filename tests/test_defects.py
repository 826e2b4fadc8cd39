"""What is wrong in the paper's public reference code (facebookresearch/dlrm, qr_embedding_bag.py), and right here."""

import math

import pytest
import torch
import torch.nn.functional as F
from oracles import fill_
from torch.utils._python_dispatch import TorchDispatchMode

from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, Full, Path, Table


def test_products_are_taken_before_pooling() -> None:
    """There: pool each table, then multiply: a sum of products became a product of sums (dlrm#366)."""
    bags = fill_(EmbeddingBag(60, 8, QR(4, operation="mult"), mode="sum"))
    ids = torch.tensor([[3, 58]])
    remainder, quotient = bags.tables()
    expected = remainder[3] * quotient[0] + remainder[58 % 15] * quotient[58 // 15]
    torch.testing.assert_close(bags(ids)[0], expected)
    pooled_first = (remainder[3] + remainder[58 % 15]) * (quotient[0] + quotient[58 // 15])
    assert not torch.allclose(pooled_first, expected, rtol=0.1)


def test_a_weight_counts_once() -> None:
    """There: a weight of 0.5 went into both tables and acted as 0.25."""
    bags = fill_(EmbeddingBag(60, 8, QR(4, operation="mult"), mode="sum"))
    ids, half = torch.tensor([[3, 58]]), torch.full((1, 2), 0.5)
    torch.testing.assert_close(bags(ids, per_sample_weights=half), bags(ids) / 2)


def test_sums_are_taken_before_the_maximum() -> None:
    """There: max(a) + max(b) for max(a + b)."""
    bags = fill_(EmbeddingBag(60, 8, QR(4, operation="add"), mode="max"))
    ids = torch.tensor([[3, 58, 21]])
    torch.testing.assert_close(bags(ids), F.embedding_bag(ids, bags.to_dense(), mode="max"))
    apart = sum(
        F.embedding_bag(index, table, mode="max")
        for index, table in zip((ids % 15, ids // 15), bags.tables(), strict=True)
    )
    assert not torch.allclose(apart, bags(ids))


@pytest.mark.parametrize("large", ["remainder", "quotient"])
def test_quotients_are_integers(large: str) -> None:
    """There: the quotient went through float32, wrong from id 16,777,219 on; the last of 40M ids raised."""
    n, collisions = 40_000_000, 8000
    table = fill_(Embedding(n, 2, QR(collisions, large=large)))
    m = collisions if large == "quotient" else n // collisions
    remainder, quotient = table.tables()
    ids = [*range(16_777_210, 16_777_230), *range(m * 3500 - 3, m * 3500 + 3), n - 2, n - 1]
    for i, vector in zip(ids, table(torch.tensor(ids)), strict=True):
        assert torch.equal(vector, remainder[i % m] * quotient[i // m])


@pytest.mark.parametrize("operation", ["add", "mult"])
def test_the_start_is_that_of_the_full_table(operation: str) -> None:
    """There: U(sqrt(1/n), 1) for both factors, since only the lower bound was set (dlrm#326)."""
    torch.manual_seed(0)
    n = 10_000_000
    table = Embedding(n, 16, QR(1000, operation=operation))
    bound = math.sqrt(1 / n)
    sample = torch.randint(n, (100_000,))
    vectors = table(sample).detach()
    assert vectors.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert abs(vectors.mean().item()) < 0.02 * bound
    assert vectors.abs().max().item() <= 1.02 * bound


def test_concatenation_with_small_tables_left_full() -> None:
    """There: tables under the threshold stayed D wide beside tables of 2 D, and the model crashed."""
    tables = [Table("large", 1000, 16, QR(4, operation="concat")), Table("small", 20, 16, Full())]
    with pytest.warns(UserWarning, match="1 of 3 tables stay full: tiny"):
        model = EmbeddingCollection([*tables, Table("tiny", 1, 16, QR(4, operation="concat"))])
    assert model(torch.tensor([[999, 19, 0], [0, 0, 0]])).shape == (2, 3, 16)


class CountOps(TorchDispatchMode):
    """Counts every operator that reaches a backend: on a GPU, the launches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.parametrize("scheme", [QR(4), QR(4, operation="concat"), Path(4, (4,))], ids=["mult", "concat", "path"])
def test_a_batch_takes_as_many_launches_for_fifty_tables_as_for_two(scheme: object, jagged: bool) -> None:
    """There: a Python loop over the tables, 26 to 52 launches a batch."""
    counts = []
    for features in (2, 50):
        model = EmbeddingCollection([Table(f"t{f}", 200 + f, 4, scheme) for f in range(features)])
        ids = torch.arange(8 * features).view(8, features) % 200
        arguments = (ids.flatten(), torch.arange(8 * features + 1)) if jagged else (ids,)
        with CountOps() as counter:
            model(*arguments).sum().backward()
        counts.append(counter.count)
    assert counts[0] == counts[1]
