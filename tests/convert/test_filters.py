"""What other code's filters see of a composed table: by class, by name, by shape; docs/compress.md says what to do."""

import pytest
import torch
from torch import nn

from quorem import QR, Full, compress_


def compressed(scheme=QR(4)):  # noqa: B008
    model = nn.ModuleDict({"embedding": nn.Embedding(2000, 8), "norm": nn.LayerNorm(8), "top": nn.Linear(8, 1)})
    compress_(model, scheme)
    return model


def test_by_class():
    """No composed table is an ``nn.Embedding``: code that writes into ``weight`` by that test leaves it alone."""
    model = compressed()
    assert not any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules())
    assert isinstance(compressed(Full())["embedding"], nn.Embedding)  # left as it was


def test_by_module_name():
    """The module's name stays; the parameter's is ``stored``."""
    names = [name for name, _ in compressed().named_parameters()]
    assert names == ["embedding.stored", "norm.weight", "norm.bias", "top.weight", "top.bias"]
    assert [name for name in names if "embedding" in name] == ["embedding.stored"]


def test_weight_decay_by_exceptions_or_shape_includes_the_rows_and_by_the_name_weight_does_not():
    parameters = dict(compressed().named_parameters())
    by_exception = {n for n in parameters if not any(part in n for part in ("bias", "norm.weight"))}
    by_shape = {n for n, p in parameters.items() if p.dim() >= 2}
    by_name = {n for n in parameters if n.endswith(".weight")}
    assert by_exception == by_shape == {"embedding.stored", "top.weight"} and "embedding.stored" not in by_name


@pytest.mark.parametrize(("scheme", "power"), [(QR(4), 2), (QR(4, operation="add"), 1)])
def test_weight_decay_shrinks_rows_and_so_a_product_by_its_square(scheme, power):
    table = compressed(scheme)["embedding"].double()
    before = table.to_dense().detach()
    optimizer = torch.optim.AdamW(table.parameters(), lr=0.1, weight_decay=0.5)
    table.stored.grad = torch.zeros_like(table.stored)
    optimizer.step()
    torch.testing.assert_close(table.to_dense(), before * 0.95**power)


def test_ddp_and_other_code_find_no_sparse_module():
    """DistributedDataParallel looks for ``nn.Embedding(sparse=True)``; composed tables have dense gradients there."""
    model = nn.ModuleDict({"embedding": nn.Embedding(2000, 8, sparse=True)})
    compress_(model, QR(4))
    found = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    assert not found and model["embedding"].sparse
    model["embedding"](torch.tensor([1, 2])).sum().backward()
    assert model["embedding"].stored.grad.is_sparse  # tests/replicas.py: dense under DDP
