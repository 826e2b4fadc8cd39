"""The part of a step outside the tables: the network's loss, and the optimizer of its parameters.

On a GPU both are compiled, so that a captured step at a small batch size has few launches. Runs whose networks have the
same shapes share the compiled code.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import optim
from .config import RunConfig

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def compiled_loss(model: nn.Module) -> Loss | None:
    """The compiled mean log loss of dense features, vectors and labels; None if the model has no such ``logits``."""
    if not (callable(getattr(model, "logits", None)) and hasattr(model, "embeddings")):
        return None

    def loss(dense: Tensor, vectors: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = model.logits(dense, vectors)  # type: ignore[operator]
        return F.binary_cross_entropy_with_logits(logits.float(), labels.float())

    return torch.compile(loss, dynamic=False)


def dense_optimizer(config: RunConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's optimizer for parameters with dense gradients. On a GPU ``update_`` takes its step."""
    torch_class, lr = optim.CLASSES[config.optimizer].torch_class, config.learning_rate
    on_gpu = any(p.is_cuda for p in parameters)
    if torch_class is torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=lr, fused=True)
    if torch_class is torch.optim.Adagrad:
        return torch.optim.Adagrad(parameters, lr=lr, fused=not on_gpu)
    options: dict[str, Any] = {"amsgrad": config.optimizer == "amsgrad", "fused": True, "capturable": on_gpu}
    return torch_class(parameters, lr=lr, **options)


def update_(optimizer: torch.optim.Optimizer) -> None:
    """Take a step that a CUDA graph can capture.

    torch's Adagrad without options is five launches for its update, of a few large blocks each; compiled, it is one.
    Its count of steps has no effect on the update and is not increased.
    """
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
