"""Which id of its table each id becomes before any row is read: raw ids are mixed, unknown ids are replaced.

Unknown ids are those outside ``[0, n)``. ``unknown`` of a table says what they are:

======= =========================================================================================
error   an IndexError on a CPU; on a GPU what ``on_invalid_id`` says
rest    an id of the rest of a ``HotCold`` table, which share one row
hash    a composed id of the table, chosen by the mixed unknown id: of ``HotCold`` a cold one,
        whose rows are in the pool or the cold scheme; else any id of the table
======= =========================================================================================
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .hashing import mixed_ids
from .schemes import TableSpec
from .schemes.frequency import Ranks

UnknownIds = Literal["error", "rest", "hash"]
RULE_COLUMNS = 3
ALL, FIRST, COUNT = range(RULE_COLUMNS)  # whether all ids are replaced; by ids in [FIRST, FIRST + COUNT); none if 0


class Listed(NamedTuple):
    """A feature whose unknown ids are hashed onto cold ids that a list says: the cold ids, or all but the hot ones."""

    feature: int
    is_cold: bool
    ids: Tensor


def check_unknown(unknown: str, spec: TableSpec, raw_ids: bool, name: str = "") -> None:
    """Raise ValueError unless a table can do with unknown ids what ``unknown`` says."""
    title = f" of table {name!r}" if name else ""
    if unknown not in ("error", "rest", "hash"):
        raise ValueError(f"unknown ({unknown!r}){title} must be one of 'error', 'rest', 'hash'")
    if raw_ids and unknown != "error":
        raise ValueError(f"unknown ({unknown!r}){title} must be 'error' with raw_ids: no raw id is unknown")
    if unknown == "rest" and not spec.num_rest:
        raise ValueError(f"unknown ('rest'){title} must be 'error' or 'hash': its scheme ({spec.scheme}) has no rest")
    if unknown == "hash" and not spec.num_composed:
        raise ValueError(f"unknown ('hash'){title} must be 'error' or 'rest': no id of the table is composed")


def rules_of(
    specs: Sequence[TableSpec],
    raw_ids: Sequence[bool],
    unknown: Sequence[str],
    ranks: Sequence[Ranks | None],
    table_of: Sequence[int],
) -> Tensor | None:
    """The rule of each feature, int64 ``[F, 3]``; None where all ids stay as they are."""
    if not any(raw_ids) and all(policy == "error" for policy in unknown):
        return None
    rules = []
    for spec, raw, policy, lists in zip(specs, raw_ids, unknown, ranks, strict=True):
        if raw:
            rules.append([1, 0, spec.num_embeddings])
        elif policy == "rest":
            rules.append([0, spec.num_embeddings - 1 if lists is None else _first_unlisted(lists), 1])
        elif policy == "hash":
            rules.append([0, spec.num_hot if lists is None else 0, spec.num_composed])
        else:
            rules.append([0, 0, 0])
    return torch.tensor([rules[t] for t in table_of], device="cpu")


def listed_of(
    specs: Sequence[TableSpec], unknown: Sequence[str], ranks: Sequence[Ranks | None], table_of: Sequence[int]
) -> list[Listed]:
    """The features whose unknown ids are hashed onto listed ids."""
    listed = []
    for feature, t in enumerate(table_of):
        lists = ranks[t]
        if unknown[t] == "hash" and lists is not None:
            rest = specs[t].num_rest > 0
            listed.append(Listed(feature, rest, lists.cold if rest else lists.hot))
    return listed


def replaced(
    ids: Tensor, feature: Tensor | None, rules: Tensor, limits: Tensor, listed: Sequence[Listed] = ()
) -> Tensor:
    """``ids`` as ids of their tables; those that are unknown and have no rule stay as they are.

    Args:
        ids: ``[B, F]``, or jagged ``[V]``.
        feature: of each jagged id; None where ids have a column for each.
        rules: of each feature, as ``rules_of`` says.
        limits: number of ids of each feature's table.
        listed: as ``listed_of`` says.

    >>> rules = torch.tensor([[0, 9, 1], [0, 0, 0]])
    >>> replaced(torch.tensor([[3, -1], [-1, 4]]), None, rules, torch.tensor([10, 10]))
    tensor([[ 3, -1],
            [ 9,  4]])
    """
    own_rules, limit = (rules, limits) if feature is None else (rules[feature], limits[feature])
    wide = ids.long()
    number = mixed_ids(wide, own_rules[..., COUNT].clamp(min=1))
    target = own_rules[..., FIRST] + number
    for other in listed:
        column = torch.arange(len(rules), device=ids.device) if feature is None else feature
        target = torch.where(column == other.feature, _listed(number, other), target)
    is_unknown = (wide < 0) | (wide >= limit) | (own_rules[..., ALL] > 0)
    return torch.where(is_unknown & (own_rules[..., COUNT] > 0), target, wide)


def _listed(number: Tensor, listed: Listed) -> Tensor:
    """The ``number``-th id of a list, or the ``number``-th that is not in it."""
    ids = listed.ids.to(number.device).long()
    if listed.is_cold:
        return ids[number.clamp(max=len(ids) - 1)]
    before = ids - torch.arange(len(ids), device=ids.device)  # ids below each that are not listed
    return number + torch.searchsorted(before, number, right=True)


def _first_unlisted(ranks: Ranks) -> int:
    """The lowest id that is in neither list."""
    ids = torch.cat([ranks.hot, ranks.cold]).long().sort().values
    skipped = (ids != torch.arange(len(ids))).nonzero()
    return int(skipped[0]) if len(skipped) else len(ids)
