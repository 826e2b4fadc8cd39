"""The full table that a module represents, as a tensor that other code may read but not write into."""

from typing import Any

import torch
from torch import Tensor

_WRITES = {"__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__"}
_HARMLESS = {"requires_grad_"}  # names that end with an underscore but write nothing


class ComposedWeight(Tensor):
    """The table ``[n, D]``, composed when ``weight`` is read. A write into it or a view of it would be lost: it raises.

    Not in compiled code, where ``weight`` is a plain tensor.

    >>> from quorem import QR, Embedding
    >>> table = Embedding(1000, 16, QR(num_collisions=4))
    >>> (torch.ones(16) @ table.weight.T).shape
    torch.Size([1000])
    >>> torch.nn.init.zeros_(table.weight)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    RuntimeError: weight is composed from stored when it is read: ...
    """

    @classmethod
    @torch._disable_dynamo  # type: ignore[attr-defined]  # a graph of the compiler breaks where it is given one
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse writes. A view is a ``ComposedWeight`` too; any other result is a plain tensor."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        in_place = name in _WRITES or (name.endswith("_") and not name.endswith("__") and name not in _HARMLESS)
        targets = [kwargs.get("out")]
        if in_place:
            targets += args[:1] if args else kwargs.values()
        if any(isinstance(target, ComposedWeight) for target in targets):
            raise RuntimeError(
                "weight is composed from stored when it is read: what is written into it would be lost. Assign the"
                " whole table (module.weight = values, or module.fit_(values)) to fit the stored rows to it, or write"
                " into module.stored"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        source = next((arg for arg in args if isinstance(arg, ComposedWeight)), None)
        if isinstance(result, Tensor) and source is not None and _is_view(result, source):
            return result.as_subclass(ComposedWeight)
        return result


def composed_weight(vectors: Tensor) -> Tensor:
    """``vectors`` as a ``ComposedWeight``; unchanged while a compiler traces, whose graphs cannot hold this class."""
    return vectors if torch.compiler.is_compiling() else vectors.as_subclass(ComposedWeight)


def _is_view(result: Tensor, source: Tensor) -> bool:
    """Whether a write into ``result`` would write into ``source``."""
    if result.layout != torch.strided or result.device != source.device or source.is_meta:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
