"""Replace old modules by new ones, wherever they or their parameters are referenced."""

import functools
import types
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

HOOKS = [name for name in vars(nn.Module()) if "_hooks" in name]
DEPTH = 8  # how deep nested containers are searched
# Optimizers are given their parameters by ``follow``, which converts the state too.
NEVER_PLAIN = (nn.Module, Tensor, optim.Optimizer, type, types.FunctionType, types.MethodType, types.ModuleType)


def keep_(old: nn.Module, new: nn.Module) -> None:
    """Copy to ``new`` the hooks and training mode of ``old``, and the attributes that were added to ``old``."""
    for hooks in HOOKS:
        getattr(new, hooks).update(getattr(old, hooks))
    for hook in new._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):  # it is called with the module that it was registered on
            hook.module = weakref.ref(new)  # type: ignore[attr-defined]
    new._is_full_backward_hook = old._is_full_backward_hook
    new.training = old.training
    if isinstance(old, nn.Embedding | nn.EmbeddingBag):
        for name in added_attributes(old) - vars(new).keys():
            object.__setattr__(new, name, vars(old)[name])


def added_attributes(module: nn.Module) -> set[str]:
    """Names of the attributes of an ``nn.Embedding`` or ``nn.EmbeddingBag`` that a new one does not have."""
    kind = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
    return vars(module).keys() - vars(kind(1, 1, device="meta")).keys()


def bound_attributes(module: nn.Module) -> list[str]:
    """Attributes of a module's instance that call the module itself, such as a ``forward`` that was patched."""
    names = [name for name in added_attributes(module) if _calls(vars(module)[name], module)]
    return sorted({"compile()" if name == "_compiled_call_impl" else name for name in names})


def _calls(value: Any, module: nn.Module) -> bool:
    """Whether ``value`` is a function that refers to ``module``: bound to it, partial, or in its closure."""
    if isinstance(value, functools.partial):
        return any(part is module or _calls(part, module) for part in (value.func, *value.args))
    if isinstance(value, types.MethodType):
        return value.__self__ is module
    if not isinstance(value, types.FunctionType):
        return False
    cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]  # an empty one raises
    wrapped = vars(value).get("__wrapped__")
    return any(part is module or _calls(part, module) for part in (*cells, wrapped) if part is not value)


def swap_(model: nn.Module, modules: Mapping[nn.Module, nn.Module], parameters: Mapping[Tensor, Tensor]) -> list[str]:
    """Replace modules and parameters; returns where else they were referenced than as children of modules.

    It searches the children and attributes of modules, lists, tuples, dicts and sets in these attributes, and the
    attributes of plain objects, such as descriptions of features.
    """
    new: dict[int, Any] = {id(old): module for old, module in modules.items()}
    new |= {id(old): parameter for old, parameter in parameters.items()}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in new:
                parent._modules[name] = new[id(child)]
    references: list[str] = []
    objects: dict[int, int] = {}
    module_attributes = set(vars(nn.Module()))
    for path, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            if attribute in module_attributes:
                continue
            rewritten, count = _rewritten(value, new, objects)
            if not count:
                continue
            if rewritten is not value:
                object.__setattr__(module, attribute, rewritten)
            name = f"{path + '.' if path else ''}{attribute}"
            references.append(f"{name} referred to {count} replaced modules or weights: it refers to the new ones now")
    return references


def _rewritten(value: Any, new: Mapping[int, Any], objects: dict[int, int], depth: int = DEPTH) -> tuple[Any, int]:
    """``value`` with replaced objects exchanged, also inside containers and plain objects; and how many there were.

    ``objects`` maps the ids of plain objects that were searched already to the depth of that search.
    """
    if id(value) in new:
        return new[id(value)], 1
    if depth == 0:
        return value, 0
    if not isinstance(value, list | tuple | dict | set | frozenset):
        if not _is_plain(value) or objects.get(id(value), 0) >= depth:
            return value, 0
        objects[id(value)] = depth
        return value, _rewritten(vars(value), new, objects, depth - 1)[1]
    entries = list(value.items() if isinstance(value, dict) else value)
    results = [_rewritten(entry, new, objects, depth - 1) for entry in entries]
    count = sum(found for _, found in results)
    if not count:
        return value, 0
    entries = [entry for entry, _ in results]
    if isinstance(value, tuple | frozenset):
        return (type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)), count
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(entries)
    return value, count


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is an object with attributes, but not a module, tensor, optimizer, class or function."""
    return not isinstance(value, NEVER_PLAIN) and isinstance(getattr(value, "__dict__", None), dict)


def out_of_reach(model: nn.Module) -> list[str]:
    """Embeddings that were not replaced because they are scripted or not registered as submodules, in words."""
    listed, names = set(model.modules()), []
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            if module.original_name in ("Embedding", "EmbeddingBag"):
                names.append(
                    f"{path} is a scripted {module.original_name}: not compressed. Compress it before scripting"
                )
            continue
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or not isinstance(value, dict | list | tuple):
                continue
            entries = value.values() if isinstance(value, dict) else value
            count = sum(isinstance(each, nn.Embedding | nn.EmbeddingBag) and each not in listed for each in entries)
            if count:
                name = f"{path + '.' if path else ''}{attribute}"
                names.append(
                    f"{name} holds {count} embeddings that are no submodules: not compressed. Use nn.ModuleDict"
                )
    return names


def computed_before(model: nn.Module, shapes: Mapping[tuple[int, ...], str]) -> list[str]:
    """Tensors in attributes of modules that may have been computed from a replaced table, in words.

    Args:
        model: the model.
        shapes: names of the replaced tables by their shape.
    """
    return [
        f"{path + '.' if path else ''}{attribute} is a tensor of the shape of {shapes[tuple(value.shape)]}: if it was"
        " computed from the old table, it goes on using it until it is computed again"
        for path, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor) and tuple(value.shape) in shapes
    ]
