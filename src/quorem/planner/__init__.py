"""The planner: choose a scheme for each table so that all tables and their optimizer state fit a budget in bytes.

How a budget becomes a plan, and the file of each step:

1. ``footprint``: the tables to plan, grouped by the module that holds them, with the frequencies of their ids; and the
   bytes of a row, a table and a module, the optimizer's state included.
2. Where the ids of all tables are counted, ``counted``: the same thresholds on counts divide the ids of all tables
   into those with rows of their own, those that share a pool, and the rest (``by_count``). Otherwise ``evenly``: all
   tables that shrink have the same number of collisions.
3. ``plan_modules`` repeats step 2 for each dtype, or number of bits, that rows may have, then for narrower rows, and
   takes the best plan.
4. ``planned``: the plan as a value, to and from JSON, and its text.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor, nn

from ..checks import FLOAT_DTYPES, check_choice, check_int, check_mapping, shown_names
from ..modules.collection import Table
from ..ops.codes import BITS
from ..ops.state import RULES, check_state_dtype
from ..optimizer_names import Optimizer, StateDtype, check_optimizer
from ..paper.schemes import RawCounts
from .budget import parse_bytes, show_bytes
from .by_count import share_up_to
from .counted import plan_counted, tally
from .evenly import plan_evenly
from .footprint import Form, Module, StoredModules, modules_of
from .planned import Candidate, Plan

__all__ = ["Module", "Plan", "plan", "plan_modules"]

# How many times narrower rows are: what that loses, as the share of the traffic that loses as much by sharing rows.
NARROWING = {2: 0.0125, 4: 0.03, 8: 0.07}
# Tables of at most FEW ids keep rows of D numbers. A plan that narrows them too has ALL_NARROW added to its loss.
FEW, ALL_NARROW = 50, 0.05
THIN, SELDOM = 0.6, 10  # a table is thin if over THIN of its visits go to ids seen at most SELDOM times
MATRICES = 0.2  # the most of the budget that matrices of narrow rows may take


def plan(
    model_or_tables: nn.Module | Sequence[Table],
    budget: int | str,
    *,
    optimizer: Optimizer | None = "adagrad",
    frequencies: Mapping[str, Tensor] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    bits: Sequence[Literal[8, 4]] | None = None,
    state_dtype: StateDtype | Literal["auto"] = "auto",
    row_multiple: int = 1,
) -> Plan:
    """Choose a scheme for each table, so that all tables fit a budget and lose as little quality as possible.

    Where the frequencies of all ids are known, the most frequent ids of all tables have rows of their own, less
    frequent ids share one pool of rows, and the rarest ids of each table share one row (``quorem.planner.by_count``).
    Where that would leave too much traffic to shared rows, rows are 2, 4 or 8 times narrower than vectors (``width``).
    Otherwise small tables stay full, and all tables that shrink have the same number of collisions
    (``quorem.planner.evenly``). No table becomes larger than it was.

    Args:
        model_or_tables: a model: its ``nn.Embedding``, ``nn.EmbeddingBag`` and full quorem tables are planned, named by
            their path; a shared table is planned once. Or ``quorem.Table`` objects, which one collection will hold.
        budget: bytes, or a string such as ``"512MB"`` or ``"2GiB"``. Rows, maps, layouts and the optimizer's state
            count; the rest of the model does not.
        optimizer: the optimizer whose state counts: ``"sgd"``, ``"adagrad"``, ``"rowwise_adagrad"``, ``"adam"``,
            ``"amsgrad"`` or ``"adamw"``; None counts the tables alone, as in serving.
        frequencies: how often each id of a table occurs in training, ``[n]``, by name of the table. If some tables have
            none, all are planned without, with a warning. Where ids are not in order of falling frequency, tables store
            lists of their hot and cold ids, and the lists count.
        dtypes: dtypes that rows may have. A module keeps its dtype, unless that dtype is listed here and a narrower
            listed one loses less.
        bits: numbers of bits that ``quantize_`` may store a weight in after training: any of 8 and 4. By default both,
            where ``optimizer`` is None and frequencies are known, and none otherwise.
        state_dtype: dtype of the optimizer's state for rows: ``"float32"``, or ``"bfloat16"`` or ``"log8"`` for
            ``quorem.optim.Adagrad(state_dtype=...)``, which updates all tables row by row. ``"auto"`` is ``"log8"``
            where all gradients are sparse and rows of two-byte numbers would be too few otherwise, else ``"float32"``.
        row_multiple: narrow rows have a multiple of this many numbers: 4 for TorchRec's collections.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if the budget is too small (the message names the smallest possible one), or an argument is out of
            range.

    >>> tables = [Table("user", 1_000_000, 16), Table("item", 50_000, 16), Table("country", 200, 16)]
    >>> wished = plan(tables, "16MB", optimizer="adagrad")
    >>> wished["country"], wished["user"], wished.bytes <= 16_000_000
    (Full(), QR(num_collisions=9), True)
    >>> visits = {t.name: 1e7 / (1 + torch.arange(t.num_embeddings)) for t in tables}
    >>> plan(tables, "16MB", frequencies={name: count.long() for name, count in visits.items()})["user"]
    HotCold(num_hot=...)
    """
    check_mapping("frequencies", frequencies)
    for name, options in (("dtypes", dtypes), ("bits", bits)):
        if options is not None and not isinstance(options, Sequence):
            raise TypeError(f"{name} ({options}) must be a sequence, such as ({options},)")
    if not dtypes or any(dtype not in FLOAT_DTYPES.values() for dtype in dtypes):
        known = ", ".join(map(str, FLOAT_DTYPES.values()))
        raise ValueError(f"dtypes ({tuple(dtypes)}) must be one or more of {known}")
    if state_dtype != "auto":
        check_choice("state_dtype", state_dtype, StateDtype)
    check_int("row_multiple", row_multiple, 1)
    modules = [replace(module, row_multiple=row_multiple) for module in modules_of(model_or_tables, dtypes[0])]
    if not modules:
        raise ValueError(f"model_or_tables ({type(model_or_tables).__name__}) must hold an embedding table")
    return plan_modules(modules, budget, optimizer, frequencies or {}, dtypes, bits, state_dtype)


def plan_modules(
    modules: Sequence[Module],
    budget: int | str,
    optimizer: Optimizer | None,
    frequencies: Mapping[str, Tensor],
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    bits: Sequence[Literal[8, 4]] | None = None,
    state_dtype: StateDtype | Literal["auto"] = "auto",
    reserved: int = 0,
    times_narrower: int | None = None,
) -> Plan:
    """``plan`` for modules; ``reserved`` bytes of the budget are used already, for tables that cannot be planned.

    ``times_narrower``, of tables with counts, tries only one width of rows: 1, 2, 4 or 8 times narrower than vectors.
    """
    size = parse_bytes(budget)
    check_optimizer(optimizer)
    modules = [module.with_frequencies(frequencies) for module in modules]
    tables = [table for module in modules for table in module.tables]
    if unmatched := sorted(set(frequencies) - {table.name for table in tables}):
        raise ValueError(f"frequencies has no table to go with {', '.join(map(repr, unmatched))}")
    uncounted = [table.name for table in tables if not isinstance(table.frequencies, Tensor | RawCounts)]
    counted = not uncounted
    if 0 < len(uncounted) < len(tables):
        text = f"frequencies has no counts of {shown_names(uncounted)}: all tables are planned as if none had counts"
        warnings.warn(text, stacklevel=3)
    if bits is None:
        bits = BITS if counted and optimizer is None else ()
    elif bits and (not counted or optimizer is not None):
        raise ValueError(f"bits ({tuple(bits)}) must go with frequencies of every table and optimizer=None")
    if wrong := sorted(set(bits) - set(BITS)):
        raise ValueError(f"bits ({wrong[0]!r}) must be 8 or 4")
    forms = _forms(modules, optimizer, dtypes, bits, state_dtype)
    tallies = [tally(table) for table in tables] if counted else []
    tried: list[Candidate] = []

    def attempt(form: Form, times: int = 1, few: int = 0) -> Candidate:
        stored, left = StoredModules(modules, optimizer, form, dtypes, times, few), size - reserved
        if times > 1 and times_narrower is None and stored.matrix_bytes > MATRICES * left:
            return Candidate(None, left)
        tried.append(plan_counted(stored, tallies, left) if counted else plan_evenly(stored, left))
        return tried[-1]

    if counted:
        thin = any(share_up_to(SELDOM, each.values, each.ids) > THIN for each in tallies)
        best = _best_counted(attempt, forms, times_narrower, thin and optimizer is not None)
    else:
        plans = [candidate.plan for candidate in map(attempt, forms) if candidate.plan is not None]
        best = min(plans, key=lambda planned: planned.cost, default=None)
    if best is None:
        least = min(candidate.least for candidate in tried) + reserved
        state = "" if optimizer is None else f", {optimizer}'s state included"
        others = f" and {reserved} bytes that cannot be compressed" if reserved else ""
        raise ValueError(
            f"budget ({budget!r}) must be at least {least} bytes ({show_bytes(least)})"
            f" for {len(tables)} tables{others}{state}"
        )
    return best


def _forms(
    modules: Sequence[Module],
    optimizer: Optimizer | None,
    dtypes: Sequence[torch.dtype],
    bits: Sequence[int],
    state_dtype: StateDtype | Literal["auto"],
) -> list[Form]:
    """How numbers may be stored, from the most bytes to the fewest."""
    given: StateDtype = "float32" if state_dtype == "auto" else state_dtype
    if given != "float32":
        if optimizer is None:
            raise ValueError(f"state_dtype ({given!r}) must go with an optimizer")
        for module in modules:
            check_state_dtype(optimizer, module.dtype, given)
    sizes = sorted({dtype.itemsize for dtype in dtypes}, reverse=True)
    forms = [Form(itemsize, given) for itemsize in sizes]
    codes = optimizer is not None and "log8" in RULES[optimizer].state_dtypes
    if state_dtype == "auto" and codes and sizes[-1] == 2 and all(module.sparse for module in modules):
        forms.append(Form(2, "log8"))
    return forms + [Form(sizes[0], bits=number) for number in sorted(set(bits), reverse=True)]


def _best_counted(
    attempt: Callable[..., Candidate], forms: Sequence[Form], times_narrower: int | None, thin: bool
) -> Plan | None:
    """The widest form that gives rows to all ids that count; else the fewest bits that fit, and the best width.

    Fewer bits of a number lose next to nothing. With narrower rows more ids have their own, but each row says less. The
    best width has the least sum of two shares of the traffic: that of ids that share rows, and NARROWING for the width.
    With a ``thin`` table rows of half the numbers are taken, if all ids that occur then have rows.
    """
    candidates: list[tuple[float, Candidate]] = []  # with the share of the traffic that their width is worth
    for options in ((forms[0],), (forms[-1], 2, FEW)) if thin and times_narrower is None else ():
        candidate = attempt(*options)
        if candidate.plan is not None and not candidate.plan.cost:
            return candidate.plan
    for form in forms if times_narrower in (None, 1) else ():
        candidate = attempt(form)
        if candidate.gives_rows_to_all:
            return candidate.plan
        if candidate.plan is not None:  # not so in 8 bits, whose rows are in blocks, if there are few rows
            candidates = [(0.0, candidate)]
    for times, share in NARROWING.items():
        for few in (FEW, 0) if times_narrower in (None, times) else ():
            candidates.append((share + (0 if few else ALL_NARROW), attempt(forms[-1], times, few)))
    possible = [(share + each.shared, each.plan) for share, each in candidates if each.plan is not None]
    return min(possible, key=itemgetter(0), default=(0, None))[1]
