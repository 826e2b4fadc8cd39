"""A model in training: its step, run directly or as a CUDA graph, and the state from which training can be resumed.

On a GPU the loss and the optimizer of the network are compiled, so that a captured step at a small batch size has few
launches. Runs whose networks have the same shapes share the compiled code.
"""

import math
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from .. import optim
from ..data.batches import Batch
from ..modules.lookup import Tables
from ..modules.quantize import quantize_
from ..ops.lagging import in_memory
from .config import RunConfig
from .model import autocast, logits_of
from .processes import average_gradients_, num_processes, share_of

WARM_UP = 3  # steps before a graph is captured, in which kernels are compiled and memory is allocated
STEPS_PER_GRAPH = 10  # steps per graph, so that filling its buffers and launching it costs little per step

capturing = threading.Lock()  # while a graph is captured, no other run may capture, warm up or draw random numbers


class Trial:
    """One model, its optimizers and its step.

    Tables are updated within the backward pass, so their gradients are never stored. All other parameters have torch's
    optimizer. On a GPU the network's loss and that optimizer are compiled and captured, unless algorithms must be
    deterministic, or several processes train together. ``names`` are those of the categorical features, in order.
    """

    def __init__(self, config: RunConfig, model: nn.Module, names: list[str]) -> None:
        self.config, self.model, self.names = config, model, names
        self.embeddings = next(module for module in model.modules() if isinstance(module, Tables))
        self.device = self.embeddings.stored.device
        options: dict[str, Any] = {"lr": config.learning_rate}
        if config.state_dtype != "float32":
            options["state_dtype"] = config.state_dtype
        self.tables = optim.apply_in_backward(self.embeddings, optim.CLASSES[config.optimizer], **options)
        self.layers = [p for p in model.parameters() if p is not self.embeddings.stored]
        self.dense = dense_optimizer(config, self.layers)
        self.steps = 0
        alone, deterministic = num_processes() == 1, torch.are_deterministic_algorithms_enabled()
        self.compiles = self.device.type == "cuda" and alone and not deterministic
        if not alone:
            assert self.embeddings.updates.collector is not None
            self.embeddings.updates.collector.replicas = dist.group.WORLD  # gradients of rows are exchanged
        self._compiled_loss = compiled_loss(model) if self.compiles else None
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)  # since mean_loss was last called
        self.best: dict[str, Tensor] = {}  # the model after the best epoch so far
        self._captured: dict[int, CapturedSteps] = {}  # by number of rows

    @property
    def together(self) -> int:
        """The best number of batches to pass to ``step`` at a time."""
        return STEPS_PER_GRAPH if self.compiles else 1

    def step(self, batches: Batch) -> None:
        """Train on a batch, or on several in sequence; on a GPU as captured graphs, after a few direct steps."""
        size, rows = self.config.batch_size, len(batches)
        captures = self.compiles and not batches.bags  # a graph has fixed sizes, and bags do not
        is_one = rows <= size or (captures and rows == STEPS_PER_GRAPH * size)
        for part in [batches] if is_one else batches.batches(size):
            if captures and len(part) >= size:
                if len(part) not in self._captured:
                    self._captured[len(part)] = CapturedSteps(part)
                self._captured[len(part)].run(self, part)
            else:
                self._step(part)
        self.steps += math.ceil(rows / size)

    def _step(self, batch: Batch) -> None:
        loss = self._loss(batch)
        self.dense.zero_grad()
        processes = num_processes()
        (loss if processes == 1 else loss * processes).backward()  # gradients are averaged over processes
        average_gradients_(self.layers)
        if self.compiles:
            update_(self.dense)
        else:
            self.dense.step()
        total = loss.detach()
        if processes > 1:
            dist.all_reduce(total)
        self.loss_sum += total

    def _loss(self, batch: Batch) -> Tensor:
        """The mean loss of a batch; with several processes, this one's share of it."""
        if self._compiled_loss is None or len(batch) != self.config.batch_size:  # one size is compiled
            share = share_of(batch)
            logits = self.logits(share)
            return F.binary_cross_entropy_with_logits(logits, share.labels.float(), reduction="sum") / len(batch)
        vectors = self.model.embeddings(*batch.embedding_inputs(self.names))  # type: ignore[operator]
        with autocast(self.device, self.config.precision):
            return self._compiled_loss(batch.dense, vectors, batch.labels)

    def logits(self, batch: Batch) -> Tensor:
        """Logits ``[B]`` as float32."""
        return logits_of(self.model, batch, self.names, self.config.precision)

    def quantize_(self, bits: int) -> None:
        """Store the rows of the tables in 8 or 4 bits; no step may follow."""
        self.tables.remove()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* no longer trains the tables")
            quantize_(self.embeddings, 8 if bits == 8 else 4)

    def keep_best(self) -> None:
        self.best = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def restore_best(self) -> None:
        """Give the model the values that ``keep_best`` remembered; no step may follow."""
        self.tables.flush()
        self.tables.remove()
        self.model.load_state_dict(self.best)

    def mean_loss(self, steps: int) -> float:
        """Mean loss of the last ``steps`` steps, which must be all steps since the last call."""
        mean = float(self.loss_sum) / steps
        self.loss_sum.zero_()
        return mean

    def tensors(self) -> dict[str, Tensor]:
        """The complete state of training, by name. Rows that lag behind are saved as they are, with their state."""
        stored = self.embeddings.live_stored
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        parts: dict[str, dict[str, Tensor]] = {
            "model": {name: in_memory(p) for name, p in self.model.named_parameters()},
            "tables": {f"{i}": tensor for i, tensor in enumerate(self.tables.live_state()[stored])},
            "dense": {
                f"{i}.{key}": value
                for i, values in self.dense.state_dict()["state"].items()
                for key, value in values.items()
                if key != "step" and isinstance(value, Tensor)  # the step is the trial's
            },
            "best": self.best,
            "random": random,
            "loss": {"sum": self.loss_sum},
        }
        return {f"{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}

    @torch.no_grad()
    def restore(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that ``tensors`` returned after a step; call it before the first step."""
        by_parameter: dict[int, dict[str, Tensor]] = {}
        for full_name, tensor in tensors.items():
            part, _, name = full_name.partition(".")
            if part == "best":
                self.best[name] = tensor.to(self.device)
            elif part == "dense":
                i, key = name.split(".")
                _check_same(full_name, tensor, self.layers[int(i)])
                by_parameter.setdefault(int(i), {"step": torch.tensor(float(step))})[key] = tensor
        self.dense.load_state_dict({**self.dense.state_dict(), "state": by_parameter})
        self.steps = step
        for name, target in self.tensors().items():
            _check_same(name, tensors.get(name), target)
            if not name.startswith(("random.", "dense.", "best.")):
                target.copy_(tensors[name])
        torch.set_rng_state(tensors["random.cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random.cuda"], self.device)


def _check_same(name: str, tensor: Tensor | None, target: Tensor) -> None:
    """Raise ValueError unless a checkpoint's tensor can be copied to ``target`` as it is, without a conversion."""
    if tensor is None:
        raise ValueError(f"{name} is missing in the checkpoint")
    if (tensor.dtype, tensor.shape) != (target.dtype, target.shape):
        stored, expected = (f"{each.dtype} {list(each.shape)}" for each in (tensor, target))
        raise ValueError(f"{name} is {stored} in the checkpoint and must be {expected}")


class CapturedSteps:
    """Steps on full batches of one number of rows as a CUDA graph over buffers.

    The first few run directly, on a side stream; then the graph is captured, and later ones replay it.
    """

    def __init__(self, batches: Batch) -> None:
        self.buffers = batches.take(torch.arange(len(batches), device=batches.labels.device))
        self.direct_steps = WARM_UP
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, trial: Trial, batches: Batch) -> None:
        for name in ("labels", "dense", "ids"):
            getattr(self.buffers, name).copy_(getattr(batches, name), non_blocking=True)
        if self.graph is not None:
            self.graph.replay()
            return
        with capturing:
            stream = torch.cuda.Stream(trial.device)
            stream.wait_stream(torch.cuda.current_stream(trial.device))
            with torch.cuda.stream(stream):
                self._steps(trial)
            torch.cuda.current_stream(trial.device).wait_stream(stream)
            if self.direct_steps <= 0:
                trial.dense.zero_grad()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._steps(trial)
                self.graph = graph

    def _steps(self, trial: Trial) -> None:
        for batch in self.buffers.batches(trial.config.batch_size):
            trial._step(batch)
            self.direct_steps -= 1


def compiled_loss(model: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """The compiled mean log loss of dense features, vectors and labels; None if the model has no such ``logits``."""
    if not (callable(getattr(model, "logits", None)) and hasattr(model, "embeddings")):
        return None

    def loss(dense: Tensor, vectors: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = model.logits(dense, vectors)  # type: ignore[operator]
        return F.binary_cross_entropy_with_logits(logits.float(), labels.float())

    return torch.compile(loss, dynamic=False)


def dense_optimizer(config: RunConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's optimizer for parameters with dense gradients. On a GPU ``update_`` takes its step."""
    torch_class, on_gpu = optim.CLASSES[config.optimizer].torch_class, any(p.is_cuda for p in parameters)
    fused = not (on_gpu and torch_class is torch.optim.Adagrad)
    options = {"fused": fused, "capturable": on_gpu, "amsgrad": config.optimizer == "amsgrad"}
    known = torch_class([torch.empty(0)]).defaults
    taken = {name: value for name, value in options.items() if name in known}
    return torch_class(parameters, lr=config.learning_rate, **taken)


def update_(optimizer: torch.optim.Optimizer) -> None:
    """Take a step that a CUDA graph can capture; Adagrad's is compiled to one launch, and does not count its steps."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        optimizer.step()
        return
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        sums = [optimizer.state[p]["sum"] for p in parameters]
        _compiled_adagrad()(parameters, [p.grad for p in parameters], sums, group["lr"], group["eps"])


@torch.no_grad()
def adagrad_(parameters: list[Tensor], grads: list[Tensor], sums: list[Tensor], lr: float, eps: float) -> None:
    """The update of ``torch.optim.Adagrad`` without decay of weights or learning rate."""
    torch._foreach_addcmul_(sums, grads, grads)
    roots = torch._foreach_sqrt(sums)
    torch._foreach_add_(roots, eps)
    torch._foreach_addcdiv_(parameters, grads, roots, -lr)


@cache
def _compiled_adagrad() -> Callable[..., None]:
    return torch.compile(adagrad_, dynamic=False)  # here because it imports the compiler
