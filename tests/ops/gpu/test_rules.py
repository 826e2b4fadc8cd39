"""The fused rules, and rows brought up to date, against the truth."""

import pytest
import torch
from gpu_cases import CUDA, DEVICE, assert_close, batch, collection, copied, gradient, jagged, rule_state, scalar
from torch import Tensor

from quorem.ops import replay as truth_replay
from quorem.ops import rules as truth
from quorem.ops.rows import IdBatch
from quorem.ops.state import CATCHES_UP, NODE_COLUMN

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.ops.gpu import fast_launch, places, replay, rules

pytestmark = [pytest.mark.kernels(device="gpu"), pytest.mark.usefixtures("nan_filled")]
CASES = [
    ("sgd", torch.float32),
    ("adagrad", torch.float32),
    ("adagrad", torch.float64),
    ("rowwise_adagrad", torch.float32),
    ("adam", torch.float64),
    ("amsgrad", torch.float32),
    ("amsgrad in closed form", torch.float32),
    ("amsgrad", torch.float64),
]


@pytest.fixture(params=["fast", "public"])
def launching(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches through Triton's internals, and Triton's public ones."""
    monkeypatch.setattr(fast_launch, "enabled", lambda: request.param == "fast")


def check_steps(rule: str, dtype: torch.dtype, bags: bool) -> None:
    """A few steps of a rule, clipping and loss scaling among them, equal the truth's."""
    rule, *closed = rule.split(maxsplit=1)
    module = collection(3, dtype)  # rows of one piece
    layout, b, start = module.layout, 300 if CUDA else 9, module.stored.detach()
    fused, plain = start.clone(), start.clone()
    fused_state, constants = rule_state(rule, fused)
    if closed:
        constants = constants._replace(settled=0.0)  # from the first step on
    plain_state, lr, options = copied(fused_state), scalar(0.05), {"rule": rule, "constants": constants}
    more = {1: {"clip_value": 0.5}, 2: {"loss_scale": torch.tensor(2.0, device=DEVICE)}}
    for step in range(6 if CUDA else 3):
        if step == 2 and rule in CATCHES_UP:  # as if a plain step had come between
            for state in (fused_state, plain_state):
                truth_replay.advance_(lr * 2, state, constants)
        grad = gradient(module, b)
        ids = jagged(module, b, weighted=True, mean=True) if bags else IdBatch(batch(module, b))
        if rule in CATCHES_UP:
            replay.catch_up_(ids, fused, fused_state, layout, **options)
            truth_replay.catch_up_(ids, plain, plain_state, layout, **options)
        extra = more.get(step, {})
        rules.update_(grad, ids, fused, lr, fused_state, layout, **options, **extra)
        truth.update_(grad, ids, plain, lr, plain_state, layout, **options, **extra)
    if rule in CATCHES_UP:  # the rows whose turn it was differ: bring all of them up to date
        truth_replay.rows_catch_up_(None, fused, fused_state, **options)
        truth_replay.rows_catch_up_(None, plain, plain_state, **options)
    assert_close(fused - start, plain - start, dtype, "change of stored", slack=20)
    for name, tensor, true in zip(fused_state._fields, fused_state, plain_state, strict=True):
        if tensor is not None and tensor.is_floating_point() and tensor.numel():
            assert_close(tensor, true, dtype, name, slack=20)
        elif tensor is not None and rule not in CATCHES_UP:
            assert torch.equal(tensor, true), name
    assert (places.claims_of(fused, 0).place == places.UNCLAIMED).all()


@pytest.mark.parametrize("bags", [False, True], ids=["lookup", "bag"])
@pytest.mark.parametrize(("rule", "dtype"), CASES)
def test_steps(rule: str, dtype: torch.dtype, bags: bool) -> None:
    check_steps(rule, dtype, bags)


@pytest.mark.parametrize("rule", ["adagrad", "amsgrad"])
def test_steps_by_either_launch(rule: str, launching: None) -> None:
    check_steps(rule, torch.float32, bags=False)


def test_of_many_reads_the_rows_that_lag_behind_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MANY_READS", 1)
    check_steps("amsgrad", torch.float64, bags=False)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("bags", [False, True], ids=["lookup", "bag"])
def test_an_overflow_leaves_whole_rows_alone(bags: bool, value: float) -> None:
    module = collection(16, names="qr")
    stored, ids = module.stored.detach().clone(), torch.tensor([[3], [4]], device=DEVICE)
    grad = torch.ones(2, 1, 16, device=DEVICE)
    grad[0, 0, 1] = value  # of id 3 alone
    state, constants = rule_state("sgd", stored)
    options = {"rule": "sgd", "constants": constants, "loss_scale": torch.tensor(2.0, device=DEVICE)}
    before = {name: table.clone() for name, table in module.named_tables(stored)}
    read = IdBatch(ids.flatten(), torch.arange(3, device=DEVICE)) if bags else IdBatch(ids)
    rules.update_(grad, read, stored, scalar(0.1), state, module.layout, **options)
    changed = {name: table != before[name] for name, table in module.named_tables(stored)}
    assert stored.isfinite().all()
    assert not changed["tables.qr.0"][3].any() and changed["tables.qr.0"][4].all()
    assert not changed["tables.qr.1"][0].any()  # ids 3 and 4 share it: its sum has overflowed


@pytest.mark.parametrize(("rule", "scale"), [("rowwise_adagrad", {}), ("sgd", {"loss_scale": torch.tensor(2.0)})])
def test_rules_of_whole_rows_are_left_to_the_truth_where_a_row_is_several(rule: str, scale: dict[str, Tensor]) -> None:
    module = collection(16, names="qr cat")  # a table's row of 16 columns is two rows of ``stored``
    inputs = (gradient(module, 2), IdBatch(batch(module, 2)), module.stored.detach().clone(), scalar(0.1))
    state, constants = rule_state(rule, inputs[2])
    done = rules.update_(*inputs, state, module.layout, rule=rule, constants=constants, **scale)
    assert done is NotImplemented


def test_nodes_are_those_of_the_moments() -> None:
    """Whoever took the steps: a plain one, after a lookup in inference mode, and a fused one."""
    module = collection(3)
    ids, stored = batch(module, 5), module.stored.detach().clone()
    state, constants = rule_state("amsgrad", stored)
    options = {"rule": "amsgrad", "constants": constants}
    with torch.inference_mode():
        replay.catch_up_(IdBatch(ids), stored, state, module.layout, **options)
    truth_replay.advance_(scalar(0.1), state, constants)
    rules.update_(gradient(module, 5), IdBatch(ids), stored, scalar(0.1), state, module.layout, **options)
    moments, nodes = state.moments[:2].split(NODE_COLUMN, 1)
    since = torch.arange(2, device=DEVICE)
    assert_close(nodes, truth_replay.nodes(moments, since, constants, True), torch.float32, "nodes")


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "amsgrad"])
def test_a_step_without_ids_counts(rule: str) -> None:
    module = collection(4)
    stored = module.stored.detach().clone()
    state, constants = rule_state(rule, stored)
    none = torch.empty(0, len(module.specs), dtype=torch.int64, device=DEVICE)
    options = {"rule": rule, "constants": constants}
    rules.update_(gradient(module, 0), IdBatch(none), stored, scalar(0.1), state, module.layout, **options)
    assert torch.equal(stored, module.stored) and (rule == "sgd" or int(state.step) == 1)
