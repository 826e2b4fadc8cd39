"""Checks of arguments. Each raises a TypeError or ValueError whose message says what the argument must be."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from torch import Tensor

INT64_MAX = 2**63 - 1
InvalidIdMode = Literal["raise", "warn", "trust"]
Pooling = Literal["mean", "sum"]
BagMode = Literal["sum", "mean", "max"]
FLOAT_DTYPES = {  # dtypes that rows may have
    name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")
}


def check_int(argument: str, value: Any, low: int = 1, high: int = INT64_MAX) -> int:
    """``value`` must be an integer in ``[low, high]``, and not a bool; returns it as a plain int."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{argument} ({value!r}) must be an integer")
    if not low <= number <= high:
        rule = f"at least {low} and < 2**63" if high == INT64_MAX else f"in [{low}, {high}]"
        raise ValueError(f"{argument} ({number}) must be {rule}")
    return number


def shown_names(names: Sequence[str], most: int = 5) -> str:
    """The first ``most`` names, and how many more there are: ``"C1, C2, C3, C4, C5 and 3 more"``."""
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)


def check_choice(argument: str, value: Any, choices: Any) -> None:
    """``value`` must be one of the strings of a ``Literal``."""
    if value not in get_args(choices):
        raise ValueError(f"{argument} ({value!r}) must be one of {', '.join(map(repr, get_args(choices)))}")


def check_options(options: Any) -> None:
    """Check the fields of a frozen dataclass by their annotations; numpy's integers become plain ones, lists tuples.

    An integer must be at least 1, or in the range of its field's metadata: ``field(metadata={"low": 0, "high": 9})``.
    """
    for option in fields(options):
        name, value, kind = option.name, getattr(options, option.name), option.type
        if get_origin(kind) in (Union, UnionType):
            if value is None:
                continue
            kind = get_args(kind)[0]
        if get_origin(kind) is Literal:
            check_choice(name, value, kind)
        elif kind in (bool, str) and not isinstance(value, kind):
            raise TypeError(f"{name} ({value!r}) must be a {kind.__name__}")
        elif kind is int:
            value = check_int(name, value, **option.metadata)
        elif kind == tuple[int, ...]:
            if not isinstance(value, list | tuple):
                raise TypeError(f"{name} ({value!r}) must be a tuple of widths, such as (64,)")
            value = tuple(check_int(name, width) for width in value)
        object.__setattr__(options, name, value)


def check_dtype(dtype: torch.dtype | None) -> None:
    """``dtype`` must be one that the ops support, or None."""
    if dtype is not None and dtype not in FLOAT_DTYPES.values():
        raise ValueError(f"dtype ({dtype}) must be one of {', '.join(map(str, FLOAT_DTYPES.values()))}")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without ``torch.``"""
    return str(dtype).removeprefix("torch.")


def check_unique(kind: str, names: Sequence[str]) -> None:
    """Raise ValueError if two tables have the same name; ``kind`` says what the names are."""
    if len(set(names)) < len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{kind} of tables ({', '.join(map(repr, repeated))}) must be unique")


def check_mapping(argument: str, value: Any) -> None:
    """``value`` must be a mapping from names of tables, or None."""
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{argument} ({type(value).__name__}) must be a mapping from names of tables")


def check_device(stored: Tensor, argument: str, *inputs: Tensor | None) -> None:
    """Ids, and offsets and sample weights if given, must be on the device of the tables."""
    for name, tensor in zip((argument, "offsets", "per_sample_weights"), inputs, strict=False):
        if tensor is not None and tensor.device != stored.device:
            raise ValueError(f"{name} is on {tensor.device} but must be on {stored.device}, where the tables are")


def check_ids(ids: Tensor, argument: str) -> None:
    """``ids`` must be a tensor of int32 or int64."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"{argument} ({type(ids).__name__}) must be a Tensor")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{argument} dtype ({ids.dtype}) must be torch.int32 or torch.int64")


def is_exporting() -> bool:
    """Whether ``torch.export`` traces. The compiler of torch 2.11 takes ``is_exporting()`` of torch to be true."""
    return torch.compiler._is_exporting_flag


def check_offsets(offsets: Tensor, num_ids: int, name: str = "offsets") -> Tensor:
    """``offsets`` must start at 0, not decrease, and end within the ids; returns them as int64.

    Exported programs cannot raise.
    """
    check_ids(offsets, name)
    if offsets.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(offsets.shape)} but must be 1-D")
    offsets = offsets.long()
    if is_exporting():
        return offsets
    if offsets.device.type == "cpu" and torch.compiler.is_compiling():
        torch._assert_async((offsets[:1] == 0).all(), f"{name}[0] must be 0")
        rising = offsets == offsets.cummax(0).values  # diff would make the compiler require three offsets or more
        torch._assert_async(rising.all(), f"{name} must not decrease")
        torch._assert_async((offsets[-1:] <= num_ids).all(), f"{name}[-1] must be at most the number of ids")
    elif offsets.device.type == "cpu" and len(offsets):
        if offsets[0] != 0:
            raise ValueError(f"{name}[0] ({int(offsets[0])}) must be 0")
        if (offsets.diff() < 0).any():
            raise ValueError(f"{name} ({offsets.tolist()[:8]}...) must not decrease")
        if offsets[-1] > num_ids:
            raise ValueError(f"{name}[-1] ({int(offsets[-1])}) must be at most the number of ids ({num_ids})")
    return offsets
