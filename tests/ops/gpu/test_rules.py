"""The fused rules, and rows brought up to date, against the truth."""

import pytest
import torch
from gpu_cases import CUDA, DEVICE, FREQUENCY, assert_close, batch, collection, gradient, jagged, no_ids, row_rule
from row_rules import copied

from quorem.ops import replay as truth_replay
from quorem.ops import rules as truth
from quorem.ops.layout import PITCH
from quorem.ops.rows import IdBatch
from quorem.ops.state import NODE_COLUMN

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.ops.gpu import places, replay, rules

pytestmark = [pytest.mark.kernels(device="gpu"), pytest.mark.usefixtures("nan_filled")]
RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam", "amsgrad")
CASES = [
    (rule, dtype, "", bags)
    for bags in (False, True)
    for rule, dtype in [
        ("sgd", torch.float32),
        ("adagrad", torch.float32),
        ("adagrad", torch.float64),
        ("rowwise_adagrad", torch.float32),
        ("adam", torch.float64),
        ("amsgrad", torch.float32),
        ("amsgrad in closed form", torch.float32),
        ("amsgrad", torch.float64),
    ]
]
FREQUENCY_CASES = [
    ("adagrad", torch.float64, "own ranked", False),
    ("adagrad", torch.float64, "pool", False),
    ("rowwise_adagrad", torch.float64, "pool ranked", True),
    ("amsgrad", torch.float64, "pool", False),
    ("sgd", torch.float64, "shared", False),
    ("adam", torch.float64, "shared", True),
]
if CUDA:  # fused row-wise Adagrad is for rows of one piece; tables of the other kinds have rows of several
    FREQUENCY_CASES = [
        (rule, torch.float64, names, bags)
        for names in FREQUENCY
        for rule in RULES
        for bags in (False, True)
        if rule != "rowwise_adagrad" or names.startswith("pool")
    ]


@pytest.mark.parametrize(("rule", "dtype", "names", "bags"), CASES + FREQUENCY_CASES)
def test_steps(rule: str, dtype: torch.dtype, names: str, bags: bool) -> None:
    """A few steps of a rule equal the truth's."""
    rule, *closed = rule.split(maxsplit=1)
    module = collection(4 if names else 3, dtype, names)
    layout, start = module.layout, module.stored.detach()
    assert rule != "rowwise_adagrad" or (layout.parts[..., PITCH] <= 1).all()
    fused, plain = start.clone(), start.clone()
    fused_rule = row_rule(rule, fused, lr=0.05)
    if closed:
        fused_rule.constants = fused_rule.constants._replace(settled=0.0)  # from the first step on
    plain_rule, lags = copied(fused_rule), fused_rule.entry.lags
    for step, b in enumerate((300, 40, 5, 7, 300, 300) if CUDA else (12, 4) if names else (9, 9, 9)):
        if step == 2 and lags:  # as if a plain step had come between
            for each in (fused_rule, plain_rule):
                truth_replay.advance_(each.lr * 2, each.state, each.constants)
        grad = gradient(module, b)
        ids = jagged(module, b, weighted=True, mean=True) if bags else IdBatch(batch(module, b))
        if lags:
            replay.catch_up_(ids, fused, layout, fused_rule)
            truth_replay.catch_up_(ids, plain, layout, plain_rule)
        rules.update_(grad, ids, fused, layout, fused_rule)
        truth.update_(grad, ids, plain, layout, plain_rule)
    if lags:  # the rows whose turn it was differ: bring all of them up to date
        truth_replay.rows_catch_up_(None, fused, fused_rule)
        truth_replay.rows_catch_up_(None, plain, plain_rule)
    assert_close(fused - start, plain - start, dtype, "change of stored", slack=20)
    for name, tensor, true in zip(fused_rule.state._fields, fused_rule.state, plain_rule.state, strict=True):
        if tensor is not None and tensor.is_floating_point() and tensor.numel():
            assert_close(tensor, true, dtype, name, slack=20)
        elif tensor is not None and not lags:
            assert torch.equal(tensor, true), name
    assert (places.claims_of(fused, 0).place == places.UNCLAIMED).all()


def test_of_many_reads_the_rows_that_lag_behind_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MANY_READS", 1)
    test_steps("amsgrad", torch.float64, "", bags=False)


def test_row_sums_are_left_to_the_truth_where_a_row_is_several() -> None:
    module = collection(16, names="qr cat")  # a table's row of 16 columns is two rows of ``stored``
    stored, ids = module.stored.detach().clone(), IdBatch(batch(module, 2))
    rule = row_rule("rowwise_adagrad", stored)
    assert rules.update_(gradient(module, 2), ids, stored, module.layout, rule) is NotImplemented


def test_nodes_are_those_of_the_moments() -> None:
    """Whoever took the steps: a plain one, after a lookup in inference mode, and a fused one."""
    module = collection(3)
    ids, stored = batch(module, 5), module.stored.detach().clone()
    rule = row_rule("amsgrad", stored)
    with torch.inference_mode():
        replay.catch_up_(IdBatch(ids), stored, module.layout, rule)
    truth_replay.advance_(rule.lr, rule.state, rule.constants)
    rules.update_(gradient(module, 5), IdBatch(ids), stored, module.layout, rule)
    moments, nodes = rule.state.moments[:2].split(NODE_COLUMN, 1)
    since = torch.arange(2, device=DEVICE)
    assert_close(nodes, truth_replay.nodes(moments, since, rule.constants, True), torch.float32, "nodes")


@pytest.mark.parametrize("name", RULES)
def test_a_step_without_ids_is_left_to_the_truth_and_counts(name: str) -> None:
    module = collection(4)
    stored = module.stored.detach().clone()
    rule = row_rule(name, stored)
    inputs = (gradient(module, 0), no_ids(module)[0], stored, module.layout, rule)
    assert rules.update_(*inputs) is NotImplemented
    truth.update_(*inputs)
    assert torch.equal(stored, module.stored) and int(rule.state.step) == 1
