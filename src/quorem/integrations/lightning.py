"""Keep the state of ``apply_in_backward`` optimizers in the checkpoints of PyTorch Lightning.

Lightning saves the optimizers that ``configure_optimizers`` returns. One that takes its steps within the backward pass
is not among them, so its state would be lost when a run is resumed.
"""

from collections.abc import Callable
from typing import Any

from ..optim import RowOptimizer

KEY = "quorem_table_optimizers"


def callback(optimizer: RowOptimizer | Callable[[Any], RowOptimizer]) -> Any:
    """A Lightning ``Callback`` that saves and loads the state of ``optimizer`` with each checkpoint.

    Args:
        optimizer: what ``apply_in_backward`` returned; or a function that returns it for a ``LightningModule``, if it
            is made in ``configure_model`` or ``setup``.

    Raises:
        ImportError: if ``lightning`` is not installed.
    """
    from lightning.pytorch.callbacks import Callback

    def of(module: Any) -> RowOptimizer:
        return optimizer if isinstance(optimizer, RowOptimizer) else optimizer(module)

    class TableOptimizer(Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint[KEY] = of(pl_module).state_dict()

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            if KEY not in checkpoint:
                raise ValueError(f"checkpoint must hold {KEY!r}: it was saved without the state of the tables")
            of(pl_module).load_state_dict(checkpoint[KEY])

    return TableOptimizer()
