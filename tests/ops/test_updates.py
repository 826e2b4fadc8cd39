"""What optimizers have to do with the rows of a module: who owns it, who shares it, and what a copy gets."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from optimizers import CLASSES, RATES, SIZES, batches, collection, loss_of, oracle, run, twin, use
from torch.func import functional_call

import quorem
from quorem import optim
from quorem.ops.lagging import updates_of


@pytest.fixture(autouse=True, params=["plain", "fused"])
def backend(request, monkeypatch):
    use(request.param, monkeypatch)


def lagging(name: str, way: str, dtype: torch.dtype = torch.float64):
    """A module whose rows lag behind."""
    module = collection(dtype, sparse=way == "sparse")
    if way == "sparse":
        optimizer = CLASSES[name](module.parameters(), lr=0.01)
        run(module, optimizer, 12)
    else:
        optimizer = optim.apply_in_backward(module, CLASSES[name], lr=0.01)
        for ids, target in batches(12):
            loss_of(module, ids, target).backward()
    state = module.updates.lagging.state
    assert ((state.last > 0) & (state.last < state.step)).any()
    return module, optimizer


def tables_at(module: quorem.EmbeddingCollection, ids: torch.Tensor) -> torch.Tensor:
    """What a lookup gives, by whole tables."""
    return torch.stack([dense[ids[:, f]] for f, dense in enumerate(module.to_dense().values())], 1)


@pytest.mark.parametrize("way", ["sparse", "in backward"])
@pytest.mark.parametrize("name", ["Adam", "AMSGrad"])
def test_threads_that_read_move_each_row_once(name, way):
    """Four threads that start together read what one would, and leave the same table."""
    for seed in range(3):
        module, alone = lagging(name, way)[0], lagging(name, way)[0]
        draw = torch.Generator().manual_seed(seed)
        ids = torch.stack([torch.randint(0, n, (2000,), generator=draw) for n in SIZES], 1)
        barrier = threading.Barrier(4)

        @torch.no_grad()
        def read(i, module=module, ids=ids, barrier=barrier):
            barrier.wait()
            return module(ids) if i % 2 else tables_at(module, ids)

        with ThreadPoolExecutor(4) as pool, torch.no_grad():
            outputs, expected = list(pool.map(read, range(4))), alone(ids)
        assert all(torch.equal(out, expected) for out in outputs)
        alone.updates.flush_()
        assert torch.equal(module.stored, alone.stored)


@pytest.mark.parametrize("way", ["sparse", "in backward"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_thread_that_evaluates_does_not_disturb_one_that_trains(name, way):
    """Lookups, whole tables and copies, all the while; the oracle trains whole tables, alone."""
    module = collection(sparse=way == "sparse")
    dense = twin(module)
    kind, rate = CLASSES[name], RATES[name]
    ours = kind(module.parameters(), lr=rate) if way == "sparse" else optim.apply_in_backward(module, kind, lr=rate)
    theirs = oracle(name, dense, rate)
    done = threading.Event()

    @torch.no_grad()
    def evaluate(seed):
        draw = torch.Generator().manual_seed(seed)
        while not done.is_set():
            module(torch.stack([torch.randint(0, n, (50,), generator=draw) for n in SIZES], 1))
            module.to_dense() if seed else module.stored.detach().clone()

    with ThreadPoolExecutor(2) as pool:
        evaluations = [pool.submit(evaluate, seed) for seed in range(2)]
        try:
            run(module, ours, 40)
        finally:
            done.set()
    for evaluation in evaluations:
        evaluation.result()  # raises what the thread has raised
    run(dense, theirs, 40)
    torch.testing.assert_close(module.stored, dense.stored, rtol=0, atol=1e-10)


def test_a_copy_is_up_to_date_and_has_updates_of_its_own():
    module, _ = lagging("AMSGrad", "in backward")
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other.stored, module.stored)
        assert other.updates is not module.updates and other.updates is updates_of(other.stored)
        assert other.updates.lagging is None and other.updates.collector is None
    both = torch.nn.ModuleList([module, collection()])
    both[1].stored = module.stored
    one, two = copy.deepcopy(both)
    assert one.stored is two.stored and one.updates is two.updates is not module.updates


@pytest.mark.parametrize("name", ["Adam", "SGD"])
@pytest.mark.parametrize("tied", ["before", "after"])
def test_modules_that_share_their_rows_share_the_updates(name, tied):
    """Two modules with one parameter train as one dense one, whenever they were tied."""
    one, two, dense = collection(), collection(seed=5), twin(collection())
    if tied == "before":
        two.stored = one.stored
    optimizer = optim.apply_in_backward(one, CLASSES[name], lr=0.01)
    theirs = {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD}[name](dense.parameters(), lr=0.01)
    two.stored = one.stored
    for i, (ids, target) in enumerate(batches(12)):
        loss_of((one, two)[i % 2], ids, target).backward()
        theirs.zero_grad()
        loss_of(dense, ids, target).backward()
        theirs.step()
    for module in (one, two):
        with torch.no_grad():
            torch.testing.assert_close(module(ids), dense(ids), rtol=0, atol=1e-12)
    optimizer.remove()
    assert one.updates.collector is None and two.updates is one.updates


@pytest.mark.parametrize("way", ["sparse", "in backward"])
def test_a_parameter_that_is_swapped_out_and_back_keeps_its_updates(way):
    """As an average of the weights is swapped in to evaluate."""
    pairs = [lagging("Adam", way) for _ in range(2)]
    (module, optimizer), _ = pairs
    for m, _ in pairs:
        m.updates.flush_()  # as a swap does: where rows catch up in two pieces, the last bit differs
    stored, rule = module.stored, module.updates.lagging
    module.stored = torch.nn.Parameter(torch.zeros_like(stored))
    assert not module(next(batches(1))[0]).any() and module.updates.lagging is None
    module.stored = stored
    assert module.updates.lagging is rule
    for ids, target in batches(6, seed=3):
        for m, its in pairs:
            its.zero_grad()
            loss_of(m, ids, target).backward()
            its.step()
    (one, _), (two, _) = pairs
    assert torch.equal(one(ids), two(ids))
    optimizer.flush()
    two.updates.flush_()
    assert torch.equal(one.stored, two.stored)


@pytest.mark.parametrize("way", ["sparse", "in backward"])
def test_a_tensor_that_stands_in_is_read_as_it_is(way):
    module, _ = lagging("AMSGrad", way)
    values = torch.randn_like(module.stored)
    ids = next(batches(1))[0]
    other = collection(sparse=False)
    with torch.no_grad():
        other.stored.copy_(values)
    assert torch.equal(functional_call(module, {"stored": values}, (ids,)), other(ids))
    if way == "in backward":
        with pytest.raises(RuntimeError, match="functional_call has replaced a table that apply_in_backward updates"):
            functional_call(module, {"stored": values.requires_grad_()}, (ids,))
    else:
        functional_call(module, {"stored": values.requires_grad_()}, (ids,)).sum().backward()
        assert values.grad is not None
    module(ids)  # the module's own rows are what they were
    assert module.updates.stored is module.stored
