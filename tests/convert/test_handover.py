"""``apply_in_backward(state_from=...)``: the fused optimizer goes on where another stopped."""

import pytest
import torch
from torch import nn

from quorem import QR, compress_, optim

PAIRS = [
    (torch.optim.Adagrad, optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adam, optim.Adam, {"lr": 0.1}),
    (torch.optim.AdamW, optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    (optim.Adagrad, optim.Adagrad, {"lr": 0.1}),
]


def trained(fused: bool, kind: type, row_kind: type, options: dict[str, float]) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(60, 4), nn.Linear(4, 1))
    optimizer = kind(model.parameters(), **options)
    for step in range(8):
        if step == 2:
            compress_(model, QR(4, operation="add"), fit=True)
        if step == 4 and fused:
            optim.apply_in_backward(model, row_kind, state_from=optimizer, **options)
            assert [p.shape for group in optimizer.param_groups for p in group["params"]] == [(1, 4), (1,)]
        optimizer.zero_grad()
        model(torch.tensor([step, 7, 59])).square().sum().backward()
        optimizer.step()
    return model[0].to_dense().detach()


@pytest.mark.parametrize(("kind", "row_kind", "options"), PAIRS)
def test_the_rows_move_as_if_nothing_had_changed(kind, row_kind, options):
    torch.testing.assert_close(*(trained(fused, kind, row_kind, options) for fused in (True, False)))


def test_a_state_of_another_rule_is_refused():
    model = nn.Sequential(nn.Embedding(60, 4))
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    compress_(model, QR(4))
    with pytest.raises(ValueError, match=r"state_from \(Adam\) must be one of Adam's rule"):
        optim.apply_in_backward(model, optim.Adam, state_from=optimizer)
    assert len(optimizer.param_groups[0]["params"]) == 1
