"""Training a model on several ranks: TorchRec shards its tables, and its layers are replicated.

Every rank also has a copy of the model as it is in a single process, for checkpoints, the result and the model file. So
a run can be resumed with another number of ranks, or with one process.
"""

import copy
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..collection import EmbeddingCollection
from ..data.batches import Batch
from ..integrations.torchrec import EmbeddingBagCollection, constraints, copy_state_
from ..integrations.torchrec.convert import declared_tables
from .config import RunConfig
from .model import logits_of
from .trial import Trial

CPU = torch.device("cpu")
EPS = 1e-10  # torch's default for Adagrad; TorchRec has another


class ShardedTables(EmbeddingBagCollection):
    """TorchRec's tables with the ``forward`` of ``quorem.EmbeddingCollection``."""

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Vectors ``[B, F', D]`` of ids ``[B, F]``, or of values ``[V]`` with offsets ``[F * B + 1]``."""
        keys = [feature.name for feature in self.rows.features]
        if offsets is None:
            lengths = torch.ones(ids.numel(), dtype=torch.int32)
            features = KeyedJaggedTensor(keys, ids.T.flatten(), lengths=lengths, stride=len(ids))
        else:
            lengths = offsets.diff().int()
            features = KeyedJaggedTensor(keys, ids, lengths=lengths, stride=len(lengths) // len(keys))
        pooled = super().forward(features).values()
        if len(set(self.embedding_dims)) > 1:
            return pooled
        return pooled.view(len(pooled), len(self.embedding_dims), self.embedding_dims[0])


class ShardedTrial(Trial):
    """A ``Trial`` on several ranks, each of which computes a share of every batch.

    It runs on the CPU and with Adagrad only. ``model`` and its optimizers are the single-process copy, which ``gather``
    brings up to date.
    """

    def __init__(self, config: RunConfig, model: nn.Module, names: list[str]) -> None:
        super().__init__(config, model, names)
        assert isinstance(self.embeddings, EmbeddingCollection)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        tables = ShardedTables(
            declared_tables(self.embeddings), mode=self.embeddings.mode, num_shards=self.world_size, device="meta"
        )
        network = copy.deepcopy(model, {id(self.embeddings): tables})  # TorchRec's tables replace quorem's
        updated = [*(tables.bags.parameters() if tables.bags is not None else ()), *tables.vectors.parameters()]
        options: dict[str, Any] = {"lr": config.learning_rate, "eps": EPS}
        apply_optimizer_in_backward(torch.optim.Adagrad, updated, dict(options))  # a copy: TorchRec writes into it
        share = -(-config.batch_size // self.world_size)
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=self.world_size, compute_device="cpu"),
            constraints=constraints(network, batch_size=share),
            batch_size=share,
        )
        group = dist.group.WORLD
        assert group is not None
        plan = planner.collective_plan(network, get_default_sharders(), group)
        self.sharded = DistributedModelParallel(network, plan=plan, device=CPU)
        others = [parameter for _, parameter in in_backward_optimizer_filter(self.sharded.named_parameters())]
        self.other_optimizer = torch.optim.Adagrad(others, **options)  # layers, path networks and replicated tables

    def begin(self, step: int, progress: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Let all ranks start from the state of the first rank; returns the step and progress of the first rank."""
        values: list[Any] = [step, progress]
        dist.broadcast_object_list(values)
        step, progress = values
        if step:
            tensors = {name: tensor.contiguous() for name, tensor in self.tensors().items()}
            for name in sorted(tensors):
                dist.broadcast(tensors[name], 0)
            self.restore(step, tensors)
        if self.rank:
            self.loss_sum.zero_()  # the sum over ranks is the total
        whole, shards = [self.tables, self.dense], [self.other_optimizer]
        copy_state_(self.sharded, self.model, target_optimizers=shards, source_optimizers=whole)
        return step, progress

    def agreed(self, *flags: bool) -> tuple[bool, ...]:
        """The flags combined over all ranks: each is set if it is set on any rank."""
        values = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return tuple(map(bool, values.tolist()))

    def gather(self) -> None:
        """Bring ``model`` and its optimizers up to date, on all ranks."""
        whole, shards = [self.tables, self.dense], [self.other_optimizer]
        copy_state_(self.model, self.sharded, target_optimizers=whole, source_optimizers=shards)
        for group in self.tables.param_groups:
            for parameter in group["params"]:
                self.tables._row_rule(group, parameter)
        self.tables.note_rows()
        self._add_up_losses()

    def mean_loss(self, steps: int) -> float:
        """As in ``Trial``, over the rows of all ranks."""
        self._add_up_losses()
        dist.broadcast(self.loss_sum, 0)
        return super().mean_loss(steps)

    def _add_up_losses(self) -> None:
        dist.all_reduce(self.loss_sum)
        if self.rank:
            self.loss_sum.zero_()

    def logits(self, batch: Batch) -> Tensor:
        """Logits ``[B]`` of a batch that all ranks have; each rank computes a share, and all get the result."""
        shares = self._shares(batch)
        sizes = [len(share) for share in shares]
        logits = logits_of(self.sharded, shares[self.rank], self.names, self.config.precision)
        parts = [torch.empty(max(sizes)) for _ in sizes]
        dist.all_gather(parts, F.pad(logits, (0, max(sizes) - len(logits))))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def _step(self, batch: Batch) -> None:
        share = self._shares(batch)[self.rank]
        logits = logits_of(self.sharded, share, self.names, self.config.precision)
        loss = F.binary_cross_entropy_with_logits(logits, share.labels.float(), reduction="sum") / len(batch)
        self.other_optimizer.zero_grad()
        (loss * self.world_size).backward()  # since gradients are averaged over ranks
        self.other_optimizer.step()
        self.loss_sum += loss.detach()

    def _shares(self, batch: Batch) -> list[Batch]:
        """The rows of a batch that each rank computes."""
        bounds = [len(batch) * rank // self.world_size for rank in range(self.world_size + 1)]
        return [batch.rows(first, last) for first, last in pairwise(bounds)]
