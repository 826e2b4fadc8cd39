"""FBGEMM's table-batched embedding on the tables of a collection."""

from typing import Literal, cast

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn

from ...modules.collection import EmbeddingCollection
from ...paper.operations import OPERATIONS
from ...paper.partitions import Partition
from .providers import EPS, LR


class TableBatched(nn.Module):
    """One lookup for all tables; then the vectors of the features with two tables are composed.

    The output has the features in the order of ``order``, those with two tables first, so that composing takes an
    operation on slices. The default setting uses exact Adagrad and checks every id. The fastest uses row-wise Adagrad,
    with one number of state for each row, and checks no ids.
    """

    def __init__(self, source: EmbeddingCollection, setting: Literal["default", "fastest"]) -> None:
        super().__init__()
        optimizer, bounds = EmbOptimType.EXACT_ADAGRAD, BoundsCheckMode.WARNING
        if setting == "fastest":
            optimizer, bounds = EmbOptimType.EXACT_ROWWISE_ADAGRAD, BoundsCheckMode.NONE
        device = source.stored.device
        tables = [source.tables(f) for f in range(len(source.specs))]
        self.order = sorted(range(len(tables)), key=lambda f: -len(tables[f]))
        self.width = source.specs[0].embedding_dim
        self.compose = OPERATIONS[source.specs[self.order[0]].operation]
        stored = [(f, k) for k in range(2) for f in self.order if len(tables[f]) > k]
        self.composed = len(stored) - len(tables)
        on_gpu = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        place = on_gpu if device.type == "cuda" else (EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.lookup = SplitTableBatchedEmbeddingBagsCodegen(
            [(*tables[f][k].shape, *place) for f, k in stored],
            optimizer=optimizer,
            learning_rate=LR,
            eps=EPS,
            pooling_mode=PoolingMode.SUM,
            bounds_check_mode=bounds,
            device=device,
        )
        for target, (f, k) in zip(self.lookup.split_embedding_weights(), stored, strict=True):
            target.copy_(tables[f][k].detach())
        parts = [cast(Partition, source.specs[f].partitions[k]) for f, k in stored]
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
        first, second = vectors.split((tables - self.composed, self.composed), 1)
        head = self.compose(first[:, : self.composed], second)
        return head if first.shape[1] == self.composed else torch.cat((head, first[:, self.composed :]), 1)
