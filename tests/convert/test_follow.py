"""The state of an optimizer after ``compress_``: what the stored rows would have gathered themselves."""

import pytest
import torch
from torch import Tensor, nn

from quorem import QR, ChineseRemainder, Embedding, HotCold, compress_
from quorem.paper.schemes import Scheme

N, D = 60, 4
SCHEMES = [QR(4), QR(4, operation="add"), QR(4, operation="concat"), ChineseRemainder(3), HotCold(9, cold=QR(3))]


def batches(module: nn.Module) -> list[Tensor]:
    """Ids of which no two read a row of the largest table together, so that squares add up."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(N, (1,), generator=draw) for _ in range(40)]


def step(module: nn.Module, ids: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    slopes = torch.sin(ids[:, None] * torch.arange(1.0, D + 1))
    (module(ids) * slopes).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_state_is_what_the_rows_would_have(kind: type[torch.optim.Optimizer], scheme: Scheme) -> None:
    """A table that is composed, and the composed module, see the same gradients at a learning rate of zero."""
    source = Embedding(N, D, scheme, init_std=1.0)
    source.fit_(source.to_dense().detach() + 0)  # as a fit leaves it
    model = nn.Sequential(nn.Embedding.from_pretrained(source.to_dense().detach(), freeze=False))
    own, other = kind(source.parameters(), lr=0.0), kind(model.parameters(), lr=0.0)
    for ids in batches(source):
        step(source, ids, own)
        step(model, ids, other)
    compress_(model, scheme, fit=True, optimizer=other)
    torch.testing.assert_close(model[0].stored, source.stored, rtol=1e-4, atol=1e-5)
    assert other.param_groups[0]["params"] == [model[0].stored] and list(other.state) == [model[0].stored]
    for name, value in own.state[source.stored].items():
        torch.testing.assert_close(other.state[model[0].stored][name], value, rtol=1e-3, atol=1e-5)
