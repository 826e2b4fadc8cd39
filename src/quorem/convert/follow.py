"""Convert an optimizer's state from a full table to the stored rows.

The gradient of a row is the sum of the gradients of the ids that read it, times the other factors where rows are
multiplied. So the new average of gradients is the sum of the ids' averages times the factors, and the new average or
sum of squares is the sum of theirs times the squares of the factors. This is exact if no two ids of a row were in one
batch, and the fit of the table is exact.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..embeddings import Embedding
from ..ops.layout import MULT, OPERATION
from ..ops.rows import lookup_reads
from ..optim import AMSGrad, RowOptimizer, RowWiseAdagrad
from ..optimizer_names import Optimizer
from ..saved_paths import PathGroups

SQUARES = ("sum", "exp_avg_sq", "max_exp_avg_sq")
FIRST = ("exp_avg", "momentum_buffer")
BLOCK_NUMBERS = 2**20  # numbers of a state that are processed at a time
OPTIMIZER_OF_CLASS: dict[str, Optimizer] = {
    "SGD": "sgd",
    "Adagrad": "adagrad",
    "RowWiseAdagrad": "rowwise_adagrad",
    "Adam": "adam",
    "SparseAdam": "adam",
    "AMSGrad": "amsgrad",
    "AdamW": "adamw",
    "LazyAdam": "lazy_adam",
    "LazyAMSGrad": "lazy_amsgrad",
}


def optimizer_name(optimizer: torch.optim.Optimizer | Optimizer | None) -> Optimizer | None:
    """The planner's name for an optimizer.

    Raises:
        TypeError: if it is neither an optimizer nor a name.
        ValueError: if the state of its class is not known.
    """
    if optimizer is None or isinstance(optimizer, str):
        return optimizer  # checked by the planner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer ({type(optimizer).__name__}) must be an optimizer, its name, or None")
    kind = type(optimizer).__name__
    if kind not in OPTIMIZER_OF_CLASS:
        raise ValueError(f"optimizer ({kind}) must be one of {', '.join(OPTIMIZER_OF_CLASS)}, or be given by name")
    is_amsgrad = isinstance(optimizer, AMSGrad) or optimizer.defaults.get("amsgrad")
    if kind == "SGD" and any(group["momentum"] for group in optimizer.param_groups):
        return "momentum_sgd"
    if kind == "SGD" and any(group["weight_decay"] for group in optimizer.param_groups):
        return "decayed_sgd"
    return "amsgrad" if is_amsgrad and kind != "LazyAMSGrad" else OPTIMIZER_OF_CLASS[kind]


def follow_(optimizer: torch.optim.Optimizer, new: Mapping[Tensor, Embedding]) -> list[str]:
    """Replace the old parameters in an optimizer by the new ones, with their state; returns what was done."""
    done = []
    by_row = optimizer if isinstance(optimizer, RowOptimizer) else None
    if by_row is not None:
        by_row.flush()
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            if p not in new:
                continue
            module = new[p]
            state = optimizer.state.pop(p, {})
            group["params"][i] = module.stored
            group["params"] += module.paths.parameters() if isinstance(module.paths, PathGroups) else ()
            if by_row is not None:
                by_row._row_rules.pop(p, None)
                by_row._updates.pop(p, None)
            kept = {name: converted_state(name, value, p, module) for name, value in state.items()}
            if isinstance(optimizer, RowWiseAdagrad) and "sum" in kept and kept["sum"].dim() == 2:
                kept["sum"] = kept["sum"].mean(1)
            if kept:
                optimizer.state[module.stored] = kept
            done.append(f"the optimizer held a table {tuple(p.shape)}: given the stored rows, and its state for them")
    return done


def converted_state(name: str, value: Any, weight: Tensor, module: Embedding) -> Any:
    """One entry of a parameter's state, converted from the table ``weight`` to the stored rows of ``module``."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.shape == weight.shape[:1]:  # one number for each row
        value = value[:, None].expand(weight.shape)
    if value.shape != weight.shape or name not in (*SQUARES, *FIRST):
        raise ValueError(
            f"the optimizer's state {name!r} has shape {tuple(value.shape)}: there is no way to convert it"
        )
    power = 2 if name in SQUARES else 1
    stored, layout = module.stored.detach(), module.layout
    total = torch.zeros(stored.shape, dtype=torch.float32, device=stored.device)
    multiplied = (layout.slots[:, OPERATION] == MULT)[None, :, None, None]
    for ids in torch.arange(len(weight), device=stored.device).split(max(1, BLOCK_NUMBERS // weight.shape[1])):
        reads = lookup_reads(ids[:, None], layout)
        used = reads.valid[..., None] & reads.used  # [N, S, K]
        factors = torch.where(used[..., None] & multiplied, stored[reads.rows.clamp(min=0)].float(), 1)
        values = value[ids].float().view(len(ids), reads.rows.shape[1], 1, -1)
        for k in range(reads.rows.shape[2]):
            others = factors[:, :, [j for j in range(reads.rows.shape[2]) if j != k]].prod(2).pow(power)
            is_read = used[:, :, k]
            total.index_add_(0, reads.rows[:, :, k][is_read], (values[:, :, 0] * others)[is_read])
    return total.to(value.dtype)
