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
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..ops.layout import Layout
from ..ops.rows import places
from ..paper.hashing import mixed_ids
from ..paper.schemes import TableSpec
from ..paper.schemes.frequency import Ranks, cold_ids, first_of_rest

if TYPE_CHECKING:
    from .storage import StoredTables


class IdRule(NamedTuple):
    """What ids of a feature become: ids in ``[first, first + size)``. The fields are integers of a tensor, too."""

    replaces_all: int = 0  # whether all ids are replaced, or only unknown ones
    first: int = 0
    size: int = 0  # 0: no id is replaced
    skipped: int = -1  # number in [0, size) of the padding id, in whose place the next one is taken; -1: there is none


class Listed(NamedTuple):
    """A feature whose unknown ids are hashed to cold ids, and the lists that define these."""

    feature: int
    spec: TableSpec
    ranks: Ranks


def rules_of(tables: "StoredTables", layout: Layout) -> tuple[list[IdRule], list[Listed]]:
    """The rule of each feature, or no rules if no ids are replaced; and the features that hash to listed cold ids."""
    if not any(tables.raw_ids) and all(policy == "error" for policy in tables.unknown):
        return [], []
    rules, listed = [], []
    for feature, t in enumerate(tables.table_of):
        spec, lists, pad, rule = tables.specs[t], tables._ranks[t], tables.padding[t], IdRule()
        if tables.raw_ids[t]:
            rule = IdRule(replaces_all=1, size=spec.num_embeddings)
        elif tables.unknown[t] == "rest":
            rest = [i for i in first_of_rest(spec, lists, 2).tolist() if i != pad]
            if not rest:
                raise ValueError(f"unknown ('rest') must be 'error': the only rest of {spec.scheme} is padding")
            rule = IdRule(first=rest[0], size=1)
        elif tables.unknown[t] == "hash":
            skipped = -1
            if pad is not None:
                slot = layout.slots[layout.spans[feature, 0]]
                skipped = max(int(places(torch.tensor(pad, device="cpu"), slot, layout.ranks)) - spec.num_own, -1)
            if skipped == 0 and spec.num_composed == 1:
                raise ValueError(f"unknown ('hash') must be 'error': the only composed id of {spec.scheme} is padding")
            rule = IdRule(first=spec.num_hot if lists is None else 0, size=spec.num_composed, skipped=skipped)
            if lists is not None:
                listed.append(Listed(feature, spec, lists))
        rules.append(rule)
    return rules, listed


def replaced_ids(
    ids: Tensor, feature: Tensor | None, rules: Tensor, limits: Tensor, listed: Sequence[Listed] = ()
) -> Tensor:
    """``ids`` as ids of their tables. Unknown ids of features without a rule are not changed.

    Jagged ids ``[V]`` have a ``feature`` each, ids ``[B, F]`` None. ``limits`` are the numbers of ids of the tables.

    >>> rules = torch.tensor([IdRule(first=9, size=1), IdRule()])
    >>> replaced_ids(torch.tensor([[3, -1], [-1, 4]]), None, rules, torch.tensor([10, 10]))
    tensor([[ 3, -1],
            [ 9,  4]])
    """
    rule_of_id, limit = (rules, limits) if feature is None else (rules[feature], limits[feature])
    replaces_all, first, size, skipped = rule_of_id.unbind(-1)  # the fields of ``IdRule``
    wide, divisor = ids.long(), size.clamp(min=1)
    number = mixed_ids(wide, divisor)
    number = torch.where(number == skipped, (number + 1) % divisor, number)
    target = first + number
    for other in listed:
        column = torch.arange(len(rules), device=ids.device) if feature is None else feature
        cold = cold_ids(number.clamp(max=other.spec.num_composed - 1), other.spec, other.ranks)
        target = torch.where(column == other.feature, cold, target)
    is_unknown = (wide < 0) | (wide >= limit) | (replaces_all > 0)
    return torch.where(is_unknown & (size > 0), target, wide)
