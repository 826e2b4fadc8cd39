"""Modules whose parameters all differ."""

import torch


def varied(module):
    """Parameters that differ from one another, so that a wrong row shows."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))
    return module
