"""``score``, ``topk`` and ``cross_entropy`` against the full table, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quorem
from quorem import QR, ChineseRemainder, Custom, Embedding, Full, GeneralizedQR, Hash, HotCold, Path, Pool
from quorem.modules import scores
from quorem.paper.partitions import ExplicitPartition, Partition

N, D = 257, 12
COUNTS = torch.randperm(N, generator=torch.Generator().manual_seed(5))
SCHEMES = {
    "full": Full(),
    "hash": Hash(4),
    "qr add": QR(9, operation="add"),
    "qr add of a multiple": QR(257, operation="add", force=True),
    "qr concat": QR(6, operation="concat"),
    "qr mult": QR(5),
    "generalized": GeneralizedQR(3, operation="add"),
    "generalized concat": GeneralizedQR(3, operation="concat"),
    "chinese": ChineseRemainder(2, operation="add"),
    "chinese of three": ChineseRemainder(3, operation="add"),
    "custom": Custom((ExplicitPartition([i % 7 for i in range(N)]), Partition(7, 37)), operation="add"),
    "custom with a stride": Custom((Partition(7, 37),), check=False),
    "custom with ids alike": Custom((Partition(1, 4), Partition(4, 3)), operation="add", check=False),
    "path": Path(4, hidden=(8,)),
    "hot, qr": HotCold(20, cold=QR(5, operation="add")),
    "hot, qr, rest": HotCold(20, cold=QR(5, operation="add"), num_rest=60),
    "hot, mult": HotCold(20, cold=QR(5)),
    "hot, map, rest": HotCold(2, cold=Custom((ExplicitPartition([i * 2 % 155 for i in range(155)]),)), num_rest=100),
    "hot, pool": HotCold(20, cold=Pool(60)),
    "hot, pool, rest": HotCold(20, cold=Pool(60), num_rest=100),
    "pool of three": HotCold(20, cold=Pool(60, num_partitions=3)),
    "hot and rest only": HotCold(57, cold=Full(), num_rest=200),
    "narrow add": QR(9, operation="add", width=4),
    "narrow concat": QR(6, operation="concat", width=4),
    "narrow mult": QR(5, width=4),
    "narrow pool": HotCold(20, cold=Pool(60), num_rest=100, width=4),
    "narrow path": Path(4, hidden=(5,), width=4),
}


def made(name: str, *, pad: int | None = None, ranked: bool = False, dtype: torch.dtype = torch.float64) -> Embedding:
    scheme = SCHEMES[name]
    counts = COUNTS if ranked and isinstance(scheme, HotCold) else None
    torch.manual_seed(0)
    return Embedding(N, D, scheme, padding_idx=pad, frequencies=counts, dtype=dtype, init_std=1.0)


def queries_of(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, D, dtype=dtype, generator=torch.Generator().manual_seed(1))


def check_same_gradients(actual: Tensor, expected: Tensor, inputs: list[Tensor], weights: Tensor | None = None) -> None:
    ours, theirs = (torch.autograd.grad(out, inputs, weights, allow_unused=True) for out in (actual, expected))
    torch.testing.assert_close(ours, theirs)


def test_scores_of_some_ids():
    module, queries, ids = made("hot, pool, rest", ranked=True), queries_of(4), torch.tensor([[0, 7], [256, 7]])
    torch.testing.assert_close(module.score(queries, ids), module.score(queries)[:, ids])


def check_best(values: Tensor, ids: Tensor, scores: Tensor, k: int) -> None:
    """``values`` are the best k of ``scores``, and ``ids`` are different ids that have them."""
    torch.testing.assert_close(values, scores.topk(k).values)
    torch.testing.assert_close(scores.gather(-1, ids), values)
    assert all(len(set(row)) == k for row in ids.reshape(-1, k).tolist())


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("pad", [None, 0, 30, N - 1])
@pytest.mark.parametrize("name", SCHEMES)
def test_scores_and_the_best_are_those_of_the_table(name, pad, ranked):
    module, queries = made(name, pad=pad, ranked=ranked), queries_of(2, 3).requires_grad_()
    expected, actual = queries @ module.to_dense().T, module.score(queries)
    torch.testing.assert_close(actual, expected)
    check_same_gradients(actual, expected, [queries, *module.parameters()], torch.randn_like(expected))
    for k in (1, 10, 100, N):
        check_best(*module.topk(queries.detach(), k), expected.detach(), k)


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_topk_without_excluded_ids(name, ranked):
    module, queries = made(name, pad=3, ranked=ranked), queries_of(6)
    scores = (queries @ module.to_dense().T).detach()
    seen = torch.full((6, 25), -1)
    for b in range(6):
        seen[b, : 5 * b] = scores[b].topk(5 * b).indices
        scores[b, seen[b, : 5 * b]] = -torch.inf
    check_best(*module.topk(queries, 7, exclude=seen), scores, 7)
    check_best(*module.topk(queries.view(2, 3, -1), 7, exclude=seen.view(2, 3, -1)), scores.view(2, 3, -1), 7)


@pytest.mark.parametrize("name", ["qr add", "hot, pool", "qr mult"])
def test_no_queries(name):
    module, none = made(name), queries_of(0)
    assert module.score(none).shape == (0, N)
    values, ids = module.topk(none, 3, exclude=torch.zeros(0, 2, dtype=torch.int64))
    assert values.shape == ids.shape == (0, 3)
    assert float(quorem.cross_entropy(none, module, torch.zeros(0, dtype=torch.int64), reduction="sum")) == 0


@pytest.mark.parametrize("name", ["qr add", "hot, pool, rest", "qr mult", "full"])
def test_equal_scores(name):
    module = made(name)
    with torch.no_grad():
        module.stored.copy_(module.stored.sign())
    queries = torch.ones(1, D, dtype=torch.float64)
    scores = (queries @ module.to_dense().T).detach()
    for k in (5, 50, N):
        check_best(*module.topk(queries, k), scores, k)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["full", "qr add", "qr mult", "hot, pool, rest"])
def test_quantized_rows(name, bits):
    module, queries = made(name, ranked=True, dtype=torch.float32), queries_of(4, dtype=torch.float32)
    quorem.quantize_(module, bits)
    expected = queries @ module.to_dense().T
    torch.testing.assert_close(module.score(queries), expected)
    check_best(*module.topk(queries, 9), expected, 9)
    targets = torch.arange(4)
    torch.testing.assert_close(quorem.cross_entropy(queries, module, targets), F.cross_entropy(expected, targets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qr add", "qr concat", "hot, pool", "qr mult"])
def test_other_dtypes(name, dtype):
    module, queries = made(name, dtype=dtype), queries_of(4, dtype=dtype)
    exact = queries.double() @ module.to_dense().double().T
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    torch.testing.assert_close(module.score(queries).double(), exact, rtol=tolerance, atol=tolerance)
    values, ids = module.topk(queries, 9)
    assert values.dtype == dtype
    torch.testing.assert_close(exact.gather(1, ids), values.double(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(values.double(), exact.topk(9).values, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("block", [1024, 7])
@pytest.mark.parametrize("pad", [None, 0, 30, N - 1])
@pytest.mark.parametrize("name", SCHEMES)
def test_cross_entropy(name, pad, block, monkeypatch):
    monkeypatch.setattr(scores, "FEWEST_IDS", block)
    monkeypatch.setattr(scores, "BLOCK_NUMBERS", block)
    monkeypatch.setattr(scores, "CACHED_NUMBERS", block)
    module, queries = made(name, pad=pad, ranked=True), queries_of(2, 3).requires_grad_()
    targets = torch.tensor([[0, 30, N - 1], [-100, 5, 200]])
    expected = F.cross_entropy((queries @ module.to_dense().T).flatten(0, 1), targets.flatten())
    actual = quorem.cross_entropy(queries, module, targets)
    torch.testing.assert_close(actual, expected)
    check_same_gradients(actual, expected, [queries, *module.parameters()])


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_reductions(reduction):
    module, queries, targets = made("qr add"), queries_of(3), torch.tensor([4, 256, 9])
    expected = F.cross_entropy(queries @ module.to_dense().T, targets, reduction=reduction, ignore_index=9)
    actual = quorem.cross_entropy(queries, module, targets, reduction=reduction, ignore_index=9)
    torch.testing.assert_close(actual, expected)


def test_a_padding_vector_that_would_have_most_of_the_sum_is_left_out_exactly():
    module, queries = made("qr add", pad=30), queries_of(2)
    with torch.no_grad():
        module.stored[30 % 29] += 100 * queries[0] / queries[0].norm()
    targets = torch.tensor([1, 2])
    expected = F.cross_entropy(queries @ module.to_dense().T, targets)
    torch.testing.assert_close(quorem.cross_entropy(queries, module, targets), expected)


def test_sampled_negatives_sum_to_all_on_average():
    module, queries, targets = made("qr add"), queries_of(2) / 4, torch.tensor([4, 4])
    scores = (queries @ module.to_dense().T).detach()
    torch.manual_seed(3)
    sums = []
    for _ in range(400):
        loss = quorem.cross_entropy(queries, module, targets, num_negatives=50, reduction="none").detach()
        sums.append((loss + scores[:, 4]).exp())
    drawn, expected = torch.stack(sums), scores.exp().sum(1)
    error = drawn.std(0) / 20
    assert ((drawn.mean(0) - expected).abs() < 4 * error).all()
    assert (error / expected < 0.02).all()  # else the line above could not fail


@pytest.mark.parametrize("name", ["qr add", "hot, pool, rest", "qr mult"])
def test_a_step_in_the_backward_pass(name):
    module, twin = made(name), made(name)
    queries, targets = queries_of(3), torch.tensor([4, 256, 9])
    quorem.optim.apply_in_backward(module, quorem.optim.Adagrad, lr=0.1)
    optimizer = torch.optim.Adagrad(twin.parameters(), lr=0.1)
    for _ in range(3):
        quorem.cross_entropy(queries, module, targets).backward()
        optimizer.zero_grad()
        F.cross_entropy(queries @ twin.to_dense().T, targets).backward()
        optimizer.step()
    torch.testing.assert_close(module.stored, twin.stored)


def test_topk_looks_at_few_pairs_of_a_large_table(monkeypatch):
    monkeypatch.setattr(scores, "_best_of_blocks", None)  # would be called for blocks of ids
    module = Embedding(1_000_003, 16, QR(60, operation="add"), init_std=1.0)
    queries = torch.randn(3, 16)
    check_best(*module.topk(queries, 20), (queries @ module.weight.T).detach(), 20)
    module = Embedding(300_007, 16, HotCold(1000, cold=Pool(4000)), init_std=1.0)
    check_best(*module.topk(queries, 20), (queries @ module.weight.T).detach(), 20)


def test_export_of_topk_has_plain_operators():
    class Served(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = made("qr add", dtype=torch.float32)

        def forward(self, queries: Tensor) -> tuple[Tensor, Tensor]:
            return self.items.topk(queries, 5)

    model, queries = Served(), queries_of(2, dtype=torch.float32)
    program = torch.export.export(model, (queries,))
    assert "quorem" not in str(program.graph)
    for mine, theirs in zip(program.module()(queries), model(queries), strict=True):
        torch.testing.assert_close(mine, theirs)


NONE, TARGETS = torch.full((3, 1), -1), torch.arange(3)
loss = quorem.cross_entropy


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, q: m.topk(q, N + 1), ValueError, rf"k \({N + 1}\) must be at most {N}: exclude lists 0"),
        (lambda m, q: m.topk(q, 0), ValueError, r"k \(0\) must be"),
        (lambda m, q: m.topk(q, N, exclude=NONE), ValueError, rf"k \({N}\) must be at most {N - 1}: exclude lists 1"),
        (lambda m, q: m.topk(q, 1, exclude=NONE + N + 1), ValueError, rf"exclude holds id {N}, which must be in \[0"),
        (lambda m, q: m.topk(q, 1, exclude=NONE.float()), TypeError, r"exclude dtype \(torch.float32\) must be"),
        (lambda m, q: m.topk(q, 1, exclude=NONE[:1]), ValueError, r"exclude has shape \(1, 1\) but must have shape"),
        (lambda m, q: m.score(q.float()), TypeError, r"queries \(torch.float32\) must be torch.float64"),
        (lambda m, q: m.score(q[:, :5]), ValueError, r"queries has shape \(3, 5\) but must end with embedding_dim"),
        (lambda m, q: m.score(0), TypeError, r"queries \(int\) must be a Tensor"),
        (lambda m, q: loss(q, m, TARGETS + N - 2), IndexError, rf"targets holds {N}, which must be in \[0, {N}\)"),
        (lambda m, q: m.topk(q, 1, exclude=[[1]] * 3), TypeError, r"exclude \(list\) must be a Tensor"),
        (lambda m, q: loss(q, m, TARGETS.float()), TypeError, r"targets dtype \(torch.float32\) must be"),
        (lambda m, q: loss(q, m, TARGETS[:1]), ValueError, r"targets has shape \(1,\) but must"),
        (lambda m, q: loss(q, F, TARGETS), TypeError, r"embedding \(module\) must be"),
        (lambda m, q: loss(q, m, TARGETS, reduction="max"), ValueError, r"reduction \('max'\) must be one of"),
        (lambda m, q: loss(q, m, TARGETS, num_negatives=0), ValueError, r"num_negatives \(0\) must be"),
    ],
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(made("qr add"), queries_of(3))
