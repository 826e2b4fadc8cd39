"""The embeddings of a model, grouped by shared weight, and why some cannot be replaced."""

import dis
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..checks import FLOAT_DTYPES
from ..paper.schemes import Scheme
from ..paper.schemes.frequency import Ranking

TORCH_CLASSES = (nn.Embedding, nn.EmbeddingBag)
# Methods that a subclass may override: they only initialize the weight, which exists already, or describe the module.
HARMLESS = {"reset_parameters", "_fill_padding_idx_with_zero", "from_pretrained", "extra_repr"}


@dataclass(frozen=True)
class ChosenScheme:
    """How one table will be stored, and why."""

    scheme: Scheme
    why: str = ""
    dtype: torch.dtype | None = None  # None keeps the dtype of the table
    ranked: bool = True  # whether the ids are ranked by frequencies, if these are given


@dataclass(eq=False)
class WeightGroup:
    """Embeddings that share one weight."""

    members: dict[str, Any] = field(default_factory=dict)  # the modules by name
    counts: Tensor | None = None  # how often their ids occur, if that is known
    choice: ChosenScheme | None = None  # how they will be stored, once that is decided
    ranking: Ranking | None = None  # what that ranks their ids by: counts, or lists that a ``state_dict`` will bring
    reason: str = ""  # why they stay as they are; empty if they can be replaced
    collection: Any = None  # the TorchRec collection that contains them, if any

    @property
    def name(self) -> str:
        """Name of the first member."""
        return next(iter(self.members))

    @property
    def first(self) -> Any:
        """The first member."""
        return self.members[self.name]

    @property
    def is_replaced(self) -> bool:
        """Whether its modules are replaced: for their own sake, or with the collection that contains them."""
        return self.choice is not None or (self.collection is not None and self.collection.is_replaced)


def check_model(model: Any, embeddings: Any) -> None:
    """Raise TypeError unless ``model`` is a module that may contain some of ``embeddings``, and is none itself."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model ({type(model).__name__}) must be an nn.Module")
    if isinstance(model, embeddings):
        kind = type(model).__name__
        raise TypeError(f"model ({kind}) must contain embeddings: one alone cannot be replaced in place")


def torchrec_tools() -> Any:
    """The module ``convert.torchrec``; None if TorchRec is not imported, so that no model can contain its modules."""
    return import_module(".torchrec", __package__) if "torchrec.modules.embedding_modules" in sys.modules else None


def groups_in(model: nn.Module) -> list[WeightGroup]:
    """The embeddings of a model, grouped by weight; a shared module is listed once."""
    groups: dict[int, WeightGroup] = {}
    for name, module in model.named_modules():
        if isinstance(module, TORCH_CLASSES):
            weight = module._parameters.get("weight")
            groups.setdefault(id(module if weight is None else weight), WeightGroup()).members[name] = module
    return list(groups.values())


def leave_out(
    model: nn.Module,
    groups: list[WeightGroup],
    threshold: int,
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> None:
    """Set ``reason`` of the groups that stay as they are."""
    holders: dict[int, list[tuple[str, nn.Module]]] = {}
    writers: dict[int, str] = {}  # by the id of a module, what assigns to ``data`` of its weight
    for name, module in model.named_modules():
        if method := _assigns_data(type(module)):
            writers |= dict.fromkeys(map(id, module.children()), f"{type(module).__name__}.{method}")
        for parameter in module._parameters.values():
            holders.setdefault(id(parameter), []).append((name, module))
    for group in groups:
        for name, module in group.members.items():
            reason = _reason(name, module, threshold, filter_fn) or _holder(module, holders)
            if not reason and id(module) in writers:
                reason = f"{writers[id(module)]} assigns to data, and a composed weight has none of its own"
            if reason:
                group.reason = reason if name == group.name else f"{name}, which has the same weight: {reason}"
                break


def _reason(name: str, module: Any, threshold: int, filter_fn: Any) -> str:
    """Why an embedding must not or cannot be replaced; empty if it can."""
    if module.num_embeddings <= threshold:
        return f"{module.num_embeddings} ids are at most the threshold ({threshold})"
    if filter_fn is not None and not filter_fn(module, name):
        return "filter_fn left it out"
    extra = [n for n, _ in [*module.named_parameters(), *module.named_buffers()] if n != "weight"]
    if parametrize.is_parametrized(module) or extra or "weight" not in module._parameters:
        return f"its weight is parametrized, pruned or joined by others ({', '.join(extra)})"
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        return "it is compiled, or its forward was replaced: compress it first"
    if methods := _own_methods(type(module)):
        return f"{type(module).__name__} has methods of its own ({', '.join(methods)})"
    weight = module.weight
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if module.max_norm is not None:
        return "max_norm renormalizes rows in place, and a composed vector has no row of its own"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq counts ids, and ids share rows"
    if weight.dtype not in FLOAT_DTYPES.values():
        return f"dtype ({weight.dtype}) is none of {', '.join(map(str, FLOAT_DTYPES.values()))}"
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "its weight has hooks that expect the gradient of the whole table"
    return ""


def _own_methods(kind: type) -> list[str]:
    """Methods of a subclass that the new module would not have."""
    bases = kind.__mro__[: next(i for i, base in enumerate(kind.__mro__) if base in TORCH_CLASSES)]
    names = {
        name for base in bases for name, value in vars(base).items() if callable(value) or isinstance(value, property)
    }
    return sorted(name for name in names - HARMLESS if not name.startswith("__") or name == "__call__")


def _assigns_data(kind: type) -> str:
    """The first method of a class of a library that assigns to ``data``, as in ``self.table.weight.data = values``."""
    if kind.__module__.split(".")[0] in ("torch", "torchrec", "quorem"):
        return ""
    for name, value in vars(kind).items():
        code = getattr(value, "__code__", None)
        if code is None or not {"weight", "data"} <= set(code.co_names):
            continue
        for before, after in pairwise(dis.get_instructions(code)):
            if before.argval == "weight" and (after.opname, after.argval) == ("STORE_ATTR", "data"):
                return name
    return ""


def _holder(module: Any, holders: dict[int, list[tuple[str, nn.Module]]]) -> str:
    """Which other module uses the weight and cannot be replaced, in words; empty if there is none."""
    weight: Tensor = module.weight
    for name, other in holders[id(weight)]:
        if not isinstance(other, TORCH_CLASSES) and not (type(other) is nn.Linear and other.weight is weight):
            return f"its weight is also a parameter of {name} ({type(other).__name__})"
    return ""
