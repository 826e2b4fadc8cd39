"""The steps a row missed: two nodes against the sum, the sum against Adam itself, and the windows that bound both."""

import pytest
import torch

from quorem.ops import replay
from quorem.ops.state import AdamConstants, AdamState

BETAS = [(0.9, 0.999), (0.8, 0.999), (0.5, 0.9), (0.95, 0.9999)]
NEVER_SETTLES = [((0.5, 0.9), False)]  # betas, and whether AMSGrad
ROUNDING = 2.0**-24  # of float32: what two nodes may err by


def rates(step: int) -> float:
    """Warms up, then drops: a schedule that moves within a window."""
    return 1e-3 * min(1.0, step / 300) * (0.5 if step % 74 > 37 else 1.0)


def state_after(steps: int, constants: AdamConstants, dtype: torch.dtype, amsgrad: bool) -> AdamState:
    """The history of so many steps; there are no rows."""
    lrs, moments = replay.empty_history(torch.device("cpu"), constants, dtype)
    none = torch.empty(0, 1)
    last, step = torch.empty(0, dtype=torch.int32), torch.tensor(0)
    state = AdamState(none, none, last, step, lrs, moments, none if amsgrad else None)
    for t in range(1, steps + 1):
        replay.advance_(torch.tensor(rates(t), dtype=torch.float64), state, constants)
    return state


def test_some_betas_never_settle_and_the_sum_is_the_rule():
    settled = {
        (betas, amsgrad): replay.adam_constants(*betas, 1e-8, torch.float32, amsgrad).settled
        for betas in BETAS
        for amsgrad in (True, False)
    }
    assert [case for case, step in settled.items() if step == replay.NEVER] == NEVER_SETTLES


@pytest.mark.parametrize(
    ("betas", "amsgrad"),
    [(betas, amsgrad) for betas in BETAS for amsgrad in (True, False) if (betas, amsgrad) not in NEVER_SETTLES],
)
def test_two_nodes_equal_the_sum_once_settled(betas, amsgrad):
    constants = replay.adam_constants(*betas, 1e-8, torch.float32, amsgrad)
    exact = replay.adam_constants(*betas, 1e-8, torch.float64, amsgrad)
    steps = int(constants.settled) + 400
    state = state_after(steps, constants, torch.float32, amsgrad)
    since = torch.arange(int(constants.settled), steps + 1)
    root = torch.logspace(-12, 2, 80, dtype=torch.float64).expand(len(since), 80)
    expected = replay.summed(root, since, state, exact)
    got = replay.closed(root, since, state, constants)
    assert ((got - expected).abs() <= ROUNDING * expected).all()
    assert (got[-1] == 0).all() and (expected[-1] == 0).all()  # nothing missed


@pytest.mark.parametrize("amsgrad", [True, False])
@pytest.mark.parametrize("since", [1, 2, 50, 900])
def test_the_sum_is_what_dense_adam_does_without_gradients(amsgrad, since):
    """One element with a gradient at its step ``since`` alone, in torch; the momentum then runs out."""
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.Adam([p], amsgrad=amsgrad)
    constants = replay.adam_constants(0.9, 0.999, 1e-8, torch.float64, amsgrad)
    history = state_after(0, constants, torch.float64, amsgrad)
    for step in range(1, since + 501):
        p.grad = torch.full_like(p, 3e-4 if step == since else 0.0)
        optimizer.param_groups[0]["lr"] = rates(step)
        optimizer.step()
        replay.advance_(torch.tensor(rates(step), dtype=torch.float64), history, constants)
        if step == since:
            at, state = p.detach().clone(), {k: v.clone() for k, v in optimizer.state[p].items()}
        elif step in (since + 1, since + 7, since + 500):
            root = state["max_exp_avg_sq" if amsgrad else "exp_avg_sq"].sqrt()[None]
            missed = state["exp_avg"] * replay.summed(root, torch.tensor([since]), history, constants)[0]
            torch.testing.assert_close(at - missed, p.detach(), rtol=0, atol=1e-15)
