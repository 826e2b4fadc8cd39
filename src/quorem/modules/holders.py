"""Who else holds the parameters of a module that is about to be replaced: optimizers, and wrappers of the model."""

import gc
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch.distributed
from torch import Tensor, nn
from torch.optim import Adagrad
from torch.optim import Optimizer as TorchOptimizer


def unwrapped(optimizer: TorchOptimizer) -> TorchOptimizer:
    """The optimizer that has the parameter groups: an optimizer of accelerate, for one, holds another."""
    while "param_groups" not in vars(optimizer) and isinstance(getattr(optimizer, "optimizer", None), TorchOptimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer


def optimizers_of(parameters: Iterable[Tensor]) -> list[TorchOptimizer]:
    """The optimizers, wherever they are, that hold one of these parameters."""
    weights = {id(p): p for p in parameters}
    if all(type(each) in (dict, FrameType) for each in gc.get_referrers(*weights.values())):
        return []  # modules hold them in dicts, parameter groups in lists; the search below takes ten times as long
    gc.collect()
    optimizers = {id(each): each for each in map(unwrapped, _live(TorchOptimizer))}
    found = [each for each in optimizers.values() if held_by(each, weights)]
    known = {id(group) for each in found for group in each.param_groups}
    lists = [each for each in gc.get_referrers(*weights.values()) if type(each) is list] if weights else []
    for group in gc.get_referrers(*lists) if lists else ():
        if type(group) is dict and id(group) not in known and any(group.get("params") is each for each in lists):
            raise ValueError(
                f"a parameter group ({', '.join(sorted(map(str, group)))}) that belongs to no torch.optim.Optimizer"
                " holds a table: it would go on training the old one. Make it, and its optimizer, afterwards"
            )
    return found


def held_by(optimizer: TorchOptimizer, weights: Mapping[int, Tensor]) -> list[Tensor]:
    """The parameters of an optimizer that are among ``weights``, which are given by their ids."""
    groups = vars(optimizer).get("param_groups", ())  # an optimizer that is being built has none
    return [p for group in groups for p in group["params"] if id(p) in weights]


def exchange_(optimizer: TorchOptimizer, targets: Mapping[Tensor, Sequence[Tensor]]) -> dict[Tensor, dict[str, Any]]:
    """Replace parameters in an optimizer by others or by none, in place; returns the state of those that it held."""
    if "_row_rules" in vars(optimizer):  # one of ``quorem.optim``, under which rows may lag behind
        optimizer.flush()  # type: ignore[attr-defined]
    states: dict[Tensor, dict[str, Any]] = {}
    placed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for group in optimizer.param_groups:
        kept: list[Tensor] = []
        for p in group["params"]:
            if p not in targets:
                kept.append(p)
                continue
            states[p] = optimizer.state.get(p, {})
            kept += [new for new in targets[p] if id(new) not in placed]
            placed |= set(map(id, targets[p]))
        group["params"][:] = kept  # in place: LBFGS, for one, keeps the list
    for by_parameter in vars(optimizer).values():  # the state, and what an optimizer keeps beside it
        for p in states if isinstance(by_parameter, dict) else ():
            by_parameter.pop(p, None)
    if type(optimizer) is Adagrad:  # it makes its state in the constructor
        for new in {id(new): new for p in states for new in targets[p]}.values():
            optimizer.state[new] = Adagrad([new], **optimizer.defaults).state[new]
    return states


def _live(kind: type) -> list[Any]:
    """All objects of a class that the garbage collector knows."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def check_not_wrapped(model: nn.Module) -> None:
    """Raise ValueError if the model is inside a ``DistributedDataParallel``, which keeps its old parameters."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return  # there is nothing to wrap it in
    wrapper, modules = nn.parallel.DistributedDataParallel, set(model.modules())
    if any(not modules.isdisjoint(each.modules()) for each in _live(wrapper)):
        raise ValueError(
            "model must not be inside DistributedDataParallel, which would go on averaging the gradients of the old"
            " tables: change the model first, then wrap it"
        )
