"""Save the state of ``apply_in_backward`` optimizers in the checkpoints of PyTorch Lightning.

Lightning saves the optimizers that ``configure_optimizers`` returns. One made by ``apply_in_backward`` takes its steps
within the backward pass and is not among them, so its state would be lost when a run is resumed. There are two ways to
save it:

    trainer = Trainer(callbacks=[lightning.callback(optimizer)])

or, without a callback, from the hooks of a ``LightningModule``:

    def on_save_checkpoint(self, checkpoint):
        lightning.on_save_checkpoint(self.table_optimizer, checkpoint)

    def on_load_checkpoint(self, checkpoint):
        lightning.on_load_checkpoint(self.table_optimizer, checkpoint)
"""

import importlib
from collections.abc import Callable, MutableMapping
from typing import Any

from ..optim import RowOptimizer

KEY = "quorem_table_optimizers"

Optimizers = RowOptimizer | list[RowOptimizer]


def on_save_checkpoint(optimizers: Optimizers, checkpoint: MutableMapping[str, Any]) -> None:
    """Put the state of ``optimizers`` into ``checkpoint``, every row up to date.

    Args:
        optimizers: what ``apply_in_backward`` returned, one or several.
        checkpoint: the dictionary that Lightning is about to save.

    >>> from quorem import QR, Embedding
    >>> from quorem.optim import Adagrad, apply_in_backward
    >>> checkpoint = {}
    >>> on_save_checkpoint(apply_in_backward(Embedding(1000, 16, QR(4)), Adagrad), checkpoint)
    >>> list(checkpoint)
    ['quorem_table_optimizers']
    """
    checkpoint[KEY] = [optimizer.state_dict() for optimizer in _listed(optimizers)]


def on_load_checkpoint(optimizers: Optimizers, checkpoint: MutableMapping[str, Any]) -> None:
    """Load the state that ``on_save_checkpoint`` put into ``checkpoint``.

    Args:
        optimizers: what ``apply_in_backward`` returned, one or several, as when it was saved.
        checkpoint: the dictionary that Lightning has loaded.

    Raises:
        ValueError: if the checkpoint has no such state, or has the state of a different number of optimizers.

    >>> from quorem import QR, Embedding
    >>> from quorem.optim import Adagrad, apply_in_backward
    >>> optimizer, checkpoint = apply_in_backward(Embedding(1000, 16, QR(4)), Adagrad), {}
    >>> on_save_checkpoint(optimizer, checkpoint)
    >>> on_load_checkpoint(optimizer, checkpoint)
    """
    every = _listed(optimizers)
    states = checkpoint.get(KEY)
    if states is None:
        raise ValueError(f"checkpoint must hold {KEY!r}: it was saved without the state of the tables' optimizer")
    if len(states) != len(every):
        raise ValueError(f"checkpoint has the state of {len(states)} optimizers of tables but must have {len(every)}")
    for optimizer, state in zip(every, states, strict=True):
        optimizer.load_state_dict(state)


def callback(optimizers: Optimizers | Callable[[Any], Optimizers]) -> Any:
    """A Lightning ``Callback`` that saves and loads the state of ``optimizers`` with each checkpoint.

    Args:
        optimizers: what ``apply_in_backward`` returned, one or several; or a function that returns them for a
            ``LightningModule``, if they are made in ``configure_model`` or ``setup``.

    Raises:
        ImportError: if neither ``lightning`` nor ``pytorch_lightning`` is installed.

    >>> from quorem import QR, Embedding
    >>> from quorem.optim import Adagrad, apply_in_backward
    >>> optimizer = apply_in_backward(Embedding(1000, 16, QR(4)), Adagrad)
    >>> type(callback(optimizer)).__name__  # doctest: +SKIP
    'TableOptimizers'
    """
    find = optimizers if callable(optimizers) else lambda module: optimizers
    base = _callback_class()

    class TableOptimizers(base):  # type: ignore[misc, valid-type]
        """Saves and loads the state of optimizers that take their steps within the backward pass."""

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: MutableMapping[str, Any]) -> None:
            on_save_checkpoint(find(pl_module), checkpoint)

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: MutableMapping[str, Any]) -> None:
            on_load_checkpoint(find(pl_module), checkpoint)

    return TableOptimizers()


def _listed(optimizers: Optimizers) -> list[RowOptimizer]:
    return [optimizers] if isinstance(optimizers, RowOptimizer) else list(optimizers)


def _callback_class() -> type:
    for name in ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks"):
        try:
            callback: type = importlib.import_module(name).Callback
            return callback
        except ImportError:
            continue
    raise ImportError("a callback needs PyTorch Lightning: pip install lightning")
