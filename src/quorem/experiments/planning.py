"""``quorem plan`` for prepared data: a plan by the counts in its training rows, or the best of a few by training."""

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import torch

from ..checks import dtype_name
from ..data.prepared import Prepared
from ..optimizer_names import Optimizer, RowDtype, StateDtype
from ..planner import Plan, plan_modules
from ..planner.footprint import modules_of
from ..training.config import RunConfig
from ..training.feed import Feed
from ..training.loop import train
from ..training.model import counted_tables, data_identity

SEARCHED = (1, 2, 4)  # D / d, where rows have d numbers instead of D: the widths of a search
SEARCH_ROWS = 200_000  # the most rows that each plan of a search is trained on


def plan(
    prepared: Prepared,
    budget: int | str,
    embedding_dim: int,
    *,
    optimizer: Optimizer | None,
    row_dtype: RowDtype | Literal["auto"] = "auto",
    state_dtype: StateDtype | Literal["auto"] = "auto",
    times_narrower: int | None = None,
) -> Plan:
    """Plan the tables of prepared data by how often ids occur in the training rows.

    Without an optimizer the plan is for serving, with rows in float32, 8 bits or 4 bits. Dtypes ``"auto"`` are bfloat16
    if not all ids seen more than once get a row in float32, and log8 if rows in bfloat16 are too few.
    ``times_narrower`` is the one width to try: rows 1, 2, 4 or 8 times narrower than vectors.
    """
    dtypes = (torch.float32, torch.bfloat16) if row_dtype == "auto" else (getattr(torch, row_dtype),)
    dtypes = dtypes if optimizer is not None else dtypes[:1]
    modules = modules_of(counted_tables(prepared, embedding_dim), dtypes[0])
    return plan_modules(modules, budget, optimizer, {}, dtypes, state_dtype=state_dtype, times_narrower=times_narrower)


def search(
    prepared: Prepared, budget: int | str, embedding_dim: int, *, say: Callable[[str], None], **options: Any
) -> Plan:
    """The best of ``plan`` and the plans with other widths of rows, by validation loss on a part of the rows.

    The model is DLRM, or DCN where the data have a single feature. ``say`` is called with lines of progress, and
    ``options`` are ``optimizer``, ``row_dtype`` and ``state_dtype``.
    """
    plans = [plan(prepared, budget, embedding_dim, **options)]
    for times in SEARCHED:
        with contextlib.suppress(ValueError):  # the budget is too small for rows of this width
            other = plan(prepared, budget, embedding_dim, **options, times_narrower=times)
            plans += [other] if other not in plans else []
    feed = Feed(prepared, "cpu")
    rows = min(SEARCH_ROWS, len(feed.rows["train"]))
    network = "dlrm" if len(prepared.names) > 1 or prepared.dense_names else "dcn"
    about: dict[str, Any] = {"data": data_identity(prepared), "network": network, "max_rows": rows}
    if options["optimizer"] is not None:
        about["optimizer"] = options["optimizer"]
    say(f"Training {len(plans)} plans on {rows:,} rows each ...")
    losses = []
    for planned in plans:
        config = RunConfig(embedding_dim=embedding_dim, **about, **options_of(planned))
        losses.append(train(config, feed)["validation"]["log_loss"])
        width = min(scheme.width or embedding_dim for scheme in planned.values())
        say(f"  narrowest rows of {width} numbers: validation log loss {losses[-1]:.5f}")
    return plans[losses.index(min(losses))]


def options_of(planned: Plan) -> dict[str, Any]:
    """The options of ``RunConfig`` that a plan determines."""
    return {
        "plan": dict(planned),
        "row_dtype": dtype_name(planned.tables[0].dtype),
        "state_dtype": planned.state_dtype,
        "bits": planned.bits,
    }
