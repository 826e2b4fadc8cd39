"""An optimizer's step on several parameters with dense gradients in one launch; ``torch.optim`` is the plain version.

Each parameter has a counter, float32 ``[2]``: the number of steps, and how many programs of a launch have read it. The
last program to read it adds the step, so no program reads the number of the next step, and a CUDA graph can advance it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..ops.gpu.constants import on_device
from ..ops.gpu.launch import cdiv, launch
from ..ops.gpu.rules import move, pace
from ..ops.state import Constants

MOST = 8  # the most parameters of a launch
BLOCK = 512  # elements that a program takes at a time, 16 bytes a thread
PROGRAMS = 2048  # the most programs of a parameter, about as many as a large GPU runs at once


class StepInput(NamedTuple):
    """The arguments for one parameter of a launch; averages that the rule does not have are None."""

    parameter: Tensor
    grad: Tensor
    average0: Tensor | None
    average1: Tensor | None
    average2: Tensor | None
    counter: Tensor | None
    size: int  # number of elements


@triton.jit
def programs_of(n, T: tl.constexpr, PROGRAMS: tl.constexpr):
    """``programs`` on the host."""
    return tl.maximum(tl.minimum(tl.cdiv(n.to(tl.int64), T), PROGRAMS), 1)


@triton.jit
def step_on_blocks(
    lr, constants, parameters, grads, averages0, averages1, averages2, counters, sizes,
    COUNT: tl.constexpr, RULE: tl.constexpr, T: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Apply the rule to this program's blocks of one parameter."""
    block = tl.program_id(0).to(tl.int64)
    parameter, grad, counter = parameters[0], grads[0], counters[0]
    state0, state1, state2 = averages0[0], averages1[0], averages2[0]
    n, programs = sizes[0].to(tl.int64), programs_of(sizes[0], T, PROGRAMS)
    for j in tl.static_range(1, COUNT):
        later = block >= programs  # of the parameter chosen so far
        parameter, grad = tl.where(later, parameters[j], parameter), tl.where(later, grads[j], grad)
        if RULE != "sgd":
            state0, counter = tl.where(later, averages0[j], state0), tl.where(later, counters[j], counter)
        if RULE == "adam" or RULE == "amsgrad":
            state1 = tl.where(later, averages1[j], state1)
        if RULE == "amsgrad":
            state2 = tl.where(later, averages2[j], state2)
        block = tl.where(later, block - programs, block)
        n = tl.where(later, sizes[j].to(tl.int64), n)
        programs = tl.where(later, programs_of(sizes[j], T, PROGRAMS), programs)
    t = tl.full((), 1, tl.int64)
    if RULE != "sgd":
        t += tl.load(counter).to(tl.int64)
    rate, root = pace(lr, t, constants, RULE)
    for start in range(block * T, n, programs * T):
        elements = start + tl.arange(0, T)
        if start + T <= n:  # known to be whole, it is read in vectors
            mask = tl.full((T,), True, tl.int1)
            g = tl.load(grad + elements)
            move(parameter, state0, state1, state2, elements, mask, g, rate, root, constants, RULE, tl.float32)
        else:
            mask = elements < n
            g = tl.load(grad + elements, mask=mask, other=0)
            move(parameter, state0, state1, state2, elements, mask, g, rate, root, constants, RULE, tl.float32)
    if RULE != "sgd":
        tl.debug_barrier()  # every thread has read the counter
        if tl.atomic_add(counter + 1, 1.0) == programs - 1:
            tl.store(counter, t.to(tl.float32))
            tl.store(counter + 1, 0.0)


@triton.jit(do_not_specialize=["n0", "n1", "n2", "n3"])
def four_kernel(
    lr, constants,
    p0, g0, a0, b0, c0, s0, n0, p1, g1, a1, b1, c1, s1, n1,
    p2, g2, a2, b2, c2, s2, n2, p3, g3, a3, b3, c3, s3, n3,
    COUNT: tl.constexpr, RULE: tl.constexpr, T: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Up to four parameters: arguments cost the host time."""
    step_on_blocks(
        lr, constants, (p0, p1, p2, p3), (g0, g1, g2, g3), (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3),
        (s0, s1, s2, s3), (n0, n1, n2, n3), COUNT, RULE, T, PROGRAMS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7"])
def eight_kernel(
    lr, constants,
    p0, g0, a0, b0, c0, s0, n0, p1, g1, a1, b1, c1, s1, n1,
    p2, g2, a2, b2, c2, s2, n2, p3, g3, a3, b3, c3, s3, n3,
    p4, g4, a4, b4, c4, s4, n4, p5, g5, a5, b5, c5, s5, n5,
    p6, g6, a6, b6, c6, s6, n6, p7, g7, a7, b7, c7, s7, n7,
    COUNT: tl.constexpr, RULE: tl.constexpr, T: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Up to eight parameters."""
    step_on_blocks(
        lr, constants, (p0, p1, p2, p3, p4, p5, p6, p7), (g0, g1, g2, g3, g4, g5, g6, g7),
        (a0, a1, a2, a3, a4, a5, a6, a7), (b0, b1, b2, b3, b4, b5, b6, b7), (c0, c1, c2, c3, c4, c5, c6, c7),
        (s0, s1, s2, s3, s4, s5, s6, s7), (n0, n1, n2, n3, n4, n5, n6, n7), COUNT, RULE, T, PROGRAMS,
    )  # fmt: skip


def programs(size: int) -> int:
    """Number of programs for a parameter of ``size`` elements; at least one, to count the step."""
    return max(min(cdiv(size, BLOCK), PROGRAMS), 1)


def foreach_update_(inputs: Sequence[StepInput], lr: Tensor, constants: Constants, rule: str) -> None:
    """Take a step of ``rule`` on each parameter, and advance its counter. All are on the device of ``lr``.

    Args:
        inputs: the parameters; ``foreach.takes`` is true for their tensors.
        lr: learning rate, a float64 scalar.
        constants: constants of the rule.
        rule: ``"sgd"``, ``"adagrad"``, ``"adam"`` or ``"amsgrad"``.
    """
    rule_constants = on_device(constants, lr.device)
    for first in range(0, len(inputs), MOST):
        some = inputs[first : first + MOST]
        few = 2 * len(some) <= MOST
        missing = (None, None, None, None, None, None, 0) * (MOST // (1 + few) - len(some))
        launch(
            four_kernel if few else eight_kernel, (sum(programs(each.size) for each in some),),
            lr, rule_constants, *(argument for each in some for argument in each), *missing,
            COUNT=len(some), RULE=rule, T=BLOCK, PROGRAMS=PROGRAMS, num_warps=4,
        )  # fmt: skip
