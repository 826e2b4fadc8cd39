"""Load checkpoints of the public DLRM code's ``QREmbeddingBag``, in which the quotient has the large table.

Its tables are ``weight_q``, a row for each quotient by ``num_collisions``, and ``weight_r``, a row for each remainder.
It pools before it composes, so that only bags of one id give the products of the paper; quorem composes first. Bags of
one id are the same in both.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ..checks import BagMode, check_choice, check_int
from ..modules.bag import EmbeddingBag
from ..paper.partitions import Partition
from ..paper.schemes import QR, Custom, Scheme

DLRMOperation = Literal["mult", "add", "concat"]


def load_qr_embedding_bag(
    state_dict: Mapping[str, Any],
    prefix: str = "",
    *,
    num_embeddings: int | None = None,
    operation: DLRMOperation = "mult",
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
        ValueError: if they are not matrices, or their shapes do not fit each other or ``num_embeddings``.

    >>> saved = {"emb_l.0.weight_q": torch.randn(250, 16), "emb_l.0.weight_r": torch.randn(4, 16)}
    >>> load_qr_embedding_bag(saved, "emb_l.0", num_embeddings=999)
    EmbeddingBag(999, 16, QR(num_collisions=4, force=True, large='quotient'), compression=3.9, mode='sum')
    """
    check_choice("operation", operation, DLRMOperation)
    state = state_dict.get("state_dict", state_dict)
    prefix = f"{prefix.removesuffix('.')}." if prefix else ""
    if not {f"{prefix}weight_q", f"{prefix}weight_r"} <= state.keys():
        known = sorted(key.removesuffix("weight_q") or "''" for key in state if key.endswith("weight_q"))
        raise KeyError(f"prefix ({prefix!r}) must be that of a QREmbeddingBag; the checkpoint has {known}")
    quotients, remainders = (state[f"{prefix}{name}"] for name in ("weight_q", "weight_r"))
    for table in (quotients, remainders):
        if not isinstance(table, Tensor) or table.dim() != 2 or not table.numel():
            raise ValueError(f"the tables of {prefix or 'the module'} must be matrices that are not empty")
    (rows, width), (collisions, other) = quotients.shape, remainders.shape
    if operation != "concat" and width != other:
        raise ValueError(f"weight_q is {width} wide and weight_r {other}: they must be equally wide to {operation}")
    most, least = rows * collisions, (rows - 1) * collisions + 1
    n = most if num_embeddings is None else check_int("num_embeddings", num_embeddings, least, most)
    scheme: Scheme = QR(collisions, operation=operation, large="quotient", force=True)
    tables = [remainders, quotients]
    if operation == "concat":
        parts = Partition(collisions, rows), Partition(1, collisions)
        scheme = Custom(parts, operation="concat", dims=(width, other), check=False, force=True)
        width, tables = width + other, [quotients, remainders]
    module = EmbeddingBag(n, width, scheme, mode=mode, sparse=sparse, device=quotients.device, dtype=quotients.dtype)
    with torch.no_grad():
        for stored, table in zip(module.tables(), tables, strict=True):
            stored.copy_(table)
    return module
