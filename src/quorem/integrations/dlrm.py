"""Load checkpoints of the public DLRM code's ``QREmbeddingBag``, in which the quotient has the large table.

Its tables are ``weight_q``, a row for each quotient by ``num_collisions``, and ``weight_r``, a row for each remainder.
It pools before it composes, so that only bags of one id give the products of the paper; quorem composes first. Bags of
one id are the same in both.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checks import BagMode, check_choice, check_int
from ..modules.bag import EmbeddingBag
from ..paper.operations import Operation
from ..paper.partitions import Partition
from ..paper.schemes import QR, Custom, Scheme


def load_qr_embedding_bag(
    state_dict: Mapping[str, Any],
    prefix: str = "",
    *,
    num_embeddings: int | None = None,
    operation: Operation = "mult",
    mode: BagMode = "sum",
    sparse: bool = False,
) -> EmbeddingBag:
    """The ``EmbeddingBag`` with the tables of a ``QREmbeddingBag`` in a checkpoint.

    Args:
        state_dict: state dict of the module or of the model that contains it; or the dict that DLRM saves, which has
            it under ``"state_dict"``.
        prefix: name of the module in the state dict, such as ``"emb_l.3"``.
        num_embeddings: number of ids, which a checkpoint does not say; None for the most that the tables can have.
        operation: the operation of the trained model: ``"mult"``, ``"add"`` or ``"concat"`` (quotient first).
        mode: how bags are pooled; DLRM sums.
        sparse: give the rows a sparse gradient.

    Raises:
        KeyError: if the checkpoint has no such tables.
        TypeError: if they are not tensors.
        ValueError: if their shapes do not fit each other or ``num_embeddings``.

    >>> saved = {"emb_l.0.weight_q": torch.randn(250, 16), "emb_l.0.weight_r": torch.randn(4, 16)}
    >>> load_qr_embedding_bag(saved, "emb_l.0", num_embeddings=999)
    EmbeddingBag(999, 16, QR(num_collisions=4, force=True, large='quotient'), compression=3.9, mode='sum')
    """
    if operation not in ("mult", "add", "concat"):
        raise ValueError(f"operation ({operation!r}) must be 'mult', 'add' or 'concat', as QREmbeddingBag has them")
    check_choice("mode", mode, BagMode)
    quotients, remainders = _tables(state_dict, prefix)
    (rows, width), (collisions, other) = quotients.shape, remainders.shape
    if operation != "concat" and width != other:
        raise ValueError(f"weight_q is {width} wide and weight_r {other}: they must be equally wide to {operation}")
    most, least = rows * collisions, (rows - 1) * collisions + 1
    n = most if num_embeddings is None else check_int("num_embeddings", num_embeddings, least, most)
    scheme: Scheme = QR(collisions, operation=operation, large="quotient", force=True)
    if operation == "concat":
        parts = Partition(collisions, rows), Partition(1, collisions)
        scheme = Custom(parts, operation="concat", dims=(width, other), check=False, force=True)
        width += other
    module = EmbeddingBag(n, width, scheme, mode=mode, sparse=sparse, device=quotients.device, dtype=quotients.dtype)
    with torch.no_grad():
        for table, part in zip(module.tables(), module.specs[0].partitions, strict=True):
            is_remainder = isinstance(part, Partition) and part.stride == 1
            table.copy_(remainders if is_remainder else quotients)
    return module


def _tables(state_dict: Mapping[str, Any], prefix: str) -> tuple[Tensor, Tensor]:
    """``weight_q`` and ``weight_r``, checked."""
    if isinstance(state_dict.get("state_dict"), Mapping):
        state_dict = state_dict["state_dict"]
    prefix = prefix if not prefix or prefix.endswith(".") else prefix + "."
    if f"{prefix}weight_q" not in state_dict or f"{prefix}weight_r" not in state_dict:
        known = sorted(key.removesuffix("weight_q") or "''" for key in state_dict if key.endswith("weight_q"))
        raise KeyError(f"prefix ({prefix!r}) must be that of a QREmbeddingBag; the checkpoint has {known}")
    tables = []
    for name in ("weight_q", "weight_r"):
        table = state_dict[prefix + name]
        if not isinstance(table, Tensor):
            raise TypeError(f"{prefix}{name} ({type(table).__name__}) must be a Tensor")
        if table.dim() != 2 or not table.numel():
            raise ValueError(f"{prefix}{name} has shape {tuple(table.shape)} but must be 2-D and not empty")
        tables.append(table.detach())
    return tables[0], tables[1]
