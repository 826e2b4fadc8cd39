"""Budgets on drawn models: what exists after the first lookup and the first step fits, or the budget is refused.

``PYTHONPATH=tests python -m hunt.budgets --cases 1000`` prints its figures as JSON.
Tables are drawn (some tied, nested, narrow, too special to be replaced), a budget, an optimizer, and counts in any
order. The bytes are those of all storages of the tables, the indices that kernels keep for lists of ids, and the
optimizer's state.
"""

import random
import warnings
from collections import Counter
from typing import Any

import torch
from hunt.command import main
from torch import Tensor, nn

import quorem
from quorem.modules.lookup import Tables
from quorem.ops.cpu import launch

OPTIMIZERS: dict[str, Any] = {
    "none": None,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "sparse_adam": torch.optim.SparseAdam,
    "rows of adagrad": quorem.optim.Adagrad,
    "rows of rowwise": quorem.optim.RowWiseAdagrad,
}
SPARSE = ("sparse_adam", "rows of adagrad", "rows of rowwise")


class Special(nn.Embedding):
    """A table that stays as it is."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 2


def drawn_model(rng: random.Random, sparse: bool) -> nn.ModuleDict:
    """Tables of several kinds, some of them deeper in the model or tied."""
    model = nn.ModuleDict()
    for i in range(rng.randint(1, 4)):
        n, d = rng.randint(20, 4000), rng.choice([1, 2, 8, 16])
        kind = rng.choice([nn.Embedding, nn.Embedding, nn.EmbeddingBag, Special])
        options = {"padding_idx": 0} if rng.random() < 0.3 else {}
        table = kind(n, d, sparse=sparse, **options)
        model[f"t{i}"] = nn.ModuleDict({"inner": table}) if rng.random() < 0.2 else table
        for j in range(rng.choice([0, 0, 0, 1, 2])):
            tied = nn.Embedding(n, d, sparse=sparse)
            tied.weight = table.weight
            model[f"t{i}tied{j}"] = tied
    return model


def tables_of(model: nn.Module) -> list[Any]:
    """The tables of a model, in order."""
    return [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag | Tables)]


def bytes_of(model: nn.Module, optimizer: Any) -> int:
    """Bytes of all storages of the tables, of indices over lists, and of the optimizer's state."""
    tensors = [t for table in tables_of(model) for t in (*table.parameters(), *table.buffers())]
    for table in tables_of(model):
        known = launch._layouts.get(table.slots) if isinstance(table, Tables) else None
        tensors += [known.maps, *known.kept] if known else []
    if isinstance(optimizer, quorem.optim.RowOptimizer):
        tensors += [t for state in optimizer.live_state().values() for t in state]
    if optimizer is not None:
        tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def step(model: nn.Module, optimizer: Any) -> None:
    """One lookup of each table, and one step."""
    if optimizer is not None:
        optimizer.zero_grad()
    vectors = [table(torch.tensor([[1, 2, 3]])).sum() for table in tables_of(model)]
    if optimizer is not None:
        sum(vectors).backward()  # type: ignore[union-attr]
        optimizer.step()


def case(rng: random.Random) -> str:
    """Compress one model; returns what came of it.

    Raises:
        AssertionError: if more bytes exist than the budget allows, or than the full tables would take.
    """
    name = rng.choice(list(OPTIMIZERS))
    torch.manual_seed(rng.randrange(2**31))
    model = drawn_model(rng, name in SPARSE)
    optimizer = None if name == "none" else OPTIMIZERS[name](list(model.parameters()))
    full = sum({t.weight: t.weight.nbytes for t in tables_of(model)}.values())
    budget = int(full * rng.choice([0.02, 0.2, 0.5, 0.8, 1.0, 1.5, 3.0]) * (1 + rng.random())) + 1
    counts = {}
    if rng.random() < 0.7:
        for path, table in model.named_modules():
            if isinstance(table, nn.Embedding | nn.EmbeddingBag):
                drawn = (1e5 / (1 + torch.arange(table.num_embeddings))).long()
                counts[path] = drawn if rng.random() < 0.3 else drawn[torch.randperm(len(drawn))]
        del table  # it would hold an old table
    given = optimizer if rng.random() < 0.5 else None
    try:
        report = quorem.compress_(model, budget=budget, optimizer=given, frequencies=counts or None)
    except ValueError as error:
        if "must be at least" not in str(error):
            raise
        return "refused"
    # With those that are tied to it. Where there is a state, it may shrink by more than the table grows.
    for table in {entry.name[:2] for entry in report.entries} if name in ("none", "sgd") else ():
        entries = [entry for entry in report.entries if entry.name.startswith(table)]
        before, after = sum(entry.bytes_before for entry in entries), sum(entry.bytes_after for entry in entries)
        assert after <= before + 2000 * len(entries), f"{table} grew from {before} to {after} bytes\n{report}"
    step(model, optimizer)
    taken = bytes_of(model, optimizer)
    assert taken <= budget, f"{taken} bytes for a budget of {budget}: {name}\n{report}"
    return "compressed" if report.swapped else "left"


def hunt(count: int, seed: int) -> dict[str, Any]:
    """Draw cases; returns how many came to what, and those that were wrong."""
    outcomes, bad = Counter(), []
    for number in range(count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                outcomes[case(random.Random(f"{seed} {number}"))] += 1
            except Exception as error:
                bad.append(f"seed {seed} case {number}: {type(error).__name__}: {error}")
    return {"outcomes": dict(outcomes), "bad": bad}


if __name__ == "__main__":
    main(hunt, __doc__, "cases", 1000)
