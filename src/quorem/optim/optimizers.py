"""The optimizers: each applies a rule of ``ops.rules`` and has the arguments of its ``torch.optim`` class."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..ops import replay
from ..ops.state import NARROW, AdagradConstants, check_state_dtype
from ..optimizer_names import StateDtype
from .row_optimizer import RowOptimizer


class SGD(RowOptimizer):
    """``torch.optim.SGD`` at the cost of the touched rows: exact, since a row without a gradient does not move.

    Args:
        params: as in ``torch.optim``.
        lr: learning rate; a scheduler may change it at any step.
        momentum: for parameters with dense gradients; must be 0 for tables.
        weight_decay: for parameters with dense gradients; must be 0 for tables.
        nesterov: whether the momentum is Nesterov's.

    >>> from quorem import QR, Embedding
    >>> table = Embedding(1000, 16, QR(num_collisions=4), sparse=True)
    >>> optimizer = SGD(table.parameters(), lr=0.1)
    """

    torch_class, rule, moves_every_row = torch.optim.SGD, "sgd", ("momentum", "weight_decay")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        *,
        weight_decay: float = 0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)


class Adagrad(RowOptimizer):
    """``torch.optim.Adagrad`` at the cost of the touched rows: exact, since a row without a gradient does not move.

    Args:
        params: as in ``torch.optim``.
        lr: learning rate.
        lr_decay: learning rate decay.
        weight_decay: for parameters with dense gradients; must be 0 for tables.
        initial_accumulator_value: initial value of the sums of squares.
        eps: added to the denominator.
        state_dtype: how tables keep a sum of squares: ``"float32"`` (float64 for float64 tables), ``"bfloat16"``, or
            ``"log8"``, one byte on a logarithmic scale; the last two are rounded at random (``ops.rounding``).
            Parameters of networks keep torch's state.

    Raises:
        ValueError: if ``state_dtype`` is unknown, or not ``"float32"`` for tables in float64.

    >>> from quorem import QR, Embedding
    >>> table = Embedding(1000, 16, QR(num_collisions=4), sparse=True)
    >>> optimizer = Adagrad(table.parameters(), lr=0.01)
    """

    torch_class, rule = torch.optim.Adagrad, "adagrad"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        state_dtype: StateDtype = "float32",
    ) -> None:
        check_state_dtype(self.rule, torch.float32, state_dtype)
        self.state_dtype = state_dtype
        super().__init__(
            params,
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )

    def _constants(self, group: dict[str, Any], p: Tensor) -> Any:
        return AdagradConstants(float(group["lr_decay"]), float(group["eps"]))

    def _is_by_row(self, p: Tensor) -> bool:
        total = self.state.get(p, {}).get("sum")  # a loaded one may be what torch does not have
        loaded = total is not None and (total.shape != p.shape or total.dtype in {*NARROW} - {p.dtype})
        return super()._is_by_row(p) or loaded

    def _init_dense_state(self, p: Tensor) -> None:
        self.state[p].update(torch.optim.Adagrad([p], **self.defaults).state[p])


class RowWiseAdagrad(Adagrad):
    """Adagrad with one accumulator per row, the sum of the row's mean squared gradients: 1 / D of the state.

    The arguments are those of ``Adagrad``; ``state_dtype`` must be ``"float32"``. Parameters with dense gradients get
    ``torch.optim.Adagrad``.
    """

    rule = "rowwise_adagrad"


class Adam(RowOptimizer):
    """``torch.optim.Adam`` on the dense gradient, at the cost of the touched rows.

    A dense step moves every row, through its momentum. Here rows without a gradient lag behind; a row is brought up to
    date when it is next read or updated (docs/appendix/optimizers.md derives how).

    Args:
        params: as in ``torch.optim``.
        lr: learning rate; a scheduler may change it at any step.
        betas: decay of the averages of the gradient and of its square; for tables ``betas[0] ** 2 < betas[1]``.
        eps: added to the denominator.
        weight_decay: for parameters with dense gradients; must be 0 for tables.

    >>> from quorem import QR, Embedding
    >>> table = Embedding(1000, 16, QR(num_collisions=4), sparse=True)
    >>> optimizer = Adam(table.parameters(), lr=0.001)
    """

    torch_class: ClassVar[Any] = torch.optim.Adam
    rule = "adam"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
    ) -> None:
        amsgrad = self.entry.amsgrad
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)

    def _constants(self, group: dict[str, Any], p: Tensor) -> Any:
        beta1, beta2 = map(float, group["betas"])
        return replay.adam_constants(beta1, beta2, float(group["eps"]), p.dtype, self.entry.amsgrad)


class AMSGrad(Adam):
    """``torch.optim.Adam(amsgrad=True)`` on the dense gradient, at the cost of the touched rows.

    Most of the paper's best results use it. ``torch.optim`` has no version of it for sparse gradients. The arguments
    are those of ``Adam``, but ``betas`` may be in any order.
    """

    rule = "amsgrad"


class AdamW(Adam):
    """``torch.optim.AdamW`` on the dense gradient, at the cost of the touched rows.

    Weight decay shrinks every row in every step, even a row that never had a gradient. Here rows without a gradient lag
    behind, as with ``Adam``; the decay of all steps that a row missed is applied as one factor. The arguments are those
    of ``Adam``, but each step multiplies a weight by ``1 - lr * weight_decay``; for tables ``lr * weight_decay < 1``.
    """

    torch_class, rule, moves_every_row = torch.optim.AdamW, "adamw", ()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)

    def _constants(self, group: dict[str, Any], p: Tensor) -> Any:
        lr, decay = group["lr"], float(group["weight_decay"])
        if not (isinstance(lr, Tensor) and lr.is_cuda) and float(lr) * decay >= 1:
            raise ValueError(f"lr * weight_decay ({float(lr)} * {decay}) must be below 1 for tables")
        return super()._constants(group, p)._replace(weight_decay=decay)
