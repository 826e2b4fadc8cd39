"""Sums of squares that are rounded at random: for the tests of the fused kernels of every device."""

from collections.abc import Callable
from dataclasses import replace

import torch
from row_rules import copied, fresh_rule

from quorem import Embedding
from quorem.ops import rules as truth
from quorem.ops.rounding import log8_numbers
from quorem.ops.rows import IdBatch
from quorem.ops.state import AdagradState


def check_sums(
    update_: Callable, dtype: torch.dtype, state_dtype: torch.dtype, shape: tuple[int, int], device: str, most: int = 0
) -> None:
    """Every code, and gradients of all sizes: all sums but ``most`` are those of the truth, bit for bit.

    Each row is read once, so that no sum depends on an order.
    """
    module = Embedding(*shape, dtype=dtype, device=device)
    stored, ids = module.stored.detach(), IdBatch(torch.arange(len(module.stored), device=device)[:, None])
    sums = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    if state_dtype == torch.bfloat16:
        sums = log8_numbers(sums.device)[sums.long()].bfloat16()
    exponents = torch.randint(-24, 15, shape) if dtype == torch.float16 else torch.randint(-40, 20, shape)
    grad = (torch.randn(shape) * 2.0**exponents).to(device, dtype)[:, None]
    grad[:4, 0, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0])
    state = AdagradState(sums, torch.tensor(2**33 + 5, device=device))
    first, results = replace(fresh_rule("adagrad", stored, 0.5, 2**40 + 77), state=state), []
    for step in (update_, truth.update_):
        rows, rule = stored.clone(), copied(first)
        step(grad, ids, rows, module.layout, rule)
        results.append((rows, rule.state.sum))
    (fused, fused_sums), (plain, plain_sums) = results
    differ = ~((fused_sums == plain_sums) | (fused_sums.isnan() & plain_sums.isnan()))
    assert differ.sum() <= most and (plain_sums != sums).sum() > 100
    torch.testing.assert_close(fused, plain, equal_nan=True)
