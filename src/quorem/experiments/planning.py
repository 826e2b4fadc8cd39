"""``quorem plan`` for prepared data: by the counts of its training rows, and with a search by training."""

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from ..collection import Table
from ..data.batches import Prepared
from ..planner import Plan, Rule, modules_of, plan_modules
from ..planner.footprint import Optimizer
from ..schemes import RawCounts
from ..training.config import RunConfig
from ..training.loop import train_many
from ..training.model import data_identity

PLAN_RULES = (Rule(), Rule(pool_share=0.3), Rule(pool_share=0.8), Rule(kept_per_row=3), Rule(rarely=5))
ROW_DTYPES = (torch.float32, torch.bfloat16)  # the second where not every id that counts has a row in the first
SEARCH_ROWS = 200_000  # at most, and half of the training rows
WORKERS = 2  # models that train at a time


def plan(
    prepared: Prepared,
    budget: int | str,
    embedding_dim: int,
    *,
    optimizer: Optimizer | None,
    dtypes: Sequence[torch.dtype] = ROW_DTYPES,
    rule: Rule = Rule(),  # noqa: B008
) -> Plan:
    """A plan for the features of prepared data by their counts in the training rows.

    Args:
        prepared: the data.
        budget: bytes, or a string such as ``"2MB"``.
        embedding_dim: width of a row.
        optimizer: whose state counts; None plans for serving, where rows are float32 or have 8 or 4 bits.
        dtypes: that rows may have in training.
        rule: how the budget is divided.
    """
    tables = [
        Table(name, n, embedding_dim, frequencies=_counts(prepared, name), raw_ids=prepared.has_raw_ids)
        for name, n in zip(prepared.names, prepared.cardinalities, strict=True)
    ]
    dtypes = dtypes if optimizer is not None else dtypes[:1]
    return plan_modules(modules_of(tables, dtypes[0]), budget, optimizer=optimizer, dtypes=dtypes, rule=rule)


def _counts(prepared: Prepared, name: str) -> torch.Tensor | RawCounts:
    """How often each id of a feature occurs in the training rows; of raw ids, those that do."""
    if not prepared.has_raw_ids:
        return torch.from_numpy(prepared.frequencies(name))
    ids, counts = prepared.raw_counts(name)
    return RawCounts(torch.tensor(ids), torch.from_numpy(counts))


def options_of(planned: Plan) -> dict[str, Any]:
    """What a plan says of a run, as options of ``RunConfig``."""
    dtype = planned.tables[0].dtype
    return {"plan": dict(planned), "row_dtype": str(dtype).removeprefix("torch."), "bits": planned.bits}


def search(
    prepared: Prepared,
    budget: int | str,
    embedding_dim: int,
    *,
    optimizer: Optimizer | None,
    dtypes: Sequence[torch.dtype] = ROW_DTYPES,
    console: Console,
) -> Plan:
    """The best of a few plans around the rule: DLRM is trained on a part of the rows, the validation rows decide."""
    plans: dict[Rule, Plan] = {}
    for rule in PLAN_RULES:
        planned = plan(prepared, budget, embedding_dim, optimizer=optimizer, dtypes=dtypes, rule=rule)
        if planned not in plans.values():
            plans[rule] = planned
    if len(plans) == 1:
        console.print("Every id that counts has a row of its own: there is nothing to search.", highlight=False)
        return plans[PLAN_RULES[0]]
    rows = min(SEARCH_ROWS, max(1, len(prepared.split("train")) // 2))
    data = data_identity(prepared)
    configs = [
        RunConfig(data=data, embedding_dim=embedding_dim, max_rows=rows, **options_of(planned))
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
