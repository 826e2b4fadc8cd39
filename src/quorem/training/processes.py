"""Training by several processes that ``torchrun`` has started: each has the whole model, and a share of every batch.

With one process, all functions here do nothing.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn

from ..data.batches import Batch

TIMEOUT = timedelta(minutes=5)  # how long a process waits for another that neither answers nor ends


@contextmanager
def process_group(device: str) -> Iterator[str]:
    """Join the processes of ``torchrun``, by gloo on a CPU and NCCL on GPUs; yields the device of this process.

    They leave together, so that none ends while another still needs it, such as to write a checkpoint. The group's
    threads end here: one of them that asked for Python's lock while Python ends would abort the process.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield device
        return
    import_module("torch.distributed.nn")  # its functions, imported later, would keep the group as a default
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    try:
        yield device
        dist.barrier()
    except KeyboardInterrupt:  # which all of them get
        dist.barrier()
        raise
    finally:
        gc.collect()  # models that hold the group
        dist.destroy_process_group()


def num_processes() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process writes to the run's folder."""
    return num_processes() == 1 or dist.get_rank() == 0


def share_of(batch: Batch) -> Batch:
    """The rows of a batch that this process computes."""
    if num_processes() == 1:
        return batch
    rank, processes = dist.get_rank(), dist.get_world_size()
    return batch.rows(len(batch) * rank // processes, len(batch) * (rank + 1) // processes)


def average_gradients_(parameters: list[nn.Parameter]) -> None:
    """Replace the gradients of parameters by their means over all processes, in one message."""
    if num_processes() > 1:
        grads = [p.grad for p in parameters if p.grad is not None]
        joined = torch.cat([grad.flatten() for grad in grads]) / num_processes()
        dist.all_reduce(joined)
        for grad, mean in zip(grads, joined.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))


def any_of(device: torch.device, *flags: bool) -> tuple[bool, ...]:
    """Each flag, set if it is set in any process."""
    if num_processes() == 1:
        return flags
    values = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return tuple(map(bool, values.tolist()))


def check_same_step(step: int) -> None:
    """Raise ValueError unless all processes go on from the same step."""
    if num_processes() > 1:
        steps: list[int] = [0] * num_processes()
        dist.all_gather_object(steps, step)
        if len(set(steps)) > 1:
            raise ValueError(f"processes go on from steps {steps}: all of them must see the same folder")
