"""A training step of DLRM's or DCN's layers in few launches, for a GPU at a small batch (docs/kernels.md)."""

from typing import Any

import torch
from torch import Tensor, nn

from ..ops import gpu, torch_rules
from ..ops.state import DeviceScalar
from .dcn import DCN
from .dlrm import DLRM
from .mlp import check_inputs

LARGEST_BATCH = 1024  # beyond it the products, which cuBLAS does better, take longer than the launches


def can_fuse(model: nn.Module, batch_size: int) -> bool:
    """Whether ``FusedStep`` takes the model and is the faster way: on a GPU, in float32, at a small batch."""
    if type(model) not in (DLRM, DCN) or batch_size > LARGEST_BATCH or "lookup" not in gpu.kernels():
        return False
    if any(not p.is_cuda or p.dtype != torch.float32 for p in model.parameters()):
        return False
    from ..ops.gpu import networks

    assert isinstance(model, DLRM | DCN)
    if model.output.in_features > networks.WIDEST_INPUT:
        return False
    if isinstance(model, DLRM):
        return model.num_vectors <= networks.MOST_VECTORS and model.embedding_dim <= networks.WIDEST
    return len(model.cross_weight) < networks.MOST_LAYERS


class FusedStep:
    """Forward and backward pass of a network, from its vectors to the mean log loss and back, without autograd.

    The plain version is ``binary_cross_entropy_with_logits(model.logits(dense, vectors), labels).backward()`` and then
    ``optimizer.step()``. With an optimizer each layer's parameters are updated as soon as their gradients are complete,
    which are never stored. Its state is kept in the optimizer, the number of steps in ``steps``. Other parameters that
    it holds are left to its own ``step``.

    Args:
        model: a ``DLRM`` or ``DCN``, on a GPU and in float32.
        optimizer: SGD, Adagrad or Adam of ``torch.optim`` or one of ``quorem.optim``, with one group; without one, each
            parameter gets a ``.grad``.
        precision: of the products, ``"float32"`` or ``"tf32"``.

    Raises:
        TypeError: if the model is another, or the optimizer has no fused version.
        ValueError: if it has several groups, or an option without a fused version.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, precision: str = "float32"
    ) -> None:
        from ..ops.gpu import dense

        if not isinstance(model, DLRM | DCN):
            raise TypeError(f"model ({type(model).__name__}) must be a DLRM or a DCN")
        self.model, self.optimizer = model, optimizer
        self.precision = "tf32" if precision == "tf32" else dense.PRECISION
        self.parameters = [p for name, p in model.named_parameters() if not name.startswith("embeddings.")]
        self.steps = torch.zeros((), dtype=torch.int64, device=model.output.weight.device)
        self.lr = DeviceScalar(self.steps.device)
        self.rule, self.hyper, self.averages = _rule_of(optimizer)
        if optimizer is not None:
            for p in self.parameters:
                _start(optimizer, p, self.averages)

    def __call__(self, dense: Tensor, vectors: Tensor, labels: Tensor, loss_sum: Tensor) -> Tensor:
        """One step on features ``[B, num_dense]``, the embeddings' vectors and labels ``[B]`` of any dtype.

        The mean loss is added to ``loss_sum``, a float64 scalar.

        Returns:
            The gradient of ``vectors``.

        Raises:
            ValueError: if shapes do not fit.
        """
        from ..ops.gpu.constants import on_device
        from ..ops.gpu.dense import Pass

        check_inputs(dense, vectors, self.model.num_dense, self.model.embedding_dims)
        if labels.shape != dense.shape[:1]:
            raise ValueError(f"labels has shape {tuple(labels.shape)} but must be [{len(dense)}]")
        if self.optimizer is None:
            for p in self.parameters:
                p.grad = p.new_empty(p.shape)
        else:
            self.lr.set(self.optimizer.param_groups[0]["lr"])
        shared = (self.rule, self.lr.tensor, on_device(self.hyper, self.steps.device), self.steps)
        now = Pass(*shared, vectors.new_empty(2), vectors.new_empty(len(vectors)), self.precision)
        with torch.no_grad():
            step = self._dlrm if isinstance(self.model, DLRM) else self._dcn
            gradient = step(now, dense.contiguous(), vectors.contiguous(), labels, loss_sum)
        for p in self.parameters:
            torch.autograd.graph.increment_version(p)
        return gradient.view(vectors.shape)

    def _dlrm(self, now: Any, dense: Tensor, vectors: Tensor, labels: Tensor, loss_sum: Tensor) -> Tensor:
        from ..ops.gpu import networks

        model: Any = self.model
        vectors = vectors.view(len(vectors), -1, model.embedding_dim)
        bottom, top = _linear(model.bottom), _linear(model.top)
        lows = self._up(dense, bottom)
        low = lows[-1] if bottom else None
        highs = self._up(networks.interact(low, vectors, dense if model.raw_dense and bottom else low), top)
        dlogits, grad = now.output(highs[-1], model.output.weight, model.output.bias, labels)
        grad, job = self._down(now, grad, top, highs, self._job(dlogits, highs[-1], model.output))
        dfeatures = now.backward(grad, top[0].weight, None, job)
        dlow, dvectors = networks.interact_backward(dfeatures, low, vectors, model.raw_dense)
        job = self._job(grad, highs[0], top[0])
        if dlow is None:
            now.last(job, None, loss_sum)
        else:
            grad, job = self._down(now, dlow, bottom, lows, job)
            now.last(job, self._job(grad, dense, bottom[0]), loss_sum)
        return dvectors

    def _dcn(self, now: Any, dense: Tensor, vectors: Tensor, labels: Tensor, loss_sum: Tensor) -> Tensor:
        from ..ops.gpu import networks

        model: Any = self.model
        deep, width = _linear(model.deep), model.cross_weight.shape[1]
        to_cross, to_deep = model.output.weight[0, :width], model.output.weight[:, width:]
        x0, cross = networks.cross(dense, vectors.flatten(1), model.cross_weight, model.cross_bias, to_cross)
        highs = self._up(x0, deep)
        dlogits, grad = now.output(highs[-1], to_deep, model.output.bias, labels, cross)
        grad, job = self._down(now, grad, deep, highs, self._job(dlogits, highs[-1], model.output, width))
        first = dense.shape[1]  # nothing asks for the gradient of the dense features
        read = (cross.shares, model.cross_weight[:, first:], to_cross[first:])
        dvectors = now.backward(grad, deep[0].weight[:, first:], None, job, read)
        output = [t[0] for t in self._with_state(model.output.weight)]
        own = (self._with_state(model.cross_weight), self._with_state(model.cross_bias), output)
        networks.cross_backward(now, x0, cross, *own)
        now.last(self._job(grad, x0, deep[0]), None, loss_sum)
        return dvectors

    def _up(self, x: Tensor, layers: list[nn.Linear]) -> list[Tensor]:
        """The input of the first layer, and the output of each."""
        from ..ops.gpu.dense import layer

        values = [x]
        for linear in layers:
            values.append(layer(values[-1], linear.weight, linear.bias, self.precision))
        return values

    def _down(
        self, now: Any, grad: Tensor, layers: list[nn.Linear], values: list[Tensor], job: Any
    ) -> tuple[Tensor, Any]:
        """From the gradient of what came into the last ReLU to that of the first; and the job that is due next."""
        for linear, below in zip(layers[:0:-1], values[-2:0:-1], strict=True):
            down = now.backward(grad, linear.weight, below, job)
            job = self._job(grad, below, linear)
            grad = down
        return grad, job

    def _job(self, grad: Tensor, x: Tensor, layer: nn.Linear, first: int = 0) -> Any:
        """A layer's weight, from its column ``first`` on, and bias."""
        from ..ops.gpu.dense import job

        return job(grad, x, [t[:, first:] for t in self._with_state(layer.weight)], self._with_state(layer.bias))

    def _with_state(self, p: Tensor) -> list[Tensor]:
        """A parameter and three tensors like it: the rule's averages, or its gradient, and itself for what is not."""
        own: list[Any] = [self.optimizer.state[p][n] for n in self.averages] if self.optimizer is not None else [p.grad]
        return [p, *own, *[p] * (3 - len(own))]


def _linear(layers: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in layers if isinstance(layer, nn.Linear)]


def _rule_of(optimizer: torch.optim.Optimizer | None) -> tuple[str, tuple[float, ...], tuple[str, ...]]:
    """The rule's name, its constants in the order of ``ops.update``, and the names of its averages."""
    if optimizer is None:
        return "none", (), ()
    torch_class = getattr(optimizer, "torch_class", type(optimizer))  # quorem.optim's say whose steps they take
    if torch_class not in torch_rules.RULES:
        raise TypeError(f"optimizer ({type(optimizer).__name__}) must be torch.optim's SGD, Adagrad or Adam")
    if len(optimizer.param_groups) != 1:
        raise ValueError(f"optimizer has {len(optimizer.param_groups)} groups but must have one")
    (group,) = optimizer.param_groups
    for name in torch_rules.UNSUPPORTED:
        if group.get(name):
            raise ValueError(f"{name} ({group[name]}) of the optimizer must be 0 or False")
    return torch_rules.rule_of(torch_class, group)


def _start(optimizer: torch.optim.Optimizer, p: Tensor, averages: tuple[str, ...]) -> None:
    """Give a parameter the state that torch would give it in its first step."""
    if not optimizer.state[p]:
        optimizer.state[p].update(torch_rules.fresh(optimizer.defaults, p, averages))
