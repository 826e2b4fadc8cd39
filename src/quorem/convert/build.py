"""Build the module that replaces another: a composed one for a ``torch.nn`` one, and the reverse."""

from typing import Any

from torch import nn

from ..modules.bag import EmbeddingBag
from ..modules.embedding import Embedding
from ..paper.init import deviation
from .groups import WeightGroup
from .swap import keep_


def composed_module(module: Any, group: WeightGroup, fit: bool, shared: Embedding | None) -> Embedding:
    """The composed module that replaces one of a group, as its choice says; it uses the rows of ``shared``."""
    weight, choice = module.weight, group.choice
    assert choice is not None
    options: dict[str, Any] = {"padding_idx": module.padding_idx, "sparse": module.sparse}
    dtype = weight.dtype if choice.dtype is None else choice.dtype
    options |= {"device": weight.device, "dtype": dtype}
    if choice.ranked:
        options["frequencies"] = "loaded" if choice.waits else group.counts
    if not fit and not weight.is_meta:
        options["init_std"] = deviation(weight)
    is_bag = isinstance(module, nn.EmbeddingBag)
    if is_bag:
        options |= {"mode": module.mode, "include_last_offset": module.include_last_offset}
    kind = EmbeddingBag if is_bag else Embedding
    new = kind(module.num_embeddings, module.embedding_dim, choice.scheme, **options)
    if shared is None and (fit or new.is_full()) and not weight.is_meta:  # a full table keeps its rows
        fitted = new
        if len({each.padding_idx for each in group.members.values()}) > 1:  # what is padding of one is an id of another
            fitted = kind(module.num_embeddings, module.embedding_dim, choice.scheme, **options | {"padding_idx": None})
        shared = fitted.fit_(weight.detach(), group.counts)
    if shared is not None and shared is not new:
        for name, parameter in list(shared.named_parameters()):
            owner, _, key = name.rpartition(".")
            setattr(new.get_submodule(owner), key, parameter)
    new.requires_grad_(weight.requires_grad)
    keep_(module, new)
    return new


def plain_module(module: Embedding, weight: nn.Parameter) -> nn.Module:
    """The ``torch.nn`` module that replaces a composed one."""
    options: dict[str, Any] = {"padding_idx": module.padding_idx, "sparse": module.sparse, "device": "meta"}
    kind: type[nn.Embedding | nn.EmbeddingBag] = nn.Embedding
    if isinstance(module, EmbeddingBag):
        kind, options = nn.EmbeddingBag, options | {"mode": module.mode}
        options["include_last_offset"] = module.include_last_offset
    new = kind(module.num_embeddings, module.embedding_dim, **options)
    new.weight = weight
    keep_(module, new)
    return new
