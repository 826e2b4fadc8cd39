"""The optimizers that plans and estimates know by name, and how much state each keeps; imports no torch."""

from typing import Literal, get_args

Optimizer = Literal[
    "sgd",
    "decayed_sgd",
    "momentum_sgd",
    "adagrad",
    "rowwise_adagrad",
    "adam",
    "amsgrad",
    "adamw",
    "lazy_adam",
    "lazy_amsgrad",
]
# How many numbers the optimizer keeps for each weight; row-wise Adagrad keeps one for each row of them instead.
AVERAGES = {"sgd": 0, "decayed_sgd": 0, "momentum_sgd": 1, "adagrad": 1, "rowwise_adagrad": 1, "adam": 2}
AVERAGES |= {"amsgrad": 3, "adamw": 2, "lazy_adam": 2, "lazy_amsgrad": 3}


def check_optimizer(optimizer: str | None) -> None:
    """Raise ValueError unless ``optimizer`` is None or the name of an optimizer whose state is known."""
    if optimizer is not None and optimizer not in get_args(Optimizer):
        raise ValueError(
            f"optimizer ({optimizer!r}) must be None or one of {', '.join(map(repr, get_args(Optimizer)))}"
        )
