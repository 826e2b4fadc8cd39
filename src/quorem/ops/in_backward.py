"""Lookups whose gradients go straight to an optimizer's rule, and never into ``stored.grad``."""

import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .lagging import in_memory, unwatched
from .narrow import split_gradient
from .pieces import Gradient
from .updates import Lookup, Read, Updates, joined, update_

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


def collector_of(updates: Updates, stored: Tensor) -> "Collector | None":
    """What collects the gradients of ``stored``, the parameter or a replacement; None if they go to its ``grad``."""
    collector = updates.collector
    if collector is None or stored is collector.stored:
        return collector
    if stored.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "fully_shard or functional_call has replaced a table that apply_in_backward updates, so its gradients"
            " would be lost: remove() its optimizer, and use the step() of one made afterwards"
        )
    return None


class Collector:
    """Collects the reads of one backward pass, and takes a step at its end, when no further gradient can come."""

    def __init__(self, stored: Tensor, optimizer: Any) -> None:
        self.stored = stored  # the parameter that is read
        self.optimizer = optimizer  # its ``_next_rule`` is asked at the end of a pass, for the rule of the step
        self.versions = in_memory(stored)  # counts the writes into ``stored``
        self.replicas: Any = None  # process group of DistributedDataParallel: its replicas step together
        self._hook = stored.register_post_accumulate_grad_hook(partial(_collect_grad, weakref.ref(self)))
        # Only the autograd engine keeps a pass alive, so the reads of a pass that fails are dropped with it.
        self._passes: dict[int, weakref.ref[_Pass]] = {}  # a WeakValueDictionary would take more time

    def read(self, vectors: Any, read: Read, *matrices: Tensor) -> Any:
        """The result of a read, connected so that its gradient comes to this collector.

        ``vectors`` is this result, or a function that computes it, if only ``stored`` gets a gradient. With the
        ``matrices`` of a lookup with ``pieces``, it is what ``cpu.projection.lookup_split`` returns.
        """
        return _Collected.apply(self.stored, vectors, self, read, *matrices)

    def close(self) -> None:
        """Let the gradients of ``stored`` go to ``stored.grad`` again."""
        self._hook.remove()

    def collect(self, read: Read, grad: Gradient, version: int) -> None:
        """Add a read and its gradient; ``version`` is that of ``stored`` when it was read."""
        passes, task = self._passes, torch._C._current_graph_task_id()
        known = passes.get(task)
        current = None if known is None else known()
        if current is None:
            current = _Pass(self, version)
            passes[task] = weakref.ref(current, lambda _: passes.pop(task, None))
            _queue_callback(current)
        self.check(version)
        current.reads.append((read, grad))

    def join_replicas(self, ddp: DistributedDataParallel) -> None:
        """Take later steps together with the other replicas of ``ddp``."""
        if not ddp.require_backward_grad_sync:
            raise RuntimeError(
                "no_sync() must not be used after apply_in_backward: every backward pass is a step, and replicas that"
                " do not exchange gradients would drift apart"
            )
        self.replicas = ddp.process_group

    def check(self, version: int) -> None:
        """Raise RuntimeError if ``stored`` has changed since ``version``."""
        if self.versions._version != version:
            raise RuntimeError(
                "the tables changed between a lookup and its backward: after apply_in_backward every backward pass is a"
                " step, so look up again after each, join losses that share a lookup, and checkpoint with"
                " use_reentrant=False"
            )


class _Pass:
    """The reads of one backward pass."""

    def __init__(self, collector: Collector, version: int) -> None:
        self.collector, self.version = collector, version
        self.reads: list[tuple[Read, Any]] = []

    def __call__(self) -> None:
        collector, reads = self.collector, self.reads
        collector.check(self.version)
        with unwatched():
            if collector.replicas is not None:
                reads = [_mean_of_replicas(*joined(reads, collector.stored), collector.replicas)]
                # DistributedDataParallel gives every parameter without a gradient one of zeros, in a callback before
                # this.
                _queue_callback(partial(setattr, collector.stored, "grad", None))
            update_(reads, collector.stored, collector.optimizer._next_rule(collector.stored))


class _Collected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stored: Tensor, vectors: Any, collector: Collector, read: Read, *matrices: Tensor) -> Any:
        if (ddp := DistributedDataParallel._active_ddp_module) is not None:  # set during its forward pass alone
            collector.join_replicas(ddp)
        ctx.collected = collector, read, collector.versions._version
        narrow, vectors = vectors if matrices else (None, vectors)
        inputs = read.batch[:3] if isinstance(read, Lookup) else (read, None, None)
        ctx.save_for_backward(*inputs, narrow, *matrices)
        kind = inputs[0].device.type
        ctx.in_float16 = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        if matrices:
            return vectors
        return vectors() if callable(vectors) else vectors.view_as(vectors)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, ...]:
        _refuse_create_graph()
        collector, read, version = ctx.collected
        _, _, _, narrow, *matrices = ctx.saved_tensors  # an error if one has been written into since
        to_vectors = grad if ctx.needs_input_grad[1] else None
        of_matrices: list[Tensor | None] = []
        if matrices:
            grad, of_matrices = split_gradient(grad, narrow, read.pieces, matrices, collector.stored.shape[1])
        if ctx.needs_input_grad[0] and _is_asked_for(ctx.next_functions[0][0]):
            if ctx.in_float16:
                raise RuntimeError(
                    "apply_in_backward must not be used under float16 autocast, whose losses GradScaler multiplies: its"
                    " steps would be as much too large; use bfloat16, or remove() its optimizer and call step()"
                )
            collector.collect(read, grad, version)
        return None, to_vectors, None, None, *of_matrices


def _is_asked_for(accumulator: torch.autograd.graph.Node) -> bool:
    """Whether the backward pass reaches ``stored``: not if it, or ``autograd.grad``, has only other ``inputs``."""
    try:
        return torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:
        raise RuntimeError(
            "autograd.grad must not be asked for the gradient of a table that apply_in_backward updates: remove() its"
            " optimizer first"
        ) from None


def _collect_grad(collector: "weakref.ref[Collector]", stored: Tensor) -> None:
    """Collect a gradient that comes from no lookup: from ``to_dense()``, ``weight`` or ``stored`` itself."""
    with unwatched():
        grad, owner = stored.grad, collector()
    if grad is None or owner is None:
        return
    stored.grad = None
    _refuse_create_graph()
    if grad.is_sparse:
        rows, values = grad._indices()[0], grad._values()
    else:
        rows, values = torch.arange(len(grad), device=grad.device), grad
    owner.collect(rows, values, owner.versions._version)


def _refuse_create_graph() -> None:
    """Raise RuntimeError in a backward pass that is to be differentiated."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("create_graph must be False: apply_in_backward leaves no gradient to differentiate")


def _mean_of_replicas(rows: Tensor, values: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Rows ``[N]`` and gradients ``[N, W]`` of all replicas, one after another, each as its share of the mean.

    Every replica sends equally many: those that have fewer add rows of -1, which no step moves.
    """
    replicas, most = dist.get_world_size(group), rows.new_tensor(len(rows))
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    missing = int(most) - len(rows)
    gathered = []
    for own in (F.pad(rows, (0, missing), value=-1), F.pad(values / replicas, (0, 0, 0, missing))):
        parts = [torch.empty_like(own) for _ in range(replicas)]
        dist.all_gather(parts, own, group)
        gathered.append(torch.cat(parts))
    return gathered[0], gathered[1]
