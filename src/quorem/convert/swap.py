"""Replace old modules by new ones, wherever they or their parameters are referenced.

Some models declare weights as tied by name: transformers saves one of them, and ties them after loading.
``all_tied_weights_keys`` of its models maps names of parameters to the parameter that each shares.
"""

import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from ..modules.embedding import Embedding
from ..modules.tied import TiedLinear

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
        plain = nn.Embedding if isinstance(old, nn.Embedding) else nn.EmbeddingBag
        for name in vars(old).keys() - vars(plain(1, 1, device="meta")).keys() - vars(new).keys():
            object.__setattr__(new, name, vars(old)[name])


def swap_(model: nn.Module, modules: Mapping[nn.Module, nn.Module], parameters: Mapping[Tensor, Tensor]) -> list[str]:
    """Replace modules and parameters; returns the places that referenced them, children of modules aside.

    It searches the children and attributes of modules, lists, tuples and dicts in these attributes, and the attributes
    of plain objects, such as descriptions of features.
    """
    new: dict[int, Any] = {id(old): module for old, module in modules.items()}
    new |= {id(old): parameter for old, parameter in parameters.items()}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in new:
                parent._modules[name] = new[id(child)]
    references: list[str] = []
    objects: dict[int, int] = {}
    for path, module, attribute, value in _attributes(model):
        rewritten, count = _rewritten(value, new, objects)
        if rewritten is not value:
            object.__setattr__(module, attribute, rewritten)
        if count:
            references.append(f"{path} referred to {count} replaced modules or weights: it refers to the new ones now")
    return references


def _attributes(model: nn.Module) -> list[tuple[str, nn.Module, str, Any]]:
    """The attributes of a model's modules that are not torch's: path, module, name and value."""
    of_torch = set(vars(nn.Module()))
    return [
        (f"{path}.{name}" if path else name, module, name, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in of_torch
    ]


def out_of_reach(model: nn.Module) -> list[str]:
    """Embeddings that stay because they are scripted, or are not registered as submodules, in words."""
    found = [
        f"{path} is a scripted embedding: not compressed. Compress it before scripting"
        for path, module in model.named_modules()
        if isinstance(module, torch.jit.ScriptModule) and module.original_name in ("Embedding", "EmbeddingBag")
    ]
    listed = set(model.modules())
    for path, _, _, value in _attributes(model):
        entries = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if count := sum(isinstance(each, nn.Embedding | nn.EmbeddingBag) and each not in listed for each in entries):
            found.append(f"{path} holds {count} embeddings that are no submodules: not compressed. Use nn.ModuleDict")
    return found


def computed_before(model: nn.Module, shapes: Mapping[tuple[int, ...], str]) -> list[str]:
    """Tensors in attributes that may have been computed from a replaced table, in words; ``shapes`` names the tables.

    RecBole's LightGCN, for one, keeps the propagated table between predictions.
    """
    return [
        f"{path} is a tensor of the shape of {shapes[tuple(value.shape)]}: if it was computed from the old table, it"
        " goes on using it until it is computed again"
        for path, _, _, value in _attributes(model)
        if isinstance(value, Tensor) and tuple(value.shape) in shapes
    ]


def _rewritten(value: Any, new: Mapping[int, Any], objects: dict[int, int], depth: int = DEPTH) -> tuple[Any, int]:
    """``value`` with replaced objects exchanged, also inside containers and plain objects; and how many there were.

    ``objects`` maps the ids of plain objects that were searched already to the depth of that search.
    """
    if id(value) in new:
        return new[id(value)], 1
    if depth == 0:
        return value, 0
    if not isinstance(value, list | tuple | dict):
        is_plain = not isinstance(value, NEVER_PLAIN) and isinstance(getattr(value, "__dict__", None), dict)
        if not is_plain or objects.get(id(value), 0) >= depth:
            return value, 0
        objects[id(value)] = depth
        return value, _rewritten(vars(value), new, objects, depth - 1)[1]
    entries = list(value.items() if isinstance(value, dict) else value)
    results = [_rewritten(entry, new, objects, depth - 1) for entry in entries]
    count = sum(found for _, found in results)
    if not count:
        return value, 0
    entries = [entry for entry, _ in results]
    if isinstance(value, tuple):
        return (type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)), count
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(entries)
    return value, count


def _declaring(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, str]]]:
    for module in model.modules():
        if isinstance(ties := vars(module).get("all_tied_weights_keys"), dict):
            yield module, ties


def tie_(model: nn.Module) -> None:
    """Share the weights that are declared as tied: a constructor that ``from_pretrained`` calls does not share them."""
    for module, ties in _declaring(model):
        for target, source in ties.items():
            path, _, name = target.rpartition(".")
            setattr(module.get_submodule(path), name, module.get_parameter(source))


def declare_(model: nn.Module) -> None:
    """Declare the parameters of composed tables as tied, not their weights; a ``TiedLinear`` has none of these."""
    for module, ties in _declaring(model):
        names: dict[str, str] = {}
        for target, source in ties.items():
            path, _, name = target.rpartition(".")
            owner = module.get_submodule(path)
            if name != "weight" or not isinstance(owner, Embedding | TiedLinear):
                names[target] = source
            elif isinstance(owner, Embedding):
                shared = source.rpartition(".")[0]
                names |= {f"{path}.{key}": f"{shared}.{key}" for key, _ in owner.named_parameters()}
        if names != ties:
            module.all_tied_weights_keys = module._tied_weights_keys = names  # type: ignore[assignment]


def declare_again_(model: nn.Module) -> None:
    """Go back to what the class of a model declares, after ``decompress_``."""
    for module, _ in _declaring(model):
        if "_tied_weights_keys" in vars(module):
            del module._tied_weights_keys
            module.all_tied_weights_keys = module.get_expanded_tied_weights_keys(all_submodels=True)  # type: ignore[operator]
