"""Turn a compressed model back into one of ``torch.nn`` modules."""

from typing import Any

import torch
from torch import Tensor, nn

from ..modules.bag import EmbeddingBag
from ..modules.embedding import Embedding
from ..modules.holders import check_not_wrapped, exchange_, optimizers_of, unwrapped
from ..modules.lookup import Tables
from ..modules.meaning import meaning_of
from ..modules.tied import TiedLinear
from ..paper.schemes import Full
from .choose import size_of
from .follow import has_state
from .groups import check_model, torchrec_tools
from .report import Entry, Report
from .swap import declare_again_, keep_, swap_


def decompress_(model: nn.Module, *, optimizer: torch.optim.Optimizer | None = None) -> Report:
    """Replace every composed ``Embedding`` and ``EmbeddingBag`` in ``model`` by the equivalent ``torch.nn`` module.

    Collections of ``quorem.integrations.torchrec`` become TorchRec's own. A ``TiedLinear`` becomes a linear layer that
    shares the weight of the embedding again. Every optimizer that holds the stored rows gets the weights instead.

    Args:
        model: the model, changed in place.
        optimizer: an optimizer whose state for composed tables may start anew: the state of a row that ids share cannot
            be divided among them. The state of full tables is kept.

    Returns:
        A report of what was done with each table.

    Raises:
        TypeError: if ``model`` is not a module, or is itself an embedding.
        ValueError: if another optimizer has such a state or updates the tables within the backward pass, or the model
            is inside ``DistributedDataParallel``. Nothing is changed.

    >>> import quorem
    >>> model = nn.Sequential(nn.Embedding(10_000, 16))
    >>> _ = quorem.compress_(model, quorem.QR(num_collisions=4))
    >>> decompress_(model).swapped, model[0].weight.shape
    (['0'], torch.Size([10000, 16]))
    """
    check_model(model, Embedding)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer ({type(optimizer).__name__}) must be an optimizer or None")
    check_not_wrapped(model)
    report = Report()
    weights: dict[Tensor, nn.Parameter] = {}
    modules: dict[nn.Module, nn.Module] = {}
    targets: dict[Tensor, list[Tensor]] = {}  # new parameters by the one that they replace
    tables = {name: module for name, module in model.named_modules() if isinstance(module, Tables)}
    reads: dict[Tensor, set[Any]] = {}  # how modules that share rows make vectors of them
    for module in tables.values():
        how = (module.padding, *map(tuple, meaning_of(module).tolist()), *map(id, module.parameters()))
        reads.setdefault(module.stored, set()).add(how)
    for name, module in tables.items():
        before, why = size_of(module), ""
        is_torch = type(module) in (Embedding, EmbeddingBag) and module.specs[0].operation != "feature"
        if not is_torch or module.raw_ids[0] or module.unknown[0] != "error":
            why = f"{type(module).__name__} stands for no module of torch.nn"
        elif len(reads[module.stored]) > 1:
            why = "its rows are shared by a module with another padding_idx, scheme or matrix: no weight is both tables"
        if why:
            report.entries.append(Entry(name, 0, 0, before, before, 0, None, why))
            continue
        assert isinstance(module, Embedding)
        if module.updates.collector is not None:
            raise ValueError(f"{name} is updated in the backward pass: remove() that optimizer first")
        after, n, d = 0, module.num_embeddings, module.embedding_dim
        if module.stored not in weights:
            weight = nn.Parameter(module.to_dense().detach(), requires_grad=module.stored.requires_grad)
            weights[module.stored] = weight
            after = weight.nbytes
            targets |= {p: [weight] if p is module.stored else [] for p in module.parameters()}
        modules[module] = _plain(module, weights[module.stored])
        report.entries.append(Entry(name, n, d, before, after, 0, Full(), "decompressed"))
    for tied in list(model.modules()):
        if isinstance(tied, TiedLinear) and tied.embedding in modules:
            linear = nn.Linear(tied.in_features, tied.out_features, bias=False, device="meta")
            linear.weight = weights[tied.embedding.stored]
            linear.bias = tied.bias  # type: ignore[assignment]
            keep_(tied, linear)
            modules[tied] = linear
    if torchrec := torchrec_tools():
        report.entries += torchrec.decompress(model, modules, targets)
    full = {m.stored for m in modules if isinstance(m, Tables) and m.is_full()}
    optimizers = optimizers_of(targets)
    given = None if optimizer is None else unwrapped(optimizer)
    for each in optimizers:
        if each is not given and any(has_state(each, p) for p in targets if p not in full):
            raise ValueError(
                f"optimizer ({type(each).__name__}) has a state of composed tables, which cannot be divided among their"
                " ids: pass optimizer=optimizer to start that state anew"
            )
    report.references += swap_(model, modules, weights)
    declare_again_(model)
    for each in optimizers:
        for old, state in exchange_(each, targets).items():
            if old in full and state:
                each.state[targets[old][0]] = state
        report.references.append(f"{type(each).__name__} now has the full tables")
    return report


def _plain(module: Embedding, weight: nn.Parameter) -> nn.Module:
    """The ``torch.nn`` module that replaces a composed one."""
    options: dict[str, Any] = {name: getattr(module, name) for name in ("sparse", *module.inherited)}
    kind = nn.EmbeddingBag if isinstance(module, EmbeddingBag) else nn.Embedding
    new = kind(module.num_embeddings, module.embedding_dim, device="meta", **options)
    new.weight = weight
    keep_(module, new)
    return new
