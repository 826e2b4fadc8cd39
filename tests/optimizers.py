"""What the tests of the optimizers share: a mixed collection, Zipf ids, and a dense oracle for every rule."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import quorem
from quorem import optim
from quorem.modules.lookup import Tables
from quorem.ops import cpu

SIZES = (300, 200, 120, 90, 40)
UNIT = 2.0**-24  # float32 rounds by at most this, relatively


def use(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the ops in ``"plain"`` PyTorch or ``"fused"``, where that can be had."""
    if backend == "plain":
        monkeypatch.setattr(cpu, "kernels", dict)
    elif not cpu.kernels():
        pytest.skip("needs Numba: pip install quorem[cpu]")


def collection(dtype: torch.dtype = torch.float64, sparse: bool = True, seed: int = 0) -> quorem.EmbeddingCollection:
    """Every operation; the concatenated table is half as wide, so rows of the others are two rows of the weight."""
    schemes = [
        *(quorem.QR(4, operation=op) for op in ("mult", "add", "concat")),
        quorem.GeneralizedQR(3),
        quorem.Full(),
    ]
    tables = [quorem.Table(f"t{i}", n, 8, s) for i, (n, s) in enumerate(zip(SIZES, schemes, strict=True))]
    return away_from_zero_(quorem.EmbeddingCollection(tables, dtype=dtype, sparse=sparse), seed)


def away_from_zero_(module: Tables, seed: int = 0) -> Any:
    """Values of size one to two: a product's gradient then follows its factors smoothly."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        values = torch.rand(module.stored.shape, generator=draw, dtype=torch.float64)
        signs = torch.randint(0, 2, module.stored.shape, generator=draw) * 2 - 1
        module.stored.copy_((1 + values) * signs)
    return module


def zipf(batch: int, n: int, draw: torch.Generator) -> Tensor:
    """Log-uniform ids: id i about as often as 1 / (i + 1)."""
    return (n ** torch.rand(batch, generator=draw, dtype=torch.float64) - 1).long().clamp(max=n - 1)


def batches(steps: int, batch: int = 3, seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids ``[B, F]`` and what their vectors are multiplied by in the loss, ``[B, F, 8]``.

    The highest id of each table comes in the first steps and in the last ones, and never in between.
    """
    draw = torch.Generator().manual_seed(seed)
    for step in range(steps):
        ids = torch.stack([zipf(batch, n - 1, draw) for n in SIZES], 1)
        if step < 5 or step >= steps - 5:
            ids[0] = torch.tensor(SIZES) - 1
        yield ids, torch.randn(batch, len(SIZES), 8, generator=draw, dtype=torch.float64)


def loss_of(module: torch.nn.Module, ids: Tensor, target: Tensor) -> Tensor:
    """Linear in the vectors, so that in float32 only products of rows feed errors back."""
    out = module(ids)
    return (out * target.to(out.dtype)).sum()


def run(module: Tables, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    """Train for some steps."""
    for ids, target in batches(steps, seed=seed):
        optimizer.zero_grad()
        loss_of(module, ids, target).backward()
        optimizer.step()


class DenseRowWiseAdagrad(torch.optim.Optimizer):
    """A dense oracle for the rule that torch does not have, straight from its definition."""

    def __init__(self, module: Tables, lr: float) -> None:
        super().__init__([module.stored], {"lr": lr})
        self.module = module
        self.totals: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        lr, grads = self.param_groups[0]["lr"], dict(self.module.named_tables(self.module.stored.grad))
        for name, table in self.module.named_tables():
            total = self.totals.setdefault(name, torch.zeros_like(table[:, :1]))
            total += (grads[name] ** 2).mean(1, keepdim=True)
            table -= lr * grads[name] / (total.sqrt() + 1e-10)


def oracle(name: str, module: Any, lr: float) -> torch.optim.Optimizer:
    """The dense optimizer that ``quorem.optim``'s of this name must equal."""
    if name == "RowWiseAdagrad":
        return DenseRowWiseAdagrad(module, lr)
    if name == "AMSGrad":
        return torch.optim.Adam(module.parameters(), lr=lr, amsgrad=True)
    return getattr(torch.optim, name)(module.parameters(), lr=lr)


NAMES = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "AMSGrad", "AdamW")
LAGGING = ("Adam", "AMSGrad", "AdamW")
CLASSES = {name: getattr(optim, name) for name in NAMES}
RATES = {name: 0.02 if "dagrad" in name else 5e-4 if name == "SGD" else 5e-3 for name in NAMES}


def twin(module: Tables, dtype: torch.dtype = torch.float64) -> Any:
    """A copy with dense gradients."""
    copied = copy.deepcopy(module).to(dtype)
    copied.sparse = False
    return copied


def same(module: Tables, dense: Tables, tolerance: float = 1e-12) -> None:
    """The tables of both are equal."""
    for (key, a), (_, b) in zip(module.named_tables(), dense.named_tables(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda m, key=key: f"{key}: {m}")
