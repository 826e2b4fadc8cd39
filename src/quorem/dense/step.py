"""A training step of DLRM's or DCN's layers in few launches, for small batches (docs/appendix/dense_layers.md)."""

from typing import Any

import torch
from torch import Tensor, nn

from ..models.dcn import DCN
from ..models.dlrm import DLRM
from ..models.network import check_inputs
from ..ops.gpu.constants import on_device
from ..ops.state import Constants, DeviceScalar, SGDConstants
from . import interactions, rules
from .layers import PRECISION, BackwardPass, LayerUpdate, layer, layer_update


class FusedStep:
    """Forward and backward pass of a network, from the embedding vectors to the mean log loss, without autograd.

    The plain version is ``binary_cross_entropy_with_logits(model.logits(dense, vectors), labels).backward()`` and then
    ``optimizer.step()``. With an optimizer each layer's parameters are updated as soon as their gradients are complete;
    the gradients are never stored. The averages are kept in the optimizer's state, the number of steps in ``steps``.
    Other parameters of the optimizer are left to its own ``step``.

    Args:
        model: a ``DLRM`` or ``DCN``, on a GPU and in float32.
        optimizer: SGD, Adagrad or Adam of ``torch.optim`` or one of ``quorem.optim``, with one group; without one, each
            parameter gets a ``.grad``.
        precision: precision of the products, ``"float32"`` or ``"tf32"``.

    Raises:
        TypeError: if the model is not a DLRM or DCN, or the optimizer has no fused version.
        ValueError: if the optimizer has several groups, or an option without a fused version.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, precision: str = "float32"
    ) -> None:
        if not isinstance(model, DLRM | DCN):
            raise TypeError(f"model ({type(model).__name__}) must be a DLRM or a DCN")
        self.model, self.optimizer = model, optimizer
        self.precision = "tf32" if precision == "tf32" else PRECISION
        self.parameters = [p for name, p in model.named_parameters() if not name.startswith("embeddings.")]
        self.steps = torch.zeros((), dtype=torch.int64, device=model.output.weight.device)
        self.lr = DeviceScalar(self.steps.device)
        self.rule, self.constants, self.averages = _rule_of(optimizer)
        if optimizer is not None:
            for p in self.parameters:
                if not optimizer.state[p]:
                    optimizer.state[p].update(rules.initial_state(optimizer.defaults, p, self.averages))

    def __call__(self, dense: Tensor, vectors: Tensor, labels: Tensor, loss_sum: Tensor) -> Tensor:
        """Take one step on features ``[B, num_dense]``, embedding vectors, and labels ``[B]`` of any dtype.

        The mean loss is added to ``loss_sum``, a float64 scalar.

        Returns:
            The gradient of ``vectors``.

        Raises:
            ValueError: if shapes do not fit.
        """
        check_inputs(dense, vectors, self.model.num_dense, self.model.embedding_dims)
        if labels.shape != dense.shape[:1]:
            raise ValueError(f"labels has shape {tuple(labels.shape)} but must be [{len(dense)}]")
        if self.optimizer is None:
            for p in self.parameters:
                p.grad = p.new_empty(p.shape)
        else:
            self.lr.set(self.optimizer.param_groups[0]["lr"])
        backward = BackwardPass(
            rule=self.rule,
            lr=self.lr.tensor,
            constants=on_device(self.constants, self.steps.device),
            step=self.steps,
            paces=vectors.new_empty(2),
            losses=vectors.new_empty(len(vectors)),
            precision=self.precision,
        )
        with torch.no_grad():
            step = self._dlrm if isinstance(self.model, DLRM) else self._dcn
            gradient = step(backward, dense.contiguous(), vectors.contiguous(), labels, loss_sum)
        for p in self.parameters:
            torch.autograd.graph.increment_version(p)
        return gradient.view(vectors.shape)

    def _dlrm(self, backward: BackwardPass, dense: Tensor, vectors: Tensor, labels: Tensor, loss_sum: Tensor) -> Tensor:
        model: Any = self.model
        vectors = vectors.view(len(vectors), -1, model.embedding_dim)
        bottom, top = _linear(model.bottom), _linear(model.top)
        lows = self._forward(dense, bottom)
        low = lows[-1] if bottom else None
        highs = self._forward(interactions.interact(low, vectors, dense if model.raw_dense and bottom else low), top)
        dlogits, grad = backward.output(highs[-1], model.output.weight, model.output.bias, labels)
        update = self._update(dlogits, highs[-1], model.output)
        grad, update = self._backward(backward, grad, top, highs, update)
        dfeatures = backward.through_layer(grad, top[0].weight, None, update)
        dlow, dvectors = interactions.interact_backward(dfeatures, low, vectors, model.raw_dense)
        update = self._update(grad, highs[0], top[0])
        if dlow is None:
            backward.finish(update, None, loss_sum)
        else:
            grad, update = self._backward(backward, dlow, bottom, lows, update)
            backward.finish(update, self._update(grad, dense, bottom[0]), loss_sum)
        return dvectors

    def _dcn(self, backward: BackwardPass, dense: Tensor, vectors: Tensor, labels: Tensor, loss_sum: Tensor) -> Tensor:
        model: Any = self.model
        deep, width = _linear(model.deep), model.cross_weight.shape[1]
        to_cross, to_deep = model.output.weight[0, :width], model.output.weight[:, width:]
        x0, cross = interactions.cross(dense, vectors.flatten(1), model.cross_weight, model.cross_bias, to_cross)
        highs = self._forward(x0, deep)
        dlogits, grad = backward.output(highs[-1], to_deep, model.output.bias, labels, cross)
        update = self._update(dlogits, highs[-1], model.output, width)
        grad, update = self._backward(backward, grad, deep, highs, update)
        first = dense.shape[1]  # the gradient of the dense features is not needed
        cross_inputs = (cross.shares, model.cross_weight[:, first:], to_cross[first:])
        dvectors = backward.through_layer(grad, deep[0].weight[:, first:], None, update, cross_inputs)
        weight, bias = self._with_state(model.cross_weight), self._with_state(model.cross_bias)
        output = [t[0] for t in self._with_state(model.output.weight)]
        interactions.cross_backward(backward, x0, cross, weight, bias, output)
        backward.finish(self._update(grad, x0, deep[0]), None, loss_sum)
        return dvectors

    def _forward(self, x: Tensor, layers: list[nn.Linear]) -> list[Tensor]:
        """The input of the first layer, then the output of each layer."""
        values = [x]
        for linear in layers:
            values.append(layer(values[-1], linear.weight, linear.bias, self.precision))
        return values

    def _backward(
        self,
        backward: BackwardPass,
        grad: Tensor,
        layers: list[nn.Linear],
        values: list[Tensor],
        update: LayerUpdate,
    ) -> tuple[Tensor, LayerUpdate]:
        """Backward through the layers above the first.

        Returns:
            The gradient of the input of the first ReLU, and the pending update of the layer above it.
        """
        for linear, below in zip(layers[:0:-1], values[-2:0:-1], strict=True):
            dinput = backward.through_layer(grad, linear.weight, below, update)
            update = self._update(grad, below, linear)
            grad = dinput
        return grad, update

    def _update(self, grad: Tensor, x: Tensor, linear: nn.Linear, first: int = 0) -> LayerUpdate:
        """The update of a layer's bias and of its weight from column ``first`` on."""
        weight = [t[:, first:] for t in self._with_state(linear.weight)]
        return layer_update(grad, x, weight, self._with_state(linear.bias))

    def _with_state(self, p: Tensor) -> list[Tensor]:
        """A parameter and its three tensors, as in ``LayerUpdate``."""
        state: list[Any] = [p.grad]
        if self.optimizer is not None:
            state = [self.optimizer.state[p][name] for name in self.averages]
        return [p, *state, *[p] * (3 - len(state))]


def _linear(layers: nn.Sequential) -> list[nn.Linear]:
    return [linear for linear in layers if isinstance(linear, nn.Linear)]


def _rule_of(optimizer: torch.optim.Optimizer | None) -> tuple[str, Constants, tuple[str, ...]]:
    """The rule's name, its constants, and the names of its averages."""
    if optimizer is None:
        return "none", SGDConstants(), ()
    torch_class = getattr(optimizer, "torch_class", type(optimizer))  # quorem.optim's classes have it
    if torch_class not in rules.RULE_OF_CLASS:
        raise TypeError(f"optimizer ({type(optimizer).__name__}) must be torch.optim's SGD, Adagrad or Adam")
    if len(optimizer.param_groups) != 1:
        raise ValueError(f"optimizer has {len(optimizer.param_groups)} groups but must have one")
    (group,) = optimizer.param_groups
    for name in rules.UNSUPPORTED:
        if group.get(name):
            raise ValueError(f"{name} ({group[name]}) of the optimizer must be 0 or False")
    return rules.rule_of(torch_class, group)
