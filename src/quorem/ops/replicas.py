"""Replicas of a model under ``DistributedDataParallel``: whether a lookup is one of theirs, and what they exchange."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def active_ddp() -> DistributedDataParallel | None:
    """The ``DistributedDataParallel`` whose forward pass runs, if one does."""
    return DistributedDataParallel._active_ddp_module  # set during its forward pass alone


def mean_of_replicas(rows: Tensor, values: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Rows ``[N]`` and gradients ``[N, W]`` of all replicas, one after another, each as its share of the mean."""
    replicas = dist.get_world_size(group)
    counts = [torch.empty(1, dtype=torch.int64, device=rows.device) for _ in range(replicas)]
    dist.all_gather(counts, counts[0].new_tensor([len(rows)]), group)
    lengths = [int(count) for count in counts]
    return _gathered(rows, lengths, group), _gathered(values / replicas, lengths, group)


def _gathered(tensor: Tensor, lengths: list[int], group: Any) -> Tensor:
    """The tensors of all replicas end to end; all exchange as many rows as the longest has."""
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
