"""``EmbeddingBag``: ``nn.EmbeddingBag`` stored by a scheme. Vectors are composed first, then pooled."""

import torch
from torch import Tensor

from ..checks import BagMode, InvalidIdMode, check_choice, check_offsets
from ..ops.declare import is_traced
from ..ops.rows import IdBatch
from ..paper.schemes import Scheme
from ..paper.schemes.frequency import Ranking
from . import plain
from .embedding import Embedding
from .table import UnknownIds


class EmbeddingBag(Embedding):
    """Pooled vectors of bags of ids: a drop-in for ``nn.EmbeddingBag``.

    Args:
        mode: ``"sum"``, ``"mean"`` or ``"max"``, taken over the composed vectors.
        include_last_offset: whether ``offsets`` ends with the number of ids.
        padding_idx: an id that is neither pooled nor counted by the mean.

    The other arguments are those of ``Embedding``; an id outside the table is left out of its bag on a GPU.

    >>> from quorem import QR
    >>> bags = EmbeddingBag(1000, 16, QR(num_collisions=4), mode="sum")
    >>> bags(torch.tensor([1, 2, 4, 5]), torch.tensor([0, 3])).shape
    torch.Size([2, 16])
    """

    inherited = ("padding_idx", "mode", "include_last_offset")

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        scheme: Scheme | None = None,
        *,
        mode: BagMode = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        on_invalid_id: InvalidIdMode = "warn",
        frequencies: Ranking | None = None,
        raw_ids: bool = False,
        unknown: UnknownIds = "error",
        init_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice("mode", mode, BagMode)
        if mode == "max" and sparse:
            raise ValueError(f"sparse ({sparse}) must be False for mode='max', as in torch.nn.EmbeddingBag")
        super().__init__(
            num_embeddings,
            embedding_dim,
            scheme,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            on_invalid_id=on_invalid_id,
            frequencies=frequencies,
            raw_ids=raw_ids,
            unknown=unknown,
            init_std=init_std,
            device=device,
            dtype=dtype,
        )
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pooled vectors ``[B, D]`` (``[B, K, D]`` for feature generation).

        Args:
            input: ids; ``[B, L]`` where all bags have length L, or ``[V]``, the concatenation of bags of any length.
            offsets: where each bag of a 1-D ``input`` starts; None for a 2-D ``input``.
            per_sample_weights: a weight per id, in the shape of ``input``, for modes ``"sum"`` and ``"mean"``. The mean
                is the weighted sum divided by the number of ids.

        Raises:
            ValueError: if the shapes, the offsets or the mode do not fit.
            TypeError: if ids or weights have the wrong dtype.
        """
        input = self._checked(input)
        if self.mode == "max" and per_sample_weights is not None:
            raise ValueError("per_sample_weights must be None for mode='max'")
        weights = self._sample_weights(per_sample_weights, input)
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError(f"offsets {tuple(offsets.shape)} must be None for a 2-D input {tuple(input.shape)}")
            step = input.shape[1]
            starts = torch.arange(input.shape[0] + 1, device=input.device) * step
            input, weights = input.reshape(-1), None if weights is None else weights.reshape(-1)
        elif input.dim() == 1:
            if offsets is None:
                raise ValueError("offsets must be given for a 1-D input")
            starts = check_offsets(offsets, input.shape[0])
            if not self.include_last_offset:
                starts = torch.cat([starts, starts.new_full((1,), input.shape[0])])
            elif starts.shape[0] == 0:
                raise ValueError("offsets must hold at least one entry with include_last_offset=True")
        else:
            raise ValueError(f"input has shape {tuple(input.shape)} but must be 1-D or 2-D")
        if self.mode == "max":
            pooled = self._max(input, starts)
        else:
            pooled = self._vectors(IdBatch(input, starts, weights, self.mode == "mean"))
        return pooled.view(starts.shape[0] - 1, *self.vector_shape)

    def _max(self, ids: Tensor, starts: Tensor) -> Tensor:
        """Compose the vectors, then take the maximum of each bag; equal maxima share the gradient."""
        valid = torch.arange(ids.shape[0], device=ids.device) < starts[-1]  # others are in no bag
        within = self._within(ids[:, None], None)[:, 0]
        if self.padding[0] is not None:
            valid = valid & (within != self.padding[0])
        vectors = self._vectors(IdBatch(torch.where(valid, ids, 0)[:, None])).flatten(1)
        if not is_traced() or self.exported_unknown == "zeros":  # else the vector of an id out of range is NaN
            valid = valid & (within >= 0) & (within < self.num_embeddings)
        bags = plain.bags_of(ids, starts)[:, None].expand(vectors.shape)
        best = vectors.new_full((starts.shape[0], vectors.shape[1]), -torch.inf)  # last row: ids past the last bag
        best = best.scatter_reduce(0, bags, torch.where(valid[:, None], vectors, -torch.inf), "amax")
        return torch.where(best == -torch.inf, 0, best)[:-1]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"
