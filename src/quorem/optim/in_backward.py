"""Updates within the backward pass."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_int
from ..modules.lookup import Tables
from ..modules.storage import is_sharded
from ..ops.in_backward import Collector, Step
from ..ops.state import DeviceScalar
from .row_optimizer import RowOptimizer


def apply_in_backward(
    module: nn.Module,
    optimizer_class: type[RowOptimizer],
    *,
    clip_value: float | None = None,
    loss_scale: float | Tensor | None = None,
    rounding_seed: int | None = 0,
    state_from: torch.optim.Optimizer | None = None,
    **options: Any,
) -> RowOptimizer:
    """Update the tables in ``module`` within each backward pass, so that no gradient of theirs is ever stored.

    Each backward pass is one step, taken as the pass ends, with the gradients of all lookups in it; ``stored.grad``
    stays None. Other parameters, the networks of path-based tables among them, keep their gradients for an optimizer
    of their own. Under ``torch.compile`` the lookup runs outside the compiled graph. Under
    ``DistributedDataParallel`` replicas gather the gradients of the rows they read, and take the same step.

    Args:
        module: an ``Embedding``, ``EmbeddingBag``, ``EmbeddingCollection``, or a model that contains some.
        optimizer_class: one of ``quorem.optim``.
        clip_value: clamp each element of the summed gradient to ``[-clip_value, clip_value]``.
        loss_scale: the factor that the loss was multiplied by, number or tensor: gradients are divided by it, and a
            gradient of a row that is not finite counts as zero. ``optimizer.loss_scale`` changes it later.
        rounding_seed: seed of the stochastic rounding of tables in half precision and of state in few bits, by which
            small updates are not lost on average; None rounds rows to the nearest, and is refused for such a state.
        state_from: the optimizer that has trained the tables so far, of the same rule: it hands over their state, and
            no longer holds them.
        options: options of the optimizer, such as ``lr``.

    Returns:
        The optimizer: use it for ``lr`` and learning-rate schedulers, ``state_dict``, ``load_state_dict``, ``flush``
        and ``remove``. Its ``step`` does nothing for these tables.

    Raises:
        TypeError: if ``module`` is not a module, or ``optimizer_class`` is not a class of ``quorem.optim``.
        ValueError: if there are no tables, or they are frozen, sharded, quantized or updated already, ``state_from``
            has another rule, or an option is not supported.

    >>> from quorem import QR, Embedding
    >>> from quorem.optim import Adagrad
    >>> table = Embedding(1000, 16, QR(num_collisions=4))
    >>> optimizer = apply_in_backward(table, Adagrad, lr=0.1)
    >>> before = table(torch.tensor([7]))
    >>> before.sum().backward()
    >>> table.stored.grad is None, torch.equal(table(torch.tensor([7])), before)
    (True, False)
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, RowOptimizer)):
        raise TypeError(f"optimizer_class ({optimizer_class!r}) must be a class of quorem.optim")
    if not isinstance(module, nn.Module):
        raise TypeError(f"module ({type(module).__name__}) must be an nn.Module: its tables are found by themselves")
    if rounding_seed is not None:
        check_int("rounding_seed", rounding_seed, -(2**63))
    if clip_value is not None and not clip_value > 0:
        raise ValueError(f"clip_value ({clip_value}) must be positive")
    if isinstance(loss_scale, Tensor) and loss_scale.numel() != 1:
        raise ValueError(f"loss_scale has shape {tuple(loss_scale.shape)} but must have one element")
    if loss_scale is not None and not isinstance(loss_scale, Tensor) and not 0 < loss_scale < math.inf:
        raise ValueError(f"loss_scale ({loss_scale}) must be positive and finite")
    tables = {m.stored: m for m in module.modules() if isinstance(m, Tables)}
    if not tables:
        raise ValueError(f"module ({type(module).__name__}) must contain a quorem table")
    for stored, owner in tables.items():
        if owner.updates.collector is not None:
            raise ValueError("module has a table that is updated in backward already: remove() that optimizer first")
        if is_sharded(stored):
            raise ValueError("module has a table that is sharded by fully_shard: use the optimizer's step() for it")
        if owner.bits:
            raise ValueError(f"module has a table of {owner.bits} bits: quantize_ is for serving, after training")
        if not stored.requires_grad:
            raise ValueError("module has a table that is frozen: its parameter stored must require a gradient")
    optimizer = optimizer_class(list(tables), **options)
    if state_from is not None:
        _take_state_(optimizer, state_from)
    optimizer.clip_value, optimizer.loss_scale, optimizer.rounding_seed = clip_value, loss_scale, rounding_seed
    for stored, owner in tables.items():
        optimizer._row_rule(optimizer.param_groups[0], stored)
        next_step = partial(_next_step, optimizer, stored, DeviceScalar(stored.device))
        owner.updates.collector = Collector(stored, next_step)
    return optimizer


def _take_state_(optimizer: RowOptimizer, other: torch.optim.Optimizer) -> None:
    """Move the parameters of ``optimizer``, with their state, out of the ``other`` one."""
    kinds, rule = (type(optimizer), type(optimizer).torch_class), type(optimizer).rule
    if type(other) not in kinds or any(g.get("amsgrad", False) != (rule == "amsgrad") for g in other.param_groups):
        name = type(other).__name__
        raise ValueError(f"state_from ({name}) must be one of {type(optimizer).__name__}'s rule, whose state it has")
    moved = {p for group in optimizer.param_groups for p in group["params"]}
    if isinstance(other, RowOptimizer):
        other.flush()
        for p in moved:
            other._row_rules.pop(p, None)
            other._updates.pop(p, None)
    for p in moved:
        p.grad = None  # of a step that was taken
        if p in other.state:
            optimizer.state[p] = other.state.pop(p)
    for group in other.param_groups:
        group["params"][:] = [p for p in group["params"] if p not in moved]


def _next_step(optimizer: RowOptimizer, stored: Tensor, scale: DeviceScalar) -> Step:
    loss_scale = None if optimizer.loss_scale is None else scale.set(optimizer.loss_scale)
    group = optimizer.param_groups[0]
    optimizer._opt_called = True  # type: ignore[attr-defined]  # so that schedulers know that a step was taken
    row_rule = optimizer._row_rule(group, stored)
    return Step(row_rule, optimizer.clip_value, loss_scale, group.get("maximize", False))
