"""Implementations of lookup and training of the same tables: modules from ids ``[B, F]`` to vectors ``[B, F, D]``."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ... import optim
from ...checks import InvalidIdMode
from ...modules.collection import EmbeddingCollection
from ...ops import rules
from ...ops.layout import Layout
from ...ops.lookup import compose
from ...ops.rows import IdBatch, lookup_reads
from ...ops.state import AdagradConstants, AdagradState
from ...paper.operations import OPERATIONS

LR, EPS = 0.01, 1e-10
ALL = ("forward", "step", "step_amsgrad", "dlrm")


class Skipped(Exception):  # noqa: N818 - not an error
    """A provider cannot be measured here; the message says why."""


@dataclass
class Contender:
    """A provider that is ready to be measured.

    Args:
        module: the lookup; its backward pass updates all parameters that ``optimizers`` do not update.
        optimizers: optimizers to step after each backward pass.
        captures: the modes that can run in a CUDA graph.
        optimizer: what updates the tables, in words.
        setting: "default" or "fastest", for a library that has several settings.
        order: the order of the features in the module's output; None for the usual order.
    """

    module: nn.Module
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    captures: tuple[str, ...] = ("forward",)
    optimizer: str = ""
    setting: str = ""
    order: list[int] | None = None


Provider = Callable[[EmbeddingCollection, str | None], Contender]


def fused(source: EmbeddingCollection, rule: str | None, *, on_invalid_id: InvalidIdMode = "warn") -> Contender:
    """``EmbeddingCollection`` with updates in the backward pass."""
    source.on_invalid_id = on_invalid_id
    if rule is None:
        return Contender(source, captures=ALL)
    make = {"adagrad": optim.Adagrad, "amsgrad": optim.AMSGrad}[rule]
    optim.apply_in_backward(source, make, lr=LR)
    networks = [p for p in source.parameters() if p is not source.stored]
    rest: list[torch.optim.Optimizer] = []
    if networks:
        rest = [dense_optimizer(rule, networks)]
    return Contender(source, rest, ALL, {"adagrad": "Adagrad", "amsgrad": "AMSGrad"}[rule])


def fused_trust(source: EmbeddingCollection, rule: str | None) -> Contender:
    """``fused`` without the count of ids that are out of range."""
    _need(source.stored.is_cuda, "a CPU checks ids within the lookup")
    return fused(source, rule, on_invalid_id="trust")


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


def loop(source: EmbeddingCollection, rule: str | None) -> Contender:
    """One ``nn.EmbeddingBag`` with sparse gradients for each table, as in the public DLRM code."""
    _need_closed_form(source)
    _need(rule in (None, "adagrad"), "torch.optim has no sparse AMSGrad")
    module = PerTable(source, bags=True)
    optimizers = [torch.optim.Adagrad(module.parameters(), lr=LR, eps=EPS)] if rule else []
    return Contender(module, list(optimizers), ("forward",), "torch Adagrad, sparse gradients" if rule else "")


def dense(source: EmbeddingCollection, rule: str | None) -> Contender:
    """One ``nn.Embedding`` with dense gradients for each feature."""
    module = PerTable(source, bags=False)
    optimizers = [dense_optimizer(rule, list(module.parameters()))] if rule else []
    name = {"adagrad": "torch Adagrad, dense gradients", "amsgrad": "torch Adam(amsgrad=True), dense gradients"}
    return Contender(module, optimizers, ("forward",), name[rule] if rule else "")


def plain_lookup(ids: Tensor, stored: Tensor, layout: Layout) -> Tensor:
    """The plain lookup, without a check of the ids."""
    return compose(lookup_reads(ids, layout), stored)


class Reference(nn.Module):
    """The plain functions that define the results of the kernels: lookup, row gradients, their sums, Adagrad's rule."""

    def __init__(self, source: EmbeddingCollection) -> None:
        super().__init__()
        self.source = source
        self.stored = source.stored.detach()
        self.hook = nn.Parameter(torch.empty(0, device=self.stored.device))  # so that autograd runs a backward pass
        self.lr = torch.tensor(LR, dtype=torch.float64, device=self.stored.device)
        self.state: AdagradState | None = None

    def forward(self, ids: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return plain_lookup(ids, self.stored, self.source.layout)
        return _ReferenceStep.apply(self.hook, ids, self)

    def update(self, grad: Tensor, ids: Tensor) -> None:
        """One step of Adagrad."""
        if self.state is None:
            self.state = AdagradState(torch.zeros_like(self.stored), torch.tensor(0, device=self.stored.device))
        inputs = (grad, IdBatch(ids), self.stored, self.lr, self.state, self.source.layout)
        rules.update_(*inputs, rule="adagrad", constants=AdagradConstants(0.0, EPS))


class _ReferenceStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hook: Tensor, ids: Tensor, module: Reference) -> Tensor:
        ctx.read = module, ids
        return plain_lookup(ids, module.stored, module.source.layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        module, ids = ctx.read
        module.update(grad, ids)
        return None, None, None


def plain(source: EmbeddingCollection, rule: str | None) -> Contender:
    """The plain reference in ``quorem.ops``, which runs where there is no kernel."""
    _need_closed_form(source)
    _need(rule in (None, "adagrad"), "measured with Adagrad only")
    return Contender(Reference(source), [], ("forward",), "Adagrad" if rule else "")


class Compiled(nn.Module):
    """``torch.compile`` of the plain lookup; its gradient is as large as the tables."""

    def __init__(self, source: EmbeddingCollection) -> None:
        super().__init__()
        torch._dynamo.reset()
        self.stored, self.layout = source.stored, source.layout
        self.lookup = torch.compile(plain_lookup, dynamic=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lookup(ids, self.stored, self.layout)


def compiled(source: EmbeddingCollection, rule: str | None) -> Contender:
    """The plain lookup through ``torch.compile``, with dense gradients."""
    _need_closed_form(source)
    _need(rule in (None, "adagrad"), "measured with Adagrad only")
    module = Compiled(source)
    optimizers = [dense_optimizer("adagrad", [source.stored])] if rule else []
    return Contender(module, optimizers, ("forward",), "torch Adagrad, dense gradients" if rule else "")


def fbgemm(
    source: EmbeddingCollection, rule: str | None, *, setting: Literal["default", "fastest"] = "default"
) -> Contender:
    """FBGEMM's table-batched embedding on the stored tables, composed after the lookup."""
    _need_closed_form(source)
    _need(rule in (None, "adagrad"), "FBGEMM has no AMSGrad")
    try:
        from . import fbgemm as peer
    except (ImportError, OSError, RuntimeError) as error:  # a build for another torch may fail in several ways
        raise Skipped(f"fbgemm_gpu cannot be imported: {str(error).splitlines()[0]}") from error
    module, optimizer = peer.build(source, setting, LR, EPS)
    words = f"FBGEMM {optimizer}" if rule else ""
    return Contender(module, captures=ALL, optimizer=words, setting=setting, order=module.order)


BUILD: dict[str, Provider] = {
    "dense": dense,
    "loop": loop,
    "reference": plain,
    "compiled": compiled,
    **dict.fromkeys(("fbgemm", "fbgemm_full"), fbgemm),
    **dict.fromkeys(("fbgemm_fastest", "fbgemm_full_fastest"), partial(fbgemm, setting="fastest")),
    "fused": fused,
    "fused_trust": fused_trust,
}


def dense_optimizer(rule: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The fastest version of the ``torch.optim`` optimizer that this torch has on this device."""
    device = params[0].device
    more: dict[str, Any] = {"lr": LR}
    if rule == "amsgrad":
        more |= {"amsgrad": True, "capturable": device.type == "cuda"}
    make: Any = torch.optim.Adam if rule == "amsgrad" else partial(torch.optim.Adagrad, eps=EPS)
    probe = nn.Parameter(torch.zeros(1, device=device))
    probe.grad = torch.zeros_like(probe)
    try:
        make([probe], fused=True, **more).step()
    except (RuntimeError, NotImplementedError):
        return make(params, **more)
    return make(params, fused=True, **more)


def _need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Skipped(otherwise)


def _need_closed_form(source: EmbeddingCollection) -> None:
    _need(not len(source.paths) and not source.narrow, "path-based and narrow tables are measured for fused only")
