"""Checkpoints of the public ``QREmbeddingBag``, against its forward written down from its description."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quorem.integrations.dlrm import load_qr_embedding_bag

N, C, D = 1000, 7, 6


def saved(prefix: str = "", widths: tuple[int, int] = (D, D)) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"weight_q": (-(-N // C), widths[0]), "weight_r": (C, widths[1])}
    return {prefix + name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def public_forward(state: dict[str, Tensor], ids: Tensor, offsets: Tensor, operation: str, mode: str) -> Tensor:
    """Quotient and remainder are looked up and pooled each by itself, then combined, the quotient first."""
    pooled_q = F.embedding_bag(ids // C, state["weight_q"], offsets, mode=mode)
    pooled_r = F.embedding_bag(ids % C, state["weight_r"], offsets, mode=mode)
    if operation == "concat":
        return torch.cat((pooled_q, pooled_r), 1)
    return pooled_q + pooled_r if operation == "add" else pooled_q * pooled_r


@pytest.mark.parametrize("operation", ["mult", "add", "concat"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_id_are_those_of_the_public_module(operation: str, mode: str) -> None:
    """Longer bags are too, where pooling first changes nothing."""
    state = saved(widths=(4, 2) if operation == "concat" else (D, D))
    module = load_qr_embedding_bag(state, num_embeddings=N, operation=operation, mode=mode)
    ids = torch.arange(N)
    assert (module.num_embeddings, module.embedding_dim, module.mode) == (N, 6, mode)
    torch.testing.assert_close(module(ids, ids), public_forward(state, ids, ids, operation, mode))
    if operation != "mult" and mode != "max":
        offsets = ids[::4]
        torch.testing.assert_close(module(ids, offsets), public_forward(state, ids, offsets, operation, mode))


def test_one_module_of_a_dlrm_checkpoint() -> None:
    state = {**saved("emb_l.0."), **{f"emb_l.1.{k}": v.half() + 1 for k, v in saved().items()}}
    module = load_qr_embedding_bag({"state_dict": state, "iter": 3}, "emb_l.1", sparse=True)
    assert module.num_embeddings == -(-N // C) * C and module.sparse and module.stored.requires_grad
    assert module.stored.dtype == torch.float16
    torch.testing.assert_close(module.tables()[1], state["emb_l.1.weight_q"])


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        (saved("emb_l.0."), {"prefix": "emb_l.2"}, r"prefix \('emb_l.2.'\) must be .*QREmbeddingBag; .*\['emb_l.0.'\]"),
        (saved(), {"num_embeddings": 994}, r"num_embeddings \(994\) must be in \[995, 1001\]"),
        (saved(widths=(4, 2)), {}, r"weight_q is 4 wide and weight_r 2: they must be equally wide to mult"),
        (saved(), {"operation": "feature"}, r"operation \('feature'\) must be one of"),
        (saved(), {"mode": "min"}, r"mode \('min'\) must be one of"),
        ({**saved(), "weight_r": torch.ones(3)}, {}, r"the tables of the module must be matrices that are not empty"),
    ],
)
def test_refusals(state: dict[str, Tensor], options: dict, message: str) -> None:
    with pytest.raises((KeyError, ValueError), match=message):
        load_qr_embedding_bag(state, **options)
