"""Implementations of lookup and training of the same tables: modules from ids ``[B, F]`` to vectors ``[B, F, D]``."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

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
    """A provider that is ready to be measured."""

    module: nn.Module  # the lookup; its backward pass updates all parameters that ``optimizers`` do not update
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)  # to step after each backward pass
    captures_step: bool = False  # whether a step can run in a CUDA graph, as every lookup can
    optimizer: str = ""  # what updates the tables, in words
    setting: str = ""  # "default" or "fastest", for a library that has several settings
    order: list[int] | None = None  # of the features in the module's output; None for the usual order


def fused(source: EmbeddingCollection, mode: str) -> Contender:
    """``EmbeddingCollection`` with updates in the backward pass."""
    if mode == "forward":
        return Contender(source)
    optim.apply_in_backward(source, optim.Adagrad, lr=LR)
    contender = Contender(source, captures_step=True, optimizer="Adagrad")
    if networks := [p for p in source.parameters() if p is not source.stored]:
        key = source.stored.device.type.upper()  # fused where this torch has that for the device: it can be captured
        fused = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adagrad_", key) or None
        contender.optimizers.append(torch.optim.Adagrad(networks, lr=LR, eps=EPS, fused=fused))
    return contender


class PerTable(nn.Module):
    """An ``nn.EmbeddingBag`` for each stored table, called one by one; the vectors are composed after the lookups."""

    def __init__(self, source: EmbeddingCollection) -> None:
        super().__init__()
        self.specs = source.specs
        self.offsets = torch.empty(0, dtype=torch.int64)
        bag_of = partial(nn.EmbeddingBag.from_pretrained, freeze=False, mode="sum", sparse=True)
        tables = map(source.tables, range(len(self.specs)))
        self.bags = nn.ModuleList(nn.ModuleList(bag_of(table.detach()) for table in each) for each in tables)

    def forward(self, ids: Tensor) -> Tensor:
        if len(self.offsets) != len(ids):
            self.offsets = torch.arange(len(ids), device=ids.device)
        vectors = []
        for f, (spec, bags) in enumerate(zip(self.specs, self.bags, strict=True)):
            column = ids[:, f].contiguous()
            buckets = [p(column) for p in spec.partitions] if len(spec.partitions) > 1 else [column]
            looked_up = [bag(bucket, self.offsets) for bag, bucket in zip(bags, buckets, strict=True)]  # type: ignore[call-overload]
            vectors.append(OPERATIONS[spec.operation](*looked_up))
        return torch.stack(vectors, 1)


def loop(source: EmbeddingCollection, mode: str) -> Contender:
    """One ``nn.EmbeddingBag`` with sparse gradients for each table, as in the public DLRM code."""
    _need_two_tables(source)
    module = PerTable(source)
    if mode == "forward":
        return Contender(module)
    optimizer = torch.optim.Adagrad(module.parameters(), lr=LR, eps=EPS)
    return Contender(module, [optimizer], optimizer="torch Adagrad, sparse gradients")


def fbgemm(source: EmbeddingCollection, mode: str, *, setting: Literal["default", "fastest"] = "default") -> Contender:
    """FBGEMM's table-batched embedding on the stored tables, composed after the lookup."""
    _need_two_tables(source)
    try:
        from . import fbgemm as peer
    except (ImportError, OSError, RuntimeError) as error:  # a build for another torch may fail in several ways
        raise Skipped(f"fbgemm_gpu cannot be imported: {str(error).splitlines()[0]}") from error
    module = peer.TableBatched(source, setting)
    words = f"FBGEMM {'row-wise' if setting == 'fastest' else 'exact'} Adagrad" if mode == "step" else ""
    return Contender(module, captures_step=True, optimizer=words, setting=setting, order=module.order)


BUILD: dict[str, Callable[[EmbeddingCollection, str], Contender]] = {
    "loop": loop,
    **dict.fromkeys(("fbgemm", "fbgemm_full"), fbgemm),
    **dict.fromkeys(("fbgemm_fastest", "fbgemm_full_fastest"), partial(fbgemm, setting="fastest")),
    "fused": fused,
}


def _need_two_tables(source: EmbeddingCollection) -> None:
    if len(source.paths) or any(len(spec.shapes) > 2 for spec in source.specs):
        raise Skipped("tables of QR and full ones are measured, other schemes for fused only")
