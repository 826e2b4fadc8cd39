"""Save the state of ``apply_in_backward`` optimizers in the checkpoints of PyTorch Lightning.

Lightning saves the optimizers that ``configure_optimizers`` returns. One made by ``apply_in_backward`` takes its steps
within the backward pass and is not among them, so its state would be lost when a run is resumed.
"""

from collections.abc import Callable, MutableMapping
from typing import Any

from ..optim import RowOptimizer

KEY = "quorem_table_optimizers"


def callback(optimizer: RowOptimizer | Callable[[Any], RowOptimizer]) -> Any:
    """A Lightning ``Callback`` that saves and loads the state of ``optimizer`` with each checkpoint.

    Without it, ``on_save_checkpoint`` and ``on_load_checkpoint`` of a ``LightningModule`` can do the same by the
    optimizer's ``state_dict`` and ``load_state_dict``.

    Args:
        optimizer: what ``apply_in_backward`` returned; or a function that returns it for a ``LightningModule``, if it
            is made in ``configure_model`` or ``setup``.

    Raises:
        ImportError: if ``lightning`` is not installed.

    >>> from quorem import QR, Embedding
    >>> from quorem.optim import Adagrad, apply_in_backward
    >>> optimizer = apply_in_backward(Embedding(1000, 16, QR(4)), Adagrad)
    >>> type(callback(optimizer)).__name__  # doctest: +SKIP
    'TableOptimizer'
    """
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError as error:
        raise ImportError("a callback needs PyTorch Lightning: pip install lightning") from error

    class TableOptimizer(Callback):
        """Saves and loads the state of an optimizer that takes its steps within the backward pass."""

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: MutableMapping[str, Any]) -> None:
            checkpoint[KEY] = self._of(pl_module).state_dict()

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: MutableMapping[str, Any]) -> None:
            if KEY not in checkpoint:
                raise ValueError(
                    f"checkpoint must hold {KEY!r}: it was saved without the state of the tables' optimizer"
                )
            self._of(pl_module).load_state_dict(checkpoint[KEY])

        def _of(self, module: Any) -> RowOptimizer:
            return optimizer if isinstance(optimizer, RowOptimizer) else optimizer(module)

    return TableOptimizer()
