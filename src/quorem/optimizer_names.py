"""Names of optimizers and dtypes, for the command line, which imports no torch; see ``ops.state.RULES``."""

from typing import Literal, get_args

Optimizer = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "amsgrad", "adamw"]
RowDtype = Literal["float32", "bfloat16", "float16"]  # of rows in training
StateDtype = Literal["float32", "bfloat16", "log8"]


def check_optimizer(optimizer: str | None) -> None:
    """Raise ValueError unless ``optimizer`` is None or the name of an optimizer whose state is known."""
    if optimizer is not None and optimizer not in get_args(Optimizer):
        raise ValueError(
            f"optimizer ({optimizer!r}) must be None or one of {', '.join(map(repr, get_args(Optimizer)))}"
        )
