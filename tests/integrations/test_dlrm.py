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
    state = saved(widths=(4, 2) if operation == "concat" else (D, D))
    module = load_qr_embedding_bag(state, num_embeddings=N, operation=operation, mode=mode)
    ids = torch.arange(N)
    assert (module.num_embeddings, module.embedding_dim, module.mode) == (N, 6, mode)
    torch.testing.assert_close(module(ids, ids), public_forward(state, ids, ids, operation, mode))


def test_longer_bags_are_composed_first() -> None:
    """The public module multiplies the pooled vectors instead; ``add`` and ``concat`` of sums are the same."""
    state, ids, offsets = saved(), torch.tensor([3, 500, 999, 0]), torch.tensor([0, 3])
    module = load_qr_embedding_bag(state, num_embeddings=N)
    vectors = state["weight_q"][ids // C] * state["weight_r"][ids % C]
    torch.testing.assert_close(module(ids, offsets), torch.stack([vectors[:3].sum(0), vectors[3]]))
    assert not torch.allclose(module(ids, offsets), public_forward(state, ids, offsets, "mult", "sum"))
    added = load_qr_embedding_bag(state, num_embeddings=N, operation="add")
    torch.testing.assert_close(added(ids, offsets), public_forward(state, ids, offsets, "add", "sum"))


def test_one_module_of_a_dlrm_checkpoint() -> None:
    state = {
        **saved("emb_l.0."),
        **{f"emb_l.1.{k}": v + 1 for k, v in saved().items()},
        "bot_l.0.weight": torch.ones(1),
    }
    module = load_qr_embedding_bag({"state_dict": state, "iter": 3}, "emb_l.1", sparse=True)
    assert module.num_embeddings == -(-N // C) * C and module.sparse and module.stored.requires_grad
    torch.testing.assert_close(module.tables()[1], state["emb_l.1.weight_q"])
    half = load_qr_embedding_bag({k: v.half() for k, v in saved().items()})
    assert half.stored.dtype == torch.float16


def test_refusals() -> None:
    with pytest.raises(KeyError, match=r"prefix \('emb_l.2.'\) must be that of a QREmbeddingBag; .* \['emb_l.0.'\]"):
        load_qr_embedding_bag(saved("emb_l.0."), "emb_l.2")
    with pytest.raises(ValueError, match=r"num_embeddings \(994\) must be in \[995, 1001\]"):
        load_qr_embedding_bag(saved(), num_embeddings=994)
    with pytest.raises(ValueError, match=r"weight_q is 4 wide and weight_r 2: they must be equally wide to mult"):
        load_qr_embedding_bag(saved(widths=(4, 2)))
    with pytest.raises(ValueError, match=r"operation \('feature'\) must be 'mult', 'add' or 'concat'"):
        load_qr_embedding_bag(saved(), operation="feature")
    with pytest.raises(ValueError, match=r"mode \('min'\) must be one of"):
        load_qr_embedding_bag(saved(), mode="min")
    with pytest.raises(TypeError, match=r"weight_r \(list\) must be a Tensor"):
        load_qr_embedding_bag({**saved(), "weight_r": [1.0]})
    with pytest.raises(ValueError, match=r"weight_r has shape \(3,\) but must be 2-D and not empty"):
        load_qr_embedding_bag({**saved(), "weight_r": torch.ones(3)})
