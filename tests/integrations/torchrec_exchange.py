"""What two ranks send each other: its bytes, and sending ahead; cases for two ranks."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable
from torchrec_ranks import CPU, NAMES, TABLES, D, all_of, dense_optimizer, jagged, shard
from torchrec_tables import collection_of

import quorem
from quorem.integrations import torchrec as integration
from quorem.integrations.torchrec import EmbeddingBagCollection


@dataclass
class Batch(Pipelineable):
    """What a training pipeline copies to the device ahead of time."""

    features: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return Batch(self.features.to(device, non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)


class Scores(nn.Module):
    """A model as pipelines want it: a batch in, a loss and outputs out."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags
        self.top = nn.Linear((len(NAMES) + 1) * D, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        scores = self.top(self.bags(batch.features).values())
        return scores.square().mean(), scores


def pipeline(rank: int) -> None:
    """``TrainPipelineSparseDist`` maps and sends the ids of the next batch ahead, and trains to the same losses."""
    losses = {}
    for ahead in (False, True):
        torch.manual_seed(0)
        module = Scores(EmbeddingBagCollection(TABLES))
        apply_optimizer_in_backward(torch.optim.SGD, module.bags.vectors.parameters(), {"lr": 0.01})
        model = shard(module, all_of(module.bags, "table_wise"))
        integration.copy_state_(model.module.bags, collection_of(TABLES))
        optimizer = dense_optimizer(model, lambda p: torch.optim.SGD(p, lr=0.01))
        batches = [Batch(jagged(rank, step)) for step in range(5)]
        if ahead:
            trainer = TrainPipelineSparseDist(model, optimizer, CPU, pipeline_postproc=True)
            source = iter(batches)
            losses[ahead] = [float(trainer.progress(source).square().mean()) for _ in batches]
            assert [module.fqn for module in trainer._pipelined_postprocs] == ["bags.rows"]
            assert len(trainer._pipelined_modules) == len(module.bags.vectors) == 2  # of two widths
        else:
            losses[ahead] = []
            for batch in batches:
                optimizer.zero_grad()
                loss, _ = model(batch)
                loss.backward()
                optimizer.step()
                losses[ahead].append(float(loss.detach()))
    torch.testing.assert_close(losses[True], losses[False], rtol=1e-5, atol=1e-6)


@contextmanager
def counting_bytes() -> Iterator[list[int]]:
    """Counts the bytes that this rank hands to all-to-alls for other ranks, call by call."""
    sent: list[int] = []
    all_to_all = dist.all_to_all_single

    def counted(*arguments: Any, **options: Any) -> Any:
        given = inspect.signature(all_to_all).bind(*arguments, **options).arguments
        sizes = given.get("input_split_sizes")
        share = 1 / dist.get_world_size() if not sizes else sizes[dist.get_rank()] / max(sum(sizes), 1)
        sent.append(round(given["input"].nbytes * (1 - share)))
        return all_to_all(*arguments, **options)

    dist.all_to_all_single = counted
    try:
        yield sent
    finally:
        dist.all_to_all_single = all_to_all


def sent_bytes(rank: int) -> None:
    """A row that is read often is sent once."""
    batch = 512
    module = EmbeddingBagCollection([quorem.Table("user", 4000, D), quorem.Table("item", 4000, D)], num_shards=2)
    model = shard(module, all_of(module, "table_wise"))
    totals = []
    for most in (8, 4000):
        ids = torch.arange(2 * batch) % most
        lengths = torch.ones(len(ids), dtype=torch.int64)
        with counting_bytes() as sent:
            model(KeyedJaggedTensor(["user", "item"], ids, lengths=lengths)).values().sum().backward()
        total = torch.tensor(float(sum(sent)))
        dist.all_reduce(total)
        totals.append(float(total))
    assert totals[0] < 0.1 * totals[1], totals
