"""``torch.optim``'s optimizers at the cost of the touched rows, in ``step()`` or within the backward pass.

They take the parameters of any model. Parameters with dense gradients are left to ``torch.optim``, or on a GPU take the
same step in few launches. Tables with sparse gradients (``sparse=True``) are updated row by row, with the same result
as the dense optimizer.

>>> from quorem import QR, Embedding
>>> table = Embedding(1000, 16, QR(num_collisions=4), sparse=True)
>>> optimizer = AMSGrad(table.parameters(), lr=1e-3)
"""

from .in_backward import apply_in_backward
from .optimizers import SGD, Adagrad, Adam, AdamW, AMSGrad, RowWiseAdagrad
from .row_optimizer import RowOptimizer

CLASSES: dict[str, type[RowOptimizer]] = {
    each.rule: each for each in (SGD, Adagrad, RowWiseAdagrad, Adam, AMSGrad, AdamW)
}

__all__ = ["SGD", "Adagrad", "RowWiseAdagrad", "Adam", "AMSGrad", "AdamW", "RowOptimizer", "apply_in_backward"]
