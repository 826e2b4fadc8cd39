"""Steps of drawn optimizers on rows: after them the tables are those of ``torch.optim`` on dense gradients.

``PYTHONPATH=tests python -m hunt.steps --steps 100000`` prints its figures as JSON.
A run draws a collection, an optimizer with its options, whether it steps on sparse gradients or within the backward
pass, and a learning rate for each step. Between steps it may evaluate, save and load, copy, flush, or write into
``stored``.
"""

import copy
import random
import warnings
from collections import Counter
from typing import Any

import torch
from hunt.command import main
from torch import Tensor

from quorem import QR, ChineseRemainder, EmbeddingCollection, Full, GeneralizedQR, Hash, HotCold, Pool, Table, optim
from quorem.ops.lagging import in_memory

STEPS_A_RUN = 100
TOLERANCE = 1e-9


def drawn_rule(rng: random.Random) -> tuple[type[optim.RowOptimizer], type[torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer, its oracle, and options that both take."""
    name = rng.choice(["SGD", "Adagrad", "Adam", "AMSGrad", "AdamW"])
    if name == "SGD":
        return optim.SGD, torch.optim.SGD, {}
    if name == "Adagrad":
        options = {"lr_decay": rng.choice([0, 0.01]), "initial_accumulator_value": rng.choice([0, 0.1])}
        return optim.Adagrad, torch.optim.Adagrad, {**options, "eps": rng.choice([1e-10, 1e-3])}
    options = {"betas": (rng.choice([0.9, 0.5, 0.0]), rng.choice([0.999, 0.99, 0.9])), "eps": 1e-6}
    if name == "AdamW":
        return optim.AdamW, torch.optim.AdamW, {**options, "weight_decay": rng.choice([0, 0.01, 0.1])}
    return getattr(optim, name), torch.optim.Adam, options


def drawn_scheme(rng: random.Random, n: int) -> Any:
    """Any scheme, stored so even where it does not shrink the table."""
    collisions, partitions, rows = rng.randint(2, 9), rng.choice([2, 3]), rng.randint(100, 120)  # enough for all ids
    hot, num_rest = rng.randint(1, n // 3), rng.randint(0, n // 3)
    operation = {"operation": rng.choice(["mult", "add"]), "force": True}
    schemes = [
        Full(),
        Hash(collisions, force=True),
        QR(collisions, operation=rng.choice(["mult", "add", "concat"]), force=True),
        GeneralizedQR(partitions, **operation),
        ChineseRemainder(partitions, **operation),
        HotCold(hot, cold=QR(collisions, operation="add", force=True), num_rest=num_rest),
        HotCold(hot, cold=Pool(rows, name=f"of{rows}"), num_rest=num_rest),
    ]
    return rng.choice(schemes)


def drawn_ids(rng: random.Random, count: int, limit: int) -> Tensor:
    """Ids of one table: any, or a few again and again."""
    draw = torch.Generator().manual_seed(rng.randrange(2**31))
    ids = torch.randint(0, limit, (count,), generator=draw)
    few = rng.choice([1, 3, limit])
    return (ids - ids % few).clamp(min=0).to(rng.choice([torch.int32, torch.int64]))


def drawn_collection(rng: random.Random, sparse: bool) -> EmbeddingCollection:
    """In float64, so that what is compared is the rule and not its rounding."""
    tables = []
    for k in range(rng.randint(1, 4)):
        n = rng.randint(20, 150)
        tables.append(Table(f"t{k}", n, 4, drawn_scheme(rng, n)))
    module = EmbeddingCollection(tables, sparse=sparse, dtype=torch.float64)
    draw = torch.Generator().manual_seed(rng.randrange(2**31))
    with torch.no_grad():
        module.stored.copy_(0.5 + torch.rand(module.stored.shape, generator=draw, dtype=torch.float64))
    return module


class Run:
    """A collection under an optimizer on rows, and its twin under ``torch.optim``."""

    def __init__(self, rng: random.Random, counts: Counter[str]) -> None:
        self.rng, self.counts = rng, counts
        self.in_backward = rng.random() < 0.5
        ours, theirs, self.options = drawn_rule(rng)
        self.module = drawn_collection(rng, sparse=not self.in_backward)
        self.twin = copy.deepcopy(self.module)
        self.twin.sparse = False
        self.make = ours
        self.optimizer = self._optimizer()
        amsgrad = {"amsgrad": True} if ours is optim.AMSGrad else {}
        self.truth = theirs(self.twin.parameters(), lr=0.1, **self.options, **amsgrad)
        self.name = f"{ours.__name__} {'in backward' if self.in_backward else 'sparse'}"

    def _optimizer(self) -> optim.RowOptimizer:
        if self.in_backward:
            return optim.apply_in_backward(self.module, self.make, lr=0.1, **self.options)
        return self.make(self.module.parameters(), lr=0.1, **self.options)

    def step(self) -> None:
        rng = self.rng
        lr, batch = 10 ** rng.uniform(-3, -1), rng.randint(1, 4)
        ids = torch.stack([drawn_ids(rng, batch, s.num_embeddings).long() for s in self.module.specs], 1)
        target = torch.tensor([rng.uniform(-1, 1) for _ in range(4)], dtype=torch.float64)
        for module, optimizer in ((self.module, self.optimizer), (self.twin, self.truth)):
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad()
            ((module(ids) - target).tanh().square().sum() + 0.1 * module(ids.flip(0)).sum()).backward()
            optimizer.step()

    def between(self) -> None:
        """What people do between two steps."""
        rng = self.rng
        kind = rng.choice(["evaluate", "resume", "copy", "flush", "write", "stored"])
        self.counts[kind] += 1
        if kind == "evaluate":
            ids = torch.stack([drawn_ids(rng, 3, s.num_embeddings).long() for s in self.module.specs], 1)
            with torch.no_grad():
                self.compare(self.module(ids), self.twin(ids))
        elif kind == "resume":
            state, rows = copy.deepcopy(self.optimizer.state_dict()), copy.deepcopy(self.module.state_dict())
            if self.in_backward:
                self.optimizer.remove()
            self.module.load_state_dict(rows)
            self.optimizer = self._optimizer()
            self.optimizer.load_state_dict(state)
        elif kind == "copy":
            self.compare(copy.deepcopy(self.module).stored, self.twin.stored)
        elif kind == "flush":
            self.optimizer.flush()
            self.compare(in_memory(self.module.stored), self.twin.stored)
        elif kind == "write":
            value, by_name = rng.uniform(0.5, 1.5), rng.random() < 0.5
            with torch.no_grad():
                for module in (self.module, self.twin):
                    (module.stored if by_name else next(module.parameters())).fill_(value)
        else:
            self.compare(self.module.stored, self.twin.stored)

    def compare(self, actual: Tensor, expected: Tensor) -> None:
        error = float((actual - expected).detach().abs().max())
        if not error <= TOLERANCE:
            raise AssertionError(f"{error:.2e} off")


def hunt(count: int, seed: int = 0) -> dict[str, Any]:
    """So many steps, a hundred in each drawn run."""
    rng, counts, rules, bad, done = random.Random(seed), Counter[str](), Counter[str](), [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while done < count:
            run, some = Run(rng, counts), min(STEPS_A_RUN, count - done)
            try:
                for _ in range(some):
                    run.step()
                    if rng.random() < 0.05:
                        run.between()
                run.compare(run.module.stored, run.twin.stored)
            except (AssertionError, RuntimeError, ValueError) as error:
                bad.append(f"{run.name} {run.options} {run.module}: {error!r}"[:600])
            done += some
            rules[run.name] += some
    return {"between": counts, "by_rule": rules, "bad": bad}


if __name__ == "__main__":
    main(hunt, __doc__, "steps", 10**5)
