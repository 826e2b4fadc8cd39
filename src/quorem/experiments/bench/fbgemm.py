"""FBGEMM's table-batched embedding on the tables of a collection, in its default and its fastest setting."""

from typing import Literal, cast

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn

from ...modules.collection import EmbeddingCollection
from ...paper.operations import OPERATIONS
from ...paper.partitions import Partition

ROW_WISE = "row-wise Adagrad"


class TableBatched(nn.Module):
    """One lookup for all tables, partition by partition; then each feature's vectors are composed.

    The output has the features in the order of ``order``, those with the most tables first. So composing takes one
    operation on slices for each number of tables.
    """

    def __init__(
        self, source: EmbeddingCollection, optimizer: EmbOptimType, bounds: BoundsCheckMode, lr: float, eps: float
    ) -> None:
        super().__init__()
        device = source.stored.device
        tables = [source.tables(f) for f in range(len(source.specs))]
        self.order = sorted(range(len(tables)), key=lambda f: -len(tables[f]))
        self.width = source.specs[0].embedding_dim
        most = len(tables[self.order[0]])
        ranks = [[f for f in self.order if len(tables[f]) > k] for k in range(most)]  # features with a k-th table
        self.counts = [len(features) for features in ranks]
        self.compose = OPERATIONS[source.specs[self.order[0]].operation]
        stored = [(f, k) for k, features in enumerate(ranks) for f in features]
        on_gpu = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        place = on_gpu if device.type == "cuda" else (EmbeddingLocation.HOST, ComputeDevice.CPU)
        specs = [(*tables[f][k].shape, *place) for f, k in stored]
        self.lookup = SplitTableBatchedEmbeddingBagsCodegen(
            specs,
            optimizer=optimizer,
            learning_rate=lr,
            eps=eps,
            pooling_mode=PoolingMode.SUM,
            bounds_check_mode=bounds,
            device=device,
        )
        for target, (f, k) in zip(self.lookup.split_embedding_weights(), stored, strict=True):
            target.copy_(tables[f][k].detach())
        parts = [cast(Partition, source.specs[f].partitions[k]) for f, k in stored]
        self.composed = most > 1
        self.features = torch.tensor([f for f, _ in stored], device=device)
        self.strides = torch.tensor([p.stride for p in parts], device=device)[:, None]
        self.sizes = torch.tensor([p.size for p in parts], device=device)[:, None]
        self.offsets = torch.empty(0, dtype=torch.int64, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        tables = len(self.features)
        if len(self.offsets) != tables * len(ids) + 1:
            self.offsets = torch.arange(tables * len(ids) + 1, device=ids.device)
        buckets = ids.t()
        if self.composed:
            buckets = buckets[self.features] // self.strides % self.sizes
        vectors = self.lookup(buckets.reshape(-1), self.offsets).view(len(ids), tables, self.width)
        if not self.composed:
            return vectors
        pieces = vectors.split(self.counts, 1)  # a piece for the first tables, the second tables, ...
        runs, start = [], 0
        for k in range(len(self.counts), 0, -1):  # features with k tables
            stop = self.counts[k - 1]
            if stop > start:
                runs.append(self.compose(*(piece[:, start:stop] for piece in pieces[:k])))
            start = stop
        return runs[0] if len(runs) == 1 else torch.cat(runs, 1)


def build(
    source: EmbeddingCollection, setting: Literal["default", "fastest"], lr: float, eps: float
) -> tuple[TableBatched, str]:
    """The module, and the optimizer of its backward in words.

    The default setting uses exact Adagrad (row-wise if this build has no other) and checks every id. The fastest uses
    row-wise Adagrad, with one number of state for each row, and checks no ids.
    """
    if setting == "fastest":
        return TableBatched(source, EmbOptimType.EXACT_ROWWISE_ADAGRAD, BoundsCheckMode.NONE, lr, eps), ROW_WISE
    try:
        module = TableBatched(source, EmbOptimType.EXACT_ADAGRAD, BoundsCheckMode.WARNING, lr, eps)
        probe = torch.zeros(2, len(source.specs), dtype=torch.int64, device=source.stored.device)
        with torch.enable_grad():
            out = module(probe)
            out.backward(torch.zeros_like(out))
        return module, "exact Adagrad"
    except (AssertionError, AttributeError, RuntimeError, NotImplementedError):
        return TableBatched(source, EmbOptimType.EXACT_ROWWISE_ADAGRAD, BoundsCheckMode.WARNING, lr, eps), ROW_WISE
