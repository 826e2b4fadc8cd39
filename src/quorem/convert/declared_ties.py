"""Weights that a model declares as tied by name: transformers saves one of them, and ties them after loading.

``all_tied_weights_keys`` of its models maps names of parameters to the parameter that each shares.
"""

from collections.abc import Iterator

from torch import nn

from ..modules.embedding import Embedding
from ..modules.tied import TiedLinear


def _declaring(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, str]]]:
    for module in model.modules():
        if isinstance(ties := vars(module).get("all_tied_weights_keys"), dict):
            yield module, ties


def tie_(model: nn.Module) -> None:
    """Share the weights that are declared as tied; within ``from_pretrained`` a constructor leaves them apart."""
    for module, ties in _declaring(model):
        for target, source in ties.items():
            path, _, name = target.rpartition(".")
            setattr(module.get_submodule(path), name, module.get_parameter(source))


def declare_(model: nn.Module) -> None:
    """Declare the parameters of composed tables as tied, in place of the weights; a tied head has none of its own."""
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
