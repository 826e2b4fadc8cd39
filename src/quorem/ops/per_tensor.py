"""Values attached to tensors."""

import weakref
from typing import Any, TypeVar

from torch import Tensor

Value = TypeVar("Value")


class PerTensor:
    """A value for each of some tensors, kept as long as the tensor object lives."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def get(self, tensor: Tensor) -> Any:
        """What was set for ``tensor``, or None."""
        entry = self._values.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def set(self, tensor: Tensor, value: Value) -> Value:
        """Keep ``value``, and return it."""
        values, key = self._values, id(tensor)
        values[key] = weakref.ref(tensor, lambda _: values.pop(key, None)), value
        return value
