"""``quorem plan`` for prepared data: by the counts of its training rows, and with a search by training."""

import torch
from rich.console import Console

from ..collection import Table
from ..data.batches import Prepared
from ..planner import Plan, Rule, modules_of, plan_modules
from ..planner.footprint import Optimizer
from ..training.config import RunConfig
from ..training.loop import train_many
from ..training.model import data_identity

RULES = (Rule(), Rule(pool_share=0.3), Rule(pool_share=0.8), Rule(kept_per_row=2), Rule(kept_per_row=8, rarely=3))
SEARCH_ROWS = 200_000  # at most, and half of the training rows
WORKERS = 2  # models that train at a time


def plan(
    prepared: Prepared,
    budget: int | str,
    embedding_dim: int,
    *,
    optimizer: Optimizer | None,
    rule: Rule = Rule(),  # noqa: B008
) -> Plan:
    """A plan for the features of prepared data by their counts in the training rows."""
    tables = [
        Table(name, n, embedding_dim, frequencies=torch.from_numpy(prepared.frequencies(name)))
        for name, n in zip(prepared.names, prepared.cardinalities, strict=True)
    ]
    return plan_modules(modules_of(tables), budget, optimizer=optimizer, rule=rule)


def search(
    prepared: Prepared, budget: int | str, embedding_dim: int, *, optimizer: Optimizer | None, console: Console
) -> Plan:
    """The best of a few plans around the rule: DLRM is trained on a part of the rows, the validation rows decide."""
    plans: dict[Rule, Plan] = {}
    for rule in RULES:
        planned = plan(prepared, budget, embedding_dim, optimizer=optimizer, rule=rule)
        if planned not in plans.values():
            plans[rule] = planned
    if len(plans) == 1:
        console.print("Every id that counts has a row of its own: there is nothing to search.", highlight=False)
        return plans[RULES[0]]
    rows = min(SEARCH_ROWS, max(1, len(prepared.split("train")) // 2))
    data = data_identity(prepared)
    configs = [
        RunConfig(data=data, plan=dict(planned), embedding_dim=embedding_dim, max_rows=rows)
        for planned in plans.values()
    ]
    console.print(f"Training {len(plans)} plans on {rows:,} rows each ...", highlight=False)
    results = train_many(configs, prepared, workers=WORKERS)
    losses = {rule: float(r["validation"]["log_loss"]) for rule, r in zip(plans, results, strict=True)}
    for rule, loss in losses.items():
        about = f"pool of at most {rule.pool_share:.0%} of the rows, {rule.kept_per_row:g} ids a row"
        about += f", seen more than {rule.rarely} time{'s' * (rule.rarely > 1)}"
        console.print(f"  {about}: validation log loss {loss:.5f}", highlight=False)
    return plans[min(losses, key=losses.__getitem__)]
