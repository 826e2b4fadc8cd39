"""The trained model in a run's folder.

model.safetensors    the model as ``quorem.save`` writes it; for a custom network only its tables
layers.safetensors   for a custom network: everything else; loading it needs the network's Python file
"""

from pathlib import Path

from torch import nn

from .. import models
from ..files.saved_model import load, save
from ..files.tensors import FileKind, TensorFile, write_tensors
from ..models.custom import is_custom
from ..modules.lookup import Tables
from .config import RunConfig

MODEL, LAYERS = "model.safetensors", "layers.safetensors"
KIND = FileKind("quorem-layers", 1)


def write_model(folder: Path, model: nn.Module, config: RunConfig) -> None:
    """Write a trained model."""
    if not is_custom(config.network):
        save(model, folder / MODEL)
        return
    tables = next(module for module in model.modules() if isinstance(module, Tables))
    state, inside = model.state_dict(), _prefixes(model, tables)
    layers = {name: tensor.detach() for name, tensor in state.items() if not name.startswith(inside)}
    write_tensors(folder / LAYERS, KIND, layers, {})
    save(tables, folder / MODEL)


def read_model(folder: Path, config: RunConfig, num_dense: int, *, verify: bool = True) -> nn.Module:
    """The model that ``write_model`` wrote. For a custom network, this runs the network's Python file.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if one is damaged, or the network's file has changed since.
    """
    loaded = load(folder / MODEL, verify=verify)
    if not is_custom(config.network):
        return loaded
    model = models.build(config.network, loaded, num_dense=num_dense)
    file = TensorFile(folder / LAYERS, KIND)
    if verify:
        file.verify()
    keys = model.load_state_dict(file.tensors, strict=False)
    missing = [name for name in keys.missing_keys if not name.startswith(_prefixes(model, loaded))]
    if wrong := [*keys.unexpected_keys, *missing]:
        raise ValueError(f"{folder / LAYERS} does not fit the network: {', '.join(wrong[:3])}")
    return model


def _prefixes(model: nn.Module, tables: nn.Module) -> tuple[str, ...]:
    """The prefixes of the names of the tables' tensors in the model's ``state_dict``."""
    named = model.named_modules(remove_duplicate=False)
    return tuple(f"{name}." for name, module in named if module is tables)
