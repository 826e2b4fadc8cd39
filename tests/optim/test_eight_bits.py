"""Rows trained in 8 bits: within one step of rounding of the same step in float32, unbiased, and resumable."""

import copy

import pytest
import torch
from varied import varied

from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, Full, HotCold, Path, Pool, Table, optim, quantize_
from quorem.ops.codes import dequantize, quantize

SCHEMES = [Full(), QR(4), QR(4, operation="concat"), HotCold(9, cold=Pool(60), num_rest=50), Path(4, (6,))]
OPTIMIZERS = [optim.SGD, optim.Adagrad, optim.RowWiseAdagrad, optim.LazyAdam, optim.LazyAMSGrad]
OFFSETS = torch.tensor([0, 5, 5, 31])


def pair(kind, scheme):
    """A module of 8 bits, and one of float32 with the same numbers; rows of an odd width have a byte of padding."""
    width = 7 if scheme != SCHEMES[2] else 8
    eight = quantize_(varied(kind(400, width, scheme, padding_idx=2)), 8)
    single = kind(400, width, scheme, padding_idx=2)
    with torch.no_grad():
        single.stored.copy_(dequantize(eight.stored, eight.width, 8))
        for target, source in zip(list(single.parameters())[1:], list(eight.parameters())[1:], strict=True):
            target.copy_(source)
    return eight, single


def scales(rows):
    """Bounds on the scales of ``rows``: the range over 254 codes, rounded up to float16."""
    span = rows.amax(1).clamp(min=0) - rows.amin(1).clamp(max=0)
    return (span / 254 * (1 + 2**-10)).clamp(min=2.0**-24) + 2.0**-24


def loss(module, ids, factors):
    if isinstance(module, EmbeddingBag):
        return (module(ids, OFFSETS) * factors[:4]).sum()
    return (module(ids) * factors).sum()


@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_step_is_that_of_float32_rounded_to_a_neighbour(scheme, optimizer, kind):
    eight, single = pair(kind, scheme)
    before, bytes_before = single.stored.detach().clone(), eight.stored.clone()
    ids, factors = torch.randint(0, 400, (60,)), torch.randn(60, 7 if scheme != SCHEMES[2] else 8)
    for module in (eight, single):
        optim.apply_in_backward(module, optimizer, lr=0.05)
        loss(module, ids, factors).backward()
    expected, rows = single.stored.detach(), dequantize(eight.stored, eight.width, 8)
    moved = (expected != before).any(1)
    assert 0 < moved.sum() < len(moved)
    assert ((rows - expected).abs() <= scales(expected)[:, None])[moved].all()
    assert torch.equal(eight.stored[~moved], bytes_before[~moved])
    assert eight.stored.grad is None and not eight.stored.requires_grad


def test_every_number_is_the_mean_of_what_it_is_rounded_to_also_at_the_ends_of_a_row():
    rows = torch.tensor(
        [[-1.0, 0.003, 0.7, 1.56], [0.2, 0.9, 0.1, 0.8], [-0.3, -0.2, -0.9, -0.05], [0.0, 0.0, 0.0, 1e-3]]
    )
    count = 20_000
    torch.manual_seed(0)
    many = rows.repeat_interleave(count, 0)
    rounded = dequantize(quantize(many, 8, torch.rand(many.shape)), 4, 8).view(4, count, 4).double()
    deviation = scales(rows)[:, None] / 2 / count**0.5
    assert ((rounded.mean(1) - rows).abs() <= 5 * deviation).all()
    assert ((rounded - rows[:, None]).abs() <= scales(rows)[:, None, None]).all()


def test_small_updates_arrive_in_the_mean():
    """Steps far below a code: rounded at random the mean is right, to the nearest it is not."""
    moved, rows = {}, 20_000
    for seed in (None, 5):
        table = Embedding(rows, 16, Full())
        with torch.no_grad():
            table.stored.copy_(torch.linspace(-1, 1, 16).expand(rows, 16))
        optim.apply_in_backward(quantize_(table), optim.SGD, lr=1e-4, rounding_seed=seed)
        before = table.to_dense()
        for _ in range(10):
            table(torch.arange(rows)).sum().backward()
        moved[seed] = float((before - table.to_dense()).double().mean())
    bound = 5 * 2 / 254 * (10 / 4 / before.numel()) ** 0.5
    assert abs(moved[5] - 10e-4) < bound < abs(moved[None] - 10e-4)


def test_resumed_and_moved_it_goes_on_with_the_same_bits():
    def steps(table, count):
        for _ in range(count):
            table(torch.arange(64)).sum().backward()

    def made(seed=4):
        torch.manual_seed(0)
        table = quantize_(Embedding(64, 16, QR(4, operation="add")))
        return table, optim.apply_in_backward(table, optim.Adagrad, lr=0.01, rounding_seed=seed)

    (whole, _), (first, optimizer), (second, other), (another, _) = made(), made(), made(), made(seed=5)
    steps(whole, 10)
    steps(another, 10)
    steps(first, 6)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(second, 4)
    assert torch.equal(whole.stored, second.stored) and not torch.equal(whole.stored, another.stored)


def test_tables_of_several_widths_and_a_pool_learn_as_in_float32():
    tables = [Table("a", 300, 16, QR(4)), Table("b", 90, 8, HotCold(5, cold=Pool(24), num_rest=30)), Table("c", 7, 8)]
    torch.manual_seed(0)
    single = EmbeddingCollection(tables)
    eight = quantize_(copy.deepcopy(single))
    optimizers = {module: optim.apply_in_backward(module, optim.Adagrad, lr=0.05) for module in (single, eight)}
    ids, targets = torch.stack([torch.randint(0, n, (64,)) for n in (300, 90, 7)], 1), torch.randn(64, 32)
    losses = {single: [], eight: []}
    for module in losses:
        for _ in range(40):
            error = (module(ids).flatten(1) - targets).square().mean()
            error.backward()
            losses[module].append(error.item())
    assert losses[single][-1] < 0.8 * losses[single][0]
    assert losses[eight][-1] == pytest.approx(losses[single][-1], rel=0.01)
    (sums, *_) = optimizers[eight].live_state()[eight.stored]
    assert sums.shape == (len(eight.stored), 8) and sums.dtype == torch.float32


@pytest.mark.parametrize("optimizer", [optim.Adam, optim.AMSGrad, optim.AdamW])
def test_optimizers_under_which_rows_lag_behind_are_refused(optimizer):
    with pytest.raises(ValueError, match=rf"rows of 8 bits must not lag behind, as they do under {optimizer.__name__}"):
        optim.apply_in_backward(quantize_(Embedding(9, 4, Full())), optimizer)


def test_other_errors():
    with pytest.raises(ValueError, match="rows of 8 bits must not lag behind, as they do under SGD"):
        optim.apply_in_backward(quantize_(Embedding(9, 4, Full())), optim.SGD, momentum=0.9)
    with pytest.raises(ValueError, match="module has a table of 4 bits: only tables of 8 bits, and float ones"):
        optim.apply_in_backward(quantize_(Embedding(9, 4, Full()), bits=4), optim.SGD)
    bags = quantize_(EmbeddingBag(9, 4, Full(), mode="sum"))
    optim.apply_in_backward(bags, optim.SGD)
    with pytest.raises(ValueError, match="per_sample_weights must not require a gradient if rows are"):
        bags(torch.tensor([1, 2]), torch.tensor([0]), torch.ones(2, requires_grad=True))
    out = bags(torch.tensor([1, 2]), torch.tensor([0]))
    bags(torch.tensor([1, 2]), torch.tensor([0])).sum().backward()
    with pytest.raises(RuntimeError, match="the tables changed between a lookup and its backward"):
        out.sum().backward()
