"""Implementations of lookup and training of the same tables: modules from ids ``[B, F]`` to vectors ``[B, F, D]``."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ... import optim
from ...modules.collection import EmbeddingCollection
from ...paper.operations import OPERATIONS

LR, EPS = 0.01, 1e-10


class Skipped(Exception):  # noqa: N818 - not an error
    """A provider cannot be measured here; the message says why."""


@dataclass
class Contender:
    """A provider that is ready to be measured.

    Args:
        module: the lookup; its backward pass updates all parameters that ``optimizers`` do not update.
        optimizers: optimizers to step after each backward pass.
        captures_step: whether a step can run in a CUDA graph, as every lookup can.
        optimizer: what updates the tables, in words.
        setting: "default" or "fastest", for a library that has several settings.
        order: the order of the features in the module's output; None for the usual order.
    """

    module: nn.Module
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    captures_step: bool = False
    optimizer: str = ""
    setting: str = ""
    order: list[int] | None = None


def fused(source: EmbeddingCollection, mode: str) -> Contender:
    """``EmbeddingCollection`` with updates in the backward pass."""
    if mode == "forward":
        return Contender(source)
    optim.apply_in_backward(source, optim.Adagrad, lr=LR)
    networks = [p for p in source.parameters() if p is not source.stored]
    return Contender(source, [dense_adagrad(networks)] if networks else [], True, "Adagrad")


class PerTable(nn.Module):
    """A torch layer for each stored table, called one by one; the vectors are composed after the lookups."""

    def __init__(self, source: EmbeddingCollection, *, bags: bool) -> None:
        super().__init__()
        self.bags, self.specs = bags, source.specs
        self.offsets = torch.empty(0, dtype=torch.int64)
        layer: Any = partial(nn.EmbeddingBag, mode="sum", sparse=True) if bags else nn.Embedding
        self.layers = nn.ModuleList(
            nn.ModuleList(layer(*table.shape, _weight=table.detach()) for table in source.tables(f))
            for f in range(len(self.specs))
        )

    def forward(self, ids: Tensor) -> Tensor:
        if len(self.offsets) != len(ids):
            self.offsets = torch.arange(len(ids), device=ids.device)
        more = (self.offsets,) if self.bags else ()
        vectors = []
        for f, (spec, layers) in enumerate(zip(self.specs, self.layers, strict=True)):
            column = ids[:, f].contiguous()
            buckets = [p(column) for p in spec.partitions] if len(spec.partitions) > 1 else [column]
            looked_up = [layer(bucket, *more) for layer, bucket in zip(layers, buckets, strict=True)]  # type: ignore[call-overload]
            vectors.append(OPERATIONS[spec.operation](*looked_up))
        return torch.stack(vectors, 1)


def loop(source: EmbeddingCollection, mode: str) -> Contender:
    """One ``nn.EmbeddingBag`` with sparse gradients for each table, as in the public DLRM code."""
    _need_closed_form(source)
    module = PerTable(source, bags=True)
    if mode == "forward":
        return Contender(module)
    optimizer = torch.optim.Adagrad(module.parameters(), lr=LR, eps=EPS)
    return Contender(module, [optimizer], optimizer="torch Adagrad, sparse gradients")


def dense(source: EmbeddingCollection, mode: str) -> Contender:
    """One ``nn.Embedding`` with dense gradients for each feature."""
    module = PerTable(source, bags=False)
    if mode == "forward":
        return Contender(module)
    return Contender(module, [dense_adagrad(list(module.parameters()))], optimizer="torch Adagrad, dense gradients")


def fbgemm(source: EmbeddingCollection, mode: str, *, setting: Literal["default", "fastest"] = "default") -> Contender:
    """FBGEMM's table-batched embedding on the stored tables, composed after the lookup."""
    _need_closed_form(source)
    try:
        from . import fbgemm as peer
    except (ImportError, OSError, RuntimeError) as error:  # a build for another torch may fail in several ways
        raise Skipped(f"fbgemm_gpu cannot be imported: {str(error).splitlines()[0]}") from error
    module, optimizer = peer.build(source, setting, LR, EPS)
    words = f"FBGEMM {optimizer}" if mode == "step" else ""
    return Contender(module, captures_step=True, optimizer=words, setting=setting, order=module.order)


BUILD: dict[str, Callable[[EmbeddingCollection, str], Contender]] = {
    "dense": dense,
    "loop": loop,
    **dict.fromkeys(("fbgemm", "fbgemm_full"), fbgemm),
    **dict.fromkeys(("fbgemm_fastest", "fbgemm_full_fastest"), partial(fbgemm, setting="fastest")),
    "fused": fused,
}


def dense_adagrad(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """``torch.optim.Adagrad`` for dense gradients, fused where this torch has that for the device."""
    key = params[0].device.type.upper()
    fused = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adagrad_", key)
    return torch.optim.Adagrad(params, lr=LR, eps=EPS, fused=fused or None)


def _need_closed_form(source: EmbeddingCollection) -> None:
    if len(source.paths) or source.narrow:
        raise Skipped("path-based and narrow tables are measured for fused only")
