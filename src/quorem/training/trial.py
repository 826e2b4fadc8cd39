"""A model in training: its step, run directly or as a CUDA graph, and the state from which training can be resumed."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import optim
from ..data.batches import Batch
from ..dense.limits import can_fuse
from ..quantize import quantize_
from ..tables import Tables
from .config import RunConfig
from .model import logits_of

if TYPE_CHECKING:
    from ..dense.step import FusedStep

OPTIMIZER_CLASSES = {"adagrad": optim.Adagrad, "amsgrad": optim.AMSGrad}
WARM_UP = 3  # steps before a graph is captured, in which kernels are compiled and memory is allocated
STEPS_PER_GRAPH = 10  # steps per graph, so that filling its buffers and launching it costs little per step

capturing = threading.Lock()  # while a graph is captured, no other run may capture, warm up or draw random numbers


@dataclass
class Captured:
    """One or more steps as a CUDA graph over buffers; ``graph`` is None during the steps before the capture."""

    buffers: Batch
    steps_before: int
    graph: torch.cuda.CUDAGraph | None = None


class Trial:
    """One model, its optimizers and its step.

    Tables are updated within the backward pass, so their gradients are never stored. All other parameters have a
    separate, fused optimizer: torch's on a CPU, that of ``quorem.optim`` on a GPU. If the network has a fused step
    (``dense.limits.can_fuse``: on a GPU, at small batch sizes), its layers are updated within the backward pass too,
    and the optimizer only holds their state.

    Args:
        config: optimizer, learning rate, batch size and precision.
        model: a network of ``models``, or a custom one.
        names: names of the categorical features, in order.

    Raises:
        ValueError: if the device does not support the precision.
    """

    def __init__(self, config: RunConfig, model: nn.Module, names: list[str]) -> None:
        self.config, self.model, self.names = config, model, names
        self.embeddings = next(module for module in model.modules() if isinstance(module, Tables))
        self.device = self.embeddings.stored.device
        if config.precision == "tf32" and self.device.type != "cuda":
            raise ValueError(f"precision ('tf32') must be 'float32' or 'bfloat16' on {self.device.type}")
        lr = config.learning_rate
        self.tables = optim.apply_in_backward(self.embeddings, OPTIMIZER_CLASSES[config.optimizer], lr=lr)
        dense_parameters = [p for p in model.parameters() if p is not self.embeddings.stored]
        self.steps = 0
        self.dense: torch.optim.Optimizer
        if self.device.type == "cuda":
            self.dense = OPTIMIZER_CLASSES[config.optimizer](dense_parameters, lr=lr)
        elif config.optimizer == "adagrad":
            self.dense = torch.optim.Adagrad(dense_parameters, lr=lr, fused=True)
        else:
            self.dense = torch.optim.Adam(dense_parameters, lr=lr, amsgrad=True, fused=True)
        self.layers: FusedStep | None = None
        if config.precision != "bfloat16" and can_fuse(model, config.batch_size):
            from ..dense import step  # needs Triton

            self.layers = step.FusedStep(model, self.dense, config.precision)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)  # since mean_loss was last called
        self._captured: dict[int, Captured] = {}  # by number of rows

    def begin(self, step: int, progress: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Called before the first step with the restored step and progress; returns those that all ranks agree on."""
        return step, progress

    def agreed(self, *flags: bool) -> tuple[bool, ...]:
        """The flags combined over all ranks: each is set if it is set on any rank."""
        return flags

    def gather(self) -> None:
        """Bring ``model`` up to date if ranks hold parts of it."""

    @property
    def together(self) -> int:
        """The best number of batches to pass to ``step`` at a time."""
        return STEPS_PER_GRAPH if self.device.type == "cuda" else 1

    def step(self, batches: Batch) -> int:
        """Train on a batch, or on several in sequence; on a GPU as captured graphs, after a few direct steps.

        Returns:
            The number of steps.
        """
        size, before = self.config.batch_size, self.steps
        plain = self.device.type != "cuda" or torch.are_deterministic_algorithms_enabled() or bool(batches.bags)
        plain = plain or bool(self.embeddings.bits)  # the step on rows of 8 bits waits for the GPU
        if not plain and len(batches) == STEPS_PER_GRAPH * size:
            self._replay(batches)
        else:
            for batch in batches.batches(size) if len(batches) > size else [batches]:
                if plain or len(batch) < size:
                    self._step(batch)
                    self.steps += 1
                else:
                    self._replay(batch)
        return self.steps - before

    def _step(self, batch: Batch) -> None:
        if self.layers is not None:
            vectors = self.layers.model.embeddings(*batch.embedding_inputs(self.names))
            self.dense.zero_grad()
            vectors.backward(self.layers(batch.dense, vectors.detach(), batch.labels, self.loss_sum))
            self.dense.step()  # updates what is not a layer: path networks
            return
        loss = F.binary_cross_entropy_with_logits(self.logits(batch), batch.labels.float())
        self.dense.zero_grad()
        loss.backward()
        self.dense.step()
        self.loss_sum += loss.detach()

    def logits(self, batch: Batch) -> Tensor:
        """Logits ``[B]`` as float32."""
        return logits_of(self.model, batch, self.names, self.config.precision)

    def quantize_(self, bits: int) -> None:
        """Store the rows of the tables in 8 or 4 bits; no step may follow."""
        self.tables.remove()
        if self.embeddings.bits != bits:
            quantize_(self.embeddings, 8 if bits == 8 else 4)

    def mean_loss(self, steps: int) -> float:
        """Mean loss of the last ``steps`` steps, which must be all steps since the last call."""
        mean = float(self.loss_sum) / steps
        self.loss_sum.zero_()
        return mean

    def _replay(self, batches: Batch) -> None:
        """Train on full batches by replaying their graph; before it is captured, run directly on a side stream."""
        captured = self._captured.get(len(batches))
        if captured is None:
            captured = Captured(batches.take(torch.arange(len(batches), device=self.device)), WARM_UP)
            self._captured[len(batches)] = captured
        else:
            for name in ("labels", "dense", "ids"):
                getattr(captured.buffers, name).copy_(getattr(batches, name), non_blocking=True)
        steps = len(batches) // self.config.batch_size
        self.steps += steps
        if captured.graph is not None:
            captured.graph.replay()
            return
        with capturing:
            stream = torch.cuda.Stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                self._run(captured.buffers)
            torch.cuda.current_stream(self.device).wait_stream(stream)
            captured.steps_before -= steps
            if captured.steps_before <= 0:
                self.dense.zero_grad()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._run(captured.buffers)
                captured.graph = graph

    def _run(self, batches: Batch) -> None:
        for batch in batches.batches(self.config.batch_size):
            self._step(batch)

    def tensors(self) -> dict[str, Tensor]:
        """The complete state of training, by name. Rows that lag behind are saved as they are, with their state."""
        stored = self.embeddings.live_stored
        rows = {f"model.embeddings.{name}": table for name, table in self.embeddings.named_tables(stored.detach())}
        layers = {f"model.{name}": p.detach() for name, p in self.model.named_parameters() if p is not stored}
        state = {f"tables.{i}": tensor for i, tensor in enumerate(self.tables.live_state()[stored])}
        for values in self.dense.state.values():
            values["step"].fill_(self.steps)  # not counted for layers that are updated in backward
        dense = {
            f"dense.{i}.{key}": value
            for i, values in self.dense.state_dict()["state"].items()
            for key, value in values.items()
        }
        random = {"random.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return rows | layers | state | dense | random | {"loss_sum": self.loss_sum}

    @torch.no_grad()
    def restore(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that ``tensors`` returned after a step; call it before the first step.

        Raises:
            ValueError: if a tensor is missing or has another shape.
        """
        by_parameter: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("dense."):
                _, i, key = name.split(".")
                by_parameter.setdefault(int(i), {})[key] = tensor
        self.dense.load_state_dict({**self.dense.state_dict(), "state": by_parameter})
        self.steps = step
        if self.layers is not None:
            self.layers.steps.fill_(self.steps)
        for name, target in self.tensors().items():
            if name not in tensors or tensors[name].shape != target.shape:
                shape = tuple(tensors[name].shape) if name in tensors else "missing"
                raise ValueError(f"{name} is {shape} in the checkpoint and must be {tuple(target.shape)}")
            if not name.startswith(("random.", "dense.")):
                target.copy_(tensors[name])
        self.tables.note_rows()
        torch.set_rng_state(tensors["random.cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random.cuda"], self.device)
