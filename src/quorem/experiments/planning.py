"""``quorem plan`` for prepared data: plan by the counts in its training rows, or search for a plan by training."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from ..checks import dtype_name
from ..data.prepared import Prepared
from ..optimizer_names import Optimizer, StateDtype
from ..planner import NARROWING, Plan, Rule, modules_of, plan_modules
from ..training.config import RunConfig
from ..training.loop import train_many
from ..training.model import data_identity
from ..training.tables import counted_tables

PLAN_RULES = (Rule(), Rule(pool_share=0.3), Rule(pool_share=0.8), *(Rule(times_narrower=n) for n in NARROWING))
TRIED_DTYPES = (torch.float32, torch.bfloat16)  # the second if not all ids seen more than once get a row in the first
SEARCH_ROWS = 200_000  # the most rows of a search, which also uses at most half of the training rows
WORKERS = 2  # models that train at a time


def plan(
    prepared: Prepared,
    budget: int | str,
    embedding_dim: int,
    *,
    optimizer: Optimizer | None,
    dtypes: Sequence[torch.dtype] = TRIED_DTYPES,
    state_dtype: StateDtype | Literal["auto"] = "auto",
    rule: Rule = Rule(),  # noqa: B008
) -> Plan:
    """Plan the tables of prepared data by how often ids occur in the training rows.

    Args:
        prepared: the data.
        budget: bytes, or a string such as ``"2MB"``.
        embedding_dim: width of a row.
        optimizer: the optimizer whose state counts; None plans for serving, with rows in float32, 8 bits or 4 bits.
        dtypes: dtypes that rows may have in training.
        state_dtype: dtype of the optimizer's state for rows; ``"auto"`` is log8 if rows in bfloat16 are too few.
        rule: how the budget is divided.
    """
    dtypes = dtypes if optimizer is not None else dtypes[:1]
    modules = modules_of(counted_tables(prepared, embedding_dim), dtypes[0])
    return plan_modules(modules, budget, optimizer=optimizer, dtypes=dtypes, state_dtype=state_dtype, rule=rule)


def options_of(planned: Plan) -> dict[str, Any]:
    """The options of ``RunConfig`` that a plan determines."""
    row_dtype = dtype_name(planned.tables[0].dtype)
    return {
        "plan": dict(planned),
        "row_dtype": row_dtype,
        "state_dtype": planned.state_dtype,
        "bits": planned.bits,
    }


def search(
    prepared: Prepared,
    budget: int | str,
    embedding_dim: int,
    *,
    optimizer: Optimizer | None,
    dtypes: Sequence[torch.dtype] = TRIED_DTYPES,
    state_dtype: StateDtype | Literal["auto"] = "auto",
    say: Callable[[str], None],
) -> Plan:
    """The best of a few plans with different rules: DLRM is trained on a part of the rows, and validation decides.

    Where the data have a single feature, it is DCN: DLRM needs two vectors. ``say`` is called with lines of progress.
    """
    options: dict[str, Any] = {"optimizer": optimizer, "dtypes": dtypes, "state_dtype": state_dtype}
    plans = {PLAN_RULES[0]: plan(prepared, budget, embedding_dim, **options)}
    if plans[PLAN_RULES[0]].cost == 0 and {scheme.width for scheme in plans[PLAN_RULES[0]].values()} == {None}:
        say("Every id has a row of its own: there is nothing to search.")
        return plans[PLAN_RULES[0]]
    for rule in PLAN_RULES[1:]:
        try:
            planned = plan(prepared, budget, embedding_dim, **options, rule=rule)
        except ValueError:  # the budget is too small for rows of this width
            continue
        if planned not in plans.values():
            plans[rule] = planned
    rows = min(SEARCH_ROWS, max(1, len(prepared.split("train", check=False)) // 2))
    data = data_identity(prepared)
    network = "dlrm" if len(prepared.names) > 1 or prepared.dense_names else "dcn"
    configs = [
        RunConfig(data=data, network=network, embedding_dim=embedding_dim, max_rows=rows, **options_of(planned))
        for planned in plans.values()
    ]
    say(f"Training {len(plans)} plans on {rows:,} rows each ...")
    results = train_many(configs, prepared, workers=WORKERS)
    losses = {rule: float(r["validation"]["log_loss"]) for rule, r in zip(plans, results, strict=True)}
    for rule, loss in losses.items():
        width = min(scheme.width or embedding_dim for scheme in plans[rule].values())
        about = f"rows of {width} numbers, pool of at most {rule.pool_share:.0%} of the rows"
        say(f"  {about}: validation log loss {loss:.5f}")
    return plans[min(losses, key=losses.__getitem__)]
