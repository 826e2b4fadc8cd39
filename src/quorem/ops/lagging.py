"""The class of a ``stored`` whose rows may lag behind: whoever reads it sees rows that are up to date.

A read outside of quorem's ops (an average of weights, a broadcast, another optimizer, a save) goes through
``__torch_function__``, which first brings every row up to date. quorem's own ops bring up to date what they read, and
run ``unwatched``. A parameter has this class only while an optimizer lets its rows lag behind; else it is an
``nn.Parameter``.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .memory import PerTensor

if TYPE_CHECKING:
    from .updates import Updates

unwatched = torch._C.DisableTorchFunctionSubclass  # a context in which reads of the parameter are not noticed
known_updates = PerTensor()  # of each ``stored``: a weak reference to its ``Updates``, which keeps ``stored`` alive
# Functions and attributes of a tensor that do not read its values; training loops use some of them in every step.
_METADATA = {
    "__hash__", "__len__", "_backward_hooks", "_base", "_has_compatible_shallow_copy_type", "_is_view",
    "_post_accumulate_grad_hooks", "_version", "device", "dim", "dtype", "element_size", "empty_like", "full_like",
    "get_device", "grad", "grad_dtype", "grad_fn", "is_complex", "is_conj", "is_contiguous", "is_cpu", "is_cuda",
    "is_floating_point", "is_inference", "is_leaf", "is_meta", "is_mkldnn", "is_neg", "is_nested", "is_quantized",
    "is_sparse", "itemsize", "layout", "names", "nbytes", "ndim", "nelement", "new_empty", "new_full", "new_ones",
    "new_zeros", "numel", "ones_like", "output_nr", "register_hook", "register_post_accumulate_grad_hook",
    "requires_grad", "requires_grad_", "retain_grad", "retains_grad", "shape", "size", "storage_offset", "stride",
    "zeros_like",
}  # fmt: skip


class LaggingParameter(nn.Parameter):
    """A parameter whose rows are brought up to date before anyone reads their values."""

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        """A plain parameter: ``type(p)(values)`` is how copies are made, and their rows are up to date."""
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Bring the rows of every such argument up to date, then call ``func``."""
        kwargs = kwargs or {}
        with unwatched():
            if _reads_values(func):
                for parameter in _lagging_in((*args, *kwargs.values())):
                    if (updates := updates_of(parameter)) is not None:
                        updates.flush_()
            return func(*args, **kwargs)


def updates_of(stored: Tensor) -> "Updates | None":
    """The ``Updates`` of a module's ``stored``: the only way from a parameter, as optimizers have it, to its module."""
    reference: Callable[[], Updates | None] | None = known_updates.get(stored)
    return None if reference is None else reference()


def in_memory(stored: Tensor) -> Tensor:
    """``stored`` as it is in memory, where rows may lag behind: a plain tensor that shares it."""
    with unwatched():
        return stored.detach()


def _reads_values(func: Any) -> bool:
    if isinstance(func, torch._ops.OpOverload):  # of a compiled graph: its reads were noticed while it was traced
        return False
    name = func.__name__
    return (func.__self__.__name__ if name in ("__get__", "__set__", "__delete__") else name) not in _METADATA


def _lagging_in(args: Iterable[Any]) -> Iterator[LaggingParameter]:
    for arg in args:
        if type(arg) is LaggingParameter:
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _lagging_in(arg)
