"""``torch.optim``'s optimizers as rules of ``ops.rules``, for parameters with dense gradients."""

from typing import Any

import torch
from torch import Tensor

from ..ops.state import AdagradConstants, Constants, LazyAdamConstants, SGDConstants

RULE_OF_CLASS: dict[type, str] = {torch.optim.SGD: "sgd", torch.optim.Adagrad: "adagrad", torch.optim.Adam: "adam"}
UNSUPPORTED = ("weight_decay", "momentum", "maximize", "decoupled_weight_decay", "differentiable")


def rule_of(torch_class: type, group: dict[str, Any]) -> tuple[str, Constants, tuple[str, ...]]:
    """The rule of a parameter group, its constants, and the names of its averages.

    The group must not use one of the ``UNSUPPORTED`` options.

    >>> rule_of(torch.optim.Adagrad, {"lr_decay": 0, "eps": 1e-10})
    ('adagrad', AdagradConstants(lr_decay=0.0, eps=1e-10), ('sum',))
    """
    rule = RULE_OF_CLASS[torch_class]
    if rule == "sgd":
        return rule, SGDConstants(), ()
    if rule == "adagrad":
        return rule, AdagradConstants(float(group["lr_decay"]), float(group["eps"])), ("sum",)
    averages: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    if group["amsgrad"]:
        rule, averages = "amsgrad", (*averages, "max_exp_avg_sq")
    beta1, beta2 = group["betas"]
    return rule, LazyAdamConstants(float(beta1), float(beta2), float(group["eps"])), averages


def initial_state(defaults: dict[str, Any], p: Tensor, averages: tuple[str, ...]) -> dict[str, Tensor]:
    """The state that torch gives a parameter before its first step, from the defaults of its optimizer."""
    if not averages:
        return {}
    start = defaults.get("initial_accumulator_value", 0.0)
    return {"step": torch.zeros((), device=p.device), **{name: torch.full_like(p, start) for name in averages}}
