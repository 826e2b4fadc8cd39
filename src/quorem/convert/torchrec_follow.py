"""Convert an optimizer's parameters and state where quorem's collection replaces TorchRec's."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..integrations.torchrec.collections import Collection as Ours
from ..integrations.torchrec.names import id_lists, table_rows
from ..integrations.torchrec.state import weights
from ..modules.embedding import Embedding
from ..optim import RowOptimizer
from ..paper.schemes.frequency import Ranks
from .follow import converted_state, exchange_


def follow_collection_(optimizer: torch.optim.Optimizer, old: Mapping[str, Tensor], new: Ours) -> list[str]:
    """Replace the ``old`` weights, by table, in an optimizer by the parameters of ``new``; returns what was done.

    The state of a table's rows is computed as in ``follow``; the rows of pools start without state.
    """
    parameters = dict(new.named_parameters())
    targets: dict[Tensor, list[Tensor]] = {weight: [] for weight in old.values()}
    for key, rows in table_rows(new).items():
        targets[old[next(part.split(".")[1] for part in rows if part.startswith("tables."))]].append(parameters[key])
    first = next((p for group in optimizer.param_groups for p in group["params"] if p in targets), None)
    if first is None:
        return []
    # Path networks replace no old parameter.
    targets[first] += [parameters[key] for key in parameters if key not in table_rows(new)]
    held = exchange_(optimizer, targets)
    states = {name: (weight, held[weight]) for name, weight in old.items() if weight in held}
    done = [f"{type(optimizer).__name__} now has the rows of {len(held)} tables of a collection"]
    if any(state for _, state in states.values()):
        done.append(_move_state_(optimizer, new, states))
    return done


def _move_state_(optimizer: torch.optim.Optimizer, new: Ours, states: Mapping[str, tuple[Tensor, Any]]) -> str:
    """Compute the optimizer's state of the stored rows from that of the tables; returns what was done."""
    if isinstance(optimizer, RowOptimizer):
        return "the optimizer's state of these tables starts anew"
    current, lists = weights(new), id_lists(new)
    converted: dict[str, dict[str, Tensor]] = {}  # by name of the part and key of the state
    numbers: dict[str, Any] = {}  # such as the number of steps
    for feature in new.rows.features:
        table = feature.table
        p, state = states.get(table, (None, {}))
        if p is None or f"tables.{table}.0" in converted or not state:
            continue
        hot, cold = lists.get(f"ranks.{table}.hot"), lists.get(f"ranks.{table}.cold")
        ranks = None if hot is None or cold is None else Ranks(hot, cold)
        n, d = p.shape
        alone = Embedding(n, d, feature.spec.scheme, frequencies=ranks, device=p.device, dtype=p.dtype)
        with torch.no_grad():
            for j, stored in enumerate(alone.tables(0)):
                stored.copy_(current[f"tables.{table}.{j}"])
            if feature.spec.is_narrow:
                alone.projections[0].copy_(new.compose.matrix(table))
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                numbers[key] = value
                continue
            for name, part in alone.named_tables(converted_state(key, value, p, alone)):
                if name.startswith("tables."):
                    converted.setdefault(f"tables.{table}.{name.rpartition('.')[2]}", {})[key] = part
    for key, rows in table_rows(new).items():
        parameter, start = new.get_parameter(key), 0
        state = {name: value.clone() if isinstance(value, Tensor) else value for name, value in numbers.items()}
        for row_name, count in rows.items():
            for name, value in converted.get(row_name, {}).items():
                state.setdefault(name, torch.zeros_like(parameter, dtype=value.dtype))[start : start + count] = value
            start += count
        optimizer.state[parameter] = state
    pools = any(part.startswith("pools.") for rows in table_rows(new).values() for part in rows)
    return "and the optimizer's state for them" + (", but none for the rows of pools" if pools else "")
