"""What is done to ids before any row is read: raw ids are hashed to ids of the table, unknown ids are replaced.

Unknown ids are those outside ``[0, n)``. The option ``unknown`` of a table says how they are treated:

======= =========================================================================================
error   as an error: an IndexError on a CPU; on a GPU as ``on_invalid_id`` says
rest    as an id of the rest of a ``HotCold`` table; the rest share one row
hash    as a composed id of the table, chosen by hashing the unknown id: a cold id of ``HotCold``,
        any id of another scheme
======= =========================================================================================

An unknown id never stands for the padding id, whose vector is zero.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..ops.layout import Layout
from ..ops.rows import places
from ..paper.hashing import mixed_ids
from ..paper.schemes import TableSpec
from ..paper.schemes.frequency import Ranks, cold_ids, first_of_rest

UnknownIds = Literal["error", "rest", "hash"]
RULE_COLUMNS = 4
# ALL: whether all ids are replaced, or only unknown ones. They become ids in [FIRST, FIRST + COUNT); COUNT 0: no rule.
# SKIPPED: the number in [0, COUNT) of the padding id, in whose place the next one is taken; -1 if there is none.
ALL, FIRST, COUNT, SKIPPED = range(RULE_COLUMNS)


class Listed(NamedTuple):
    """A feature whose unknown ids are hashed to cold ids, and the lists that define these."""

    feature: int
    spec: TableSpec
    ranks: Ranks


def check_unknown(unknown: str, spec: TableSpec, raw_ids: bool, name: str = "") -> None:
    """Raise ValueError unless a table supports the option ``unknown``."""
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
    padding: Sequence[int | None],
    table_of: Sequence[int],
    layout: Layout,
) -> tuple[Tensor | None, list[Listed]]:
    """The rule of each feature, int64 ``[F, 4]``, or None if there is none; and which hash to listed cold ids.

    Raises:
        ValueError: if the padding id is the only id that unknown ids could stand for.
    """
    if not any(raw_ids) and all(policy == "error" for policy in unknown):
        return None, []
    rules, listed = [], []
    for feature, t in enumerate(table_of):
        spec, lists, rule = specs[t], ranks[t], [0, 0, 0, -1]
        if raw_ids[t]:
            rule = [1, 0, spec.num_embeddings, -1]
        elif unknown[t] == "rest":
            rest = [i for i in first_of_rest(spec, lists, 2).tolist() if i != padding[t]]
            if not rest:
                raise ValueError(f"unknown ('rest') must be 'error': the only rest of {spec.scheme} is padding")
            rule = [0, rest[0], 1, -1]
        elif unknown[t] == "hash":
            skipped = -1
            if (pad := padding[t]) is not None:
                slot = layout.slots[layout.spans[feature, 0]]
                skipped = max(int(places(torch.tensor(pad, device="cpu"), slot, layout.ranks)) - spec.num_own, -1)
            if skipped == 0 and spec.num_composed == 1:
                raise ValueError(f"unknown ('hash') must be 'error': the only composed id of {spec.scheme} is padding")
            rule = [0, spec.num_hot if lists is None else 0, spec.num_composed, skipped]
            if lists is not None:
                listed.append(Listed(feature, spec, lists))
        rules.append(rule)
    return torch.tensor(rules, device="cpu"), listed


def replaced_ids(
    ids: Tensor, feature: Tensor | None, rules: Tensor, limits: Tensor, listed: Sequence[Listed] = ()
) -> Tensor:
    """``ids`` as ids of their tables. Unknown ids of features without a rule are not changed.

    Args:
        ids: ``[B, F]``, or jagged ``[V]``.
        feature: the feature of each jagged id; None for ``[B, F]``.
        rules: the rule of each feature, from ``rules_of``.
        limits: number of ids of each feature's table.
        listed: from ``rules_of``.

    >>> rules = torch.tensor([[0, 9, 1, -1], [0, 0, 0, -1]])
    >>> replaced_ids(torch.tensor([[3, -1], [-1, 4]]), None, rules, torch.tensor([10, 10]))
    tensor([[ 3, -1],
            [ 9,  4]])
    """
    own_rules, limit = (rules, limits) if feature is None else (rules[feature], limits[feature])
    wide = ids.long()
    count = own_rules[..., COUNT].clamp(min=1)
    number = mixed_ids(wide, count)
    number = torch.where(number == own_rules[..., SKIPPED], (number + 1) % count, number)
    target = own_rules[..., FIRST] + number
    for other in listed:
        column = torch.arange(len(rules), device=ids.device) if feature is None else feature
        cold = cold_ids(number.clamp(max=other.spec.num_composed - 1), other.spec, other.ranks)
        target = torch.where(column == other.feature, cold, target)
    is_unknown = (wide < 0) | (wide >= limit) | (own_rules[..., ALL] > 0)
    return torch.where(is_unknown & (own_rules[..., COUNT] > 0), target, wide)
