"""The optimizers equal ``torch.optim`` on dense gradients: step, apply_in_backward and oracle side by side."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from optimizers import CLASSES, LAGGING, NAMES, RATES, UNIT, batches, collection, loss_of, oracle, run, same, twin, use
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import quorem
from quorem import optim
from quorem.ops import replay
from quorem.optim import row_optimizer

STEPS = 500


@pytest.fixture(params=["plain", "fused"], autouse=True)
def backend(request, monkeypatch):
    use(request.param, monkeypatch)


def schedule(step: int) -> float:
    """Warm up in every step, then halve every 150."""
    return min(1.0, (step + 1) / 40) * 0.5 ** (step // 150)


def race(*runs: tuple[nn.Module, torch.optim.Optimizer]):
    """Train each module by its optimizer on the same batches; yields the step and its ids."""
    schedulers = [LambdaLR(optimizer, schedule) for _, optimizer in runs]
    for step, (ids, target) in enumerate(batches(STEPS)):
        for (module, optimizer), scheduler in zip(runs, schedulers, strict=True):
            optimizer.zero_grad()
            loss_of(module, ids, target).backward()
            optimizer.step()
            scheduler.step()
        yield step, ids


@pytest.mark.parametrize("name", NAMES)
def test_float64_equals_the_dense_oracle_for_500_steps(name):
    by_step, in_backward, dense = collection(), twin(collection()), twin(collection())
    lr = RATES[name]
    steps = race(
        (by_step, CLASSES[name](by_step.parameters(), lr=lr)),
        (in_backward, optim.apply_in_backward(in_backward, CLASSES[name], lr=lr)),
        (dense, oracle(name, dense, lr)),
    )
    for step, ids in steps:
        assert in_backward.stored.grad is None
        if step % 60 == 59:  # an eval read, of ids that may have been cold for long
            read = ids.flip(0) if step % 120 == 59 else (ids * 7) % 40
            with torch.no_grad():
                for module in (by_step, in_backward):
                    torch.testing.assert_close(module.eval()(read), dense(read), rtol=0, atol=1e-10)
                    module.train()
    for module in (by_step, in_backward):
        same(module, dense, 1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_float32_stays_within_the_derived_bound_of_the_float64_oracle(name):
    """docs/appendix/optimizers.md derives the bound: T u (|w| + L + 80 lr) exp(2 L), L the length of its path."""
    module, exact, rounded = collection(torch.float32), twin(collection()), twin(collection(), torch.float32)
    lr = RATES[name]
    optimizer = CLASSES[name](module.parameters(), lr=lr)
    now = exact.stored.detach().clone()
    length, largest = torch.zeros_like(now), now.abs()
    for _ in race((module, optimizer), (exact, oracle(name, exact, lr)), (rounded, oracle(name, rounded, lr))):
        before, now = now, exact.stored.detach().clone()
        length += (now - before).abs()
        largest = torch.maximum(largest, now.abs())
    bound = STEPS * UNIT * (largest + length + 80 * lr) * torch.exp(2 * length.max())
    assert length.max() < 0.5 and bound.max() < 5e-4
    optimizer.flush()
    error, of_torch = ((m.stored.double() - exact.stored).abs().detach() for m in (module, rounded))
    assert (error <= bound).all()
    assert error.max() <= 2 * of_torch.max()


@pytest.mark.parametrize("name", LAGGING)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_are_swept_before_their_history_is_overwritten(name, dtype, monkeypatch):
    monkeypatch.setattr(replay, "HISTORY", 64)
    module = collection(dtype)
    dense = twin(module)
    options = {"lr": 0.01, "betas": (0.5, 0.9)}
    ours = CLASSES[name](module.parameters(), **options)
    theirs = oracle(name, dense, 0.01)
    theirs.param_groups[0]["betas"] = (0.5, 0.9)
    run(module, ours, 400)
    run(dense, theirs, 400)
    assert len(ours._row_rules[module.stored].state.lrs) < 300  # the highest ids were idle for longer
    module.state_dict()
    tolerance = 1e-10 if dtype == torch.float64 else 400 * UNIT * 20
    torch.testing.assert_close(module.stored.double(), dense.stored, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", LAGGING)
def test_steps_are_replayed_at_the_rate_and_constants_they_were_taken_with(name):
    module = collection()
    dense = twin(module)
    ours, theirs = CLASSES[name](module.parameters(), lr=0.01), oracle(name, dense, 0.01)
    for m, optimizer in ((module, ours), (dense, theirs)):
        for seed in range(30):
            group = optimizer.param_groups[0]
            group |= {"lr": group["lr"] * 0.8, "betas": (0.8, 0.99) if seed > 9 else group["betas"]}
            group["eps"] = 1e-3 if seed > 19 else group["eps"]
            run(m, optimizer, 2, seed)
    same(module, dense)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name):
    by_step, in_backward, dense = (m.cuda() for m in (collection(), twin(collection()), twin(collection())))
    lr = RATES[name]
    ours = CLASSES[name](by_step.parameters(), lr=lr)
    optim.apply_in_backward(in_backward, CLASSES[name], lr=lr)
    theirs = oracle(name, dense, lr)
    for ids, target in batches(60):
        ids, target = ids.cuda(), target.cuda()
        for m in (by_step, in_backward, dense):
            m.zero_grad()
            loss_of(m, ids, target).backward()
        ours.step()
        theirs.step()
    for module in (by_step, in_backward):
        same(module, dense, 1e-10)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(NAMES), st.lists(st.lists(st.integers(0, 6), max_size=12), min_size=1, max_size=8))
def test_repeated_rows_are_summed_first(name, rounds):
    """Each round is a step: rows repeated, absent, or none at all."""
    module = quorem.Embedding(7, 2, quorem.Full(), sparse=True, dtype=torch.float64)
    dense = twin(module)
    ours, theirs = CLASSES[name](module.parameters(), lr=0.1), oracle(name, dense, 0.1)
    for ids in rounds:
        for m, optimizer in ((module, ours), (dense, theirs)):
            optimizer.zero_grad()
            out = m(torch.tensor(ids, dtype=torch.int64))
            (out * torch.arange(1.0, 1 + out.numel()).view_as(out)).sum().backward()
            optimizer.step()
    ours.flush()
    torch.testing.assert_close(module.stored, dense.stored, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_bfloat16_tables_are_float32_rounded_once_a_step(name, monkeypatch):
    monkeypatch.setattr(row_optimizer, "SEED", None)  # to the nearest
    module = collection(torch.bfloat16)
    dense = twin(module, torch.float32)
    ours = optim.apply_in_backward(module, CLASSES[name], lr=0.01)
    theirs = oracle(name, dense, 0.01)
    for ids, target in batches(50):
        whole = target.round()  # so that the sums of a row's gradients are exact in any order
        theirs.zero_grad()
        loss_of(module, ids, whole).backward()
        loss_of(dense, ids, whole).backward()
        theirs.step()
        with torch.no_grad():
            dense.stored.copy_(dense.stored.bfloat16())
    assert all(v.dtype == torch.float32 for k, v in ours.state[module.stored].items() if k != "step")
    torch.testing.assert_close(module.stored.float(), dense.stored, rtol=2.0**-8, atol=0)


def test_betas_of_amsgrad_need_no_order():
    module = collection()
    dense = twin(module)
    options = {"lr": 0.01, "betas": (0.95, 0.85)}
    run(module, optim.AMSGrad(module.parameters(), **options), 60)
    run(dense, torch.optim.Adam(dense.parameters(), amsgrad=True, **options), 60)
    same(module, dense)
