"""Updates within the backward pass."""

from typing import Any

import torch
from torch import nn

from ..modules.holders import exchange_
from ..modules.lookup import tables_in
from ..modules.storage import is_sharded
from ..ops.in_backward import Collector
from .row_optimizer import RowOptimizer


def apply_in_backward(
    module: nn.Module,
    optimizer_class: type[RowOptimizer],
    *,
    state_from: torch.optim.Optimizer | None = None,
    **options: Any,
) -> RowOptimizer:
    """Update the tables in ``module`` within each backward pass, so that no gradient of theirs is ever stored.

    Each backward pass is one step, taken as the pass ends, with the gradients of all lookups in it; ``stored.grad``
    stays None. Other parameters, the networks of path-based tables among them, keep their gradients for an optimizer
    of their own. Under ``torch.compile`` the lookup runs outside the compiled graph. Under
    ``DistributedDataParallel`` replicas gather the gradients of the rows they read, and take the same step. Scaled
    losses (``GradScaler``) and clipped gradients need ``step()``, without this function; under float16 autocast the
    backward pass raises RuntimeError.

    Args:
        module: an ``Embedding``, ``EmbeddingBag``, ``EmbeddingCollection``, or a model that contains some.
        optimizer_class: one of ``quorem.optim``.
        state_from: the optimizer that has trained the tables so far, of the same rule: it hands over their state, and
            no longer holds them.
        options: options of the optimizer, such as ``lr``.

    Returns:
        The optimizer: use it for learning-rate schedulers, ``state_dict``, ``load_state_dict``, ``flush`` and
        ``remove``. Its ``step`` does nothing for these tables.

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
    tables = {m.stored: m for m in tables_in(module)}
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
    for stored, owner in tables.items():
        optimizer._row_rule(optimizer.param_groups[0], stored)
        owner.updates.collect_in(Collector(stored, optimizer))
    return optimizer


def _take_state_(optimizer: RowOptimizer, other: torch.optim.Optimizer) -> None:
    """Move the parameters of ``optimizer``, with their state, out of the ``other`` one."""
    kinds, amsgrad = (type(optimizer), optimizer.torch_class), optimizer.entry.amsgrad
    if type(other) not in kinds or any(g.get("amsgrad", False) != amsgrad for g in other.param_groups):
        name = type(other).__name__
        raise ValueError(f"state_from ({name}) must be one of {type(optimizer).__name__}'s rule, whose state it has")
    moved = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.state.update(exchange_(other, dict.fromkeys(moved, ())))
    for p in moved:
        p.grad = None  # of a step that was taken
