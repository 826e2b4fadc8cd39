"""``Embedding``: ``nn.Embedding`` stored by a scheme."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from ..checks import InvalidIdMode, check_int
from ..fit import fit_
from ..ops.rows import IdBatch
from ..paper.schemes import Full, Scheme
from ..paper.schemes.frequency import Ranking
from . import scores
from .composed_weight import composed_weight
from .growth import grow_
from .lookup import Tables
from .table import Table, UnknownIds


class Embedding(Tables):
    """A table of ``num_embeddings`` vectors that stores fewer rows: a drop-in for ``nn.Embedding`` (section 4).

    Args:
        num_embeddings: number of ids, n.
        embedding_dim: width of an output vector, D.
        scheme: how the table is stored; None for the full table.
        padding_idx: an id whose vector is zero and takes no gradient.
        max_norm: must be None: a composed vector has no row of its own to renormalize in place.
        norm_type: the p of the norm that ``max_norm`` limits; has no effect.
        scale_grad_by_freq: must be False: a row's gradient comes from all ids that share the row.
        sparse: give ``stored`` a sparse gradient.
        on_invalid_id: what an id outside the table does on a GPU: ``"raise"`` (device assert), ``"warn"`` (count the
            id, warn, and return zeros) or ``"trust"`` (return zeros silently). On a CPU it is always an IndexError.
        frequencies: what a ``HotCold`` scheme ranks ids by: how often each id occurs, ``[n]``; the ids themselves as
            ``schemes.Ranks``; ``schemes.RawCounts``, how often raw ids occur; ``"loaded"`` if a ``state_dict`` will
            bring them; None if ids are numbered by falling frequency.
        raw_ids: accept any 64-bit id, which is hashed to one of the table (``hashing.mixed_ids``).
        unknown: how an id outside ``[0, n)`` is treated: ``"error"``; ``"rest"``, as one of the rest of a ``HotCold``
            table; or ``"hash"``, hashed to a composed id (see ``quorem.modules.id_rules``).
        init_std: standard deviation of the initial vectors; if None, ``1 / sqrt(3 n)`` as in the public DLRM code
            (``nn.Embedding`` has 1).
        device: where the tables are, ``"meta"`` included.
        dtype: float32, float64, bfloat16 or float16.

    Shape:
        input ``[...]``, output ``[..., D]``; ``[..., K, D]`` for feature generation.

    Raises:
        ValueError: if the scheme cannot store such a table, or an option is not supported.

    >>> from quorem import QR
    >>> table = Embedding(1000, 16, QR(num_collisions=4))
    >>> table(torch.tensor([[1, 2, 999]])).shape, table.num_parameters
    (torch.Size([1, 3, 16]), 4064)
    """

    inherited: tuple[str, ...] = ("padding_idx",)  # options that a table of torch.nn has too

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        scheme: Scheme | None = None,
        *,
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
        if max_norm is not None:
            raise ValueError(f"max_norm ({max_norm}) must be None: a composed vector has no row to renormalize")
        if scale_grad_by_freq:
            raise ValueError(f"scale_grad_by_freq ({scale_grad_by_freq}) must be False: ids share gradients of rows")
        scheme = Full() if scheme is None else scheme
        sizes = num_embeddings, embedding_dim
        table = Table("", *sizes, scheme, padding_idx, frequencies=frequencies, raw_ids=raw_ids, unknown=unknown)
        super().__init__(
            [table], sparse=sparse, on_invalid_id=on_invalid_id, init_std=init_std, device=device, dtype=dtype
        )
        spec = self.specs[0]
        self.num_embeddings, self.embedding_dim, self.scheme = spec.num_embeddings, spec.embedding_dim, spec.scheme
        self.vector_shape = spec.vector_shape
        self.padding_idx = self.padding_ids[0]

    @property
    def weight(self) -> Tensor:
        """The full table that this module represents, ``[n, D]``, composed when read; differentiable.

        It is ``[n, K, D]`` for feature generation. For a full table whose rows are not quantized
        it is the parameter ``stored`` itself. Otherwise, assigning a table (``module.weight = values``) fits
        the stored rows to it, and writing into the composed tensor raises, since the write would be lost.
        """
        if self.is_full():
            return self.live_stored
        if self.raw_ids[0]:  # a lookup would hash the ids of the table again
            return composed_weight(self.dense())
        ids = torch.arange(self.num_embeddings, device=self.live_stored.device)
        vectors = self._vectors(IdBatch(ids[:, None])).view(self.num_embeddings, *self.vector_shape)
        return composed_weight(vectors)

    @weight.setter
    def weight(self, value: Tensor | None) -> None:
        value = self._check_weight(value)
        if self.is_full():
            with torch.no_grad():
                self.stored.copy_(value)
        else:
            self.fit_(value.detach().to(self.stored.device))

    def __dir__(self) -> list[str]:
        # torch.jit.trace reads every attribute listed here, and reading weight would compose the full table.
        return [name for name in super().__dir__() if name != "weight"]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in ``nn.Module``. For a full table, ``weight`` means ``stored``; other tables are fitted to ``param``."""
        if name == "weight":
            if not self.is_full():
                type(self).weight.fset(self, param)  # type: ignore[attr-defined]
                return
            self._check_weight(param)
            name = "stored"
        super().register_parameter(name, param)

    def _check_weight(self, value: Tensor | None) -> Tensor:
        n, d = self.num_embeddings, self.embedding_dim
        if not isinstance(value, Tensor) or value.shape != (n, d):
            got = type(value).__name__ if not isinstance(value, Tensor) else tuple(value.shape)
            raise ValueError(f"weight ({got}) must be a table [{n}, {d}]")
        return value

    def score(self, queries: Tensor, ids: Tensor | None = None) -> Tensor:
        """``queries @ weight.T`` without the full table in memory (see ``modules.scores``); differentiable.

        Args:
            queries: ``[..., D]``.
            ids: the ids to score, of any shape; None for all.

        Returns:
            The score of every id, ``[..., n]``, or of each of ``ids``, ``[..., *ids.shape]``.

        Raises:
            TypeError: if ``queries`` has another dtype than the vectors.
            ValueError: if ``queries`` has another width, the scheme has several vectors per id, or ids are raw.

        >>> from quorem import QR
        >>> Embedding(1000, 16, QR(num_collisions=4)).score(torch.ones(2, 16)).shape
        torch.Size([2, 1000])
        """
        return scores.score(self, queries, ids)

    def topk(self, queries: Tensor, k: int, *, exclude: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The ``k`` ids with the highest scores, exactly, without the scores of all ids in memory.

        Among ids of equal scores, any may be returned. No gradient is computed.

        Args:
            queries: ``[..., D]``.
            k: number of ids.
            exclude: ids that are not to be returned for a query, such as those that a user has seen: ``[..., E]``; -1
                stands for none.

        Returns:
            Scores, falling, and ids, both ``[..., k]``.

        Raises:
            ValueError: as ``score``; if ``k`` is larger than n - E, or ``exclude`` holds something that is not an id.

        >>> from quorem import QR
        >>> items = Embedding(1_000_000, 64, QR(num_collisions=60, operation="add"))
        >>> scores, ids = items.topk(torch.randn(2, 64), 10)
        >>> ids.shape
        torch.Size([2, 10])
        """
        return scores.topk(self, queries, k, exclude)

    def forward(self, input: Tensor) -> Tensor:
        """Vectors ``[..., D]``, or ``[..., K, D]`` for feature generation.

        Args:
            input: ids of any shape, int32 or int64.

        Raises:
            TypeError: if ``input`` does not hold such ids.
            IndexError: if an id on the CPU is outside the table.
        """
        input = self._checked(input)
        return self._vectors(IdBatch(input.reshape(-1, 1))).view(*input.shape, *self.vector_shape)

    def grow_(self, n: int, *, optimizer: torch.optim.Optimizer | None = None) -> Self:
        """Add ids, in place: the vectors of old ids do not change, and new ids get vectors of the same scheme.

        A new row of a composed table starts as the mean of that table's rows plus noise; a new row of a full table is
        drawn like an initial one. ``HotCold`` adds new ids to the rest, or, if it has no rest, to the cold ids.

        Args:
            n: number of ids afterwards.
            optimizer: the optimizer that updates the module; its state is extended by new rows in their initial state.

        Raises:
            ValueError: if ``n`` is below ``num_embeddings``, the scheme cannot take more ids (the message lists those
                that can), ids are raw, rows are quantized or shared, or ``optimizer`` is None though an optimizer of
                ``quorem.optim`` updates the rows.

        >>> from quorem import QR
        >>> table = Embedding(1000, 16, QR(num_collisions=4))
        >>> before = table(torch.arange(1000))
        >>> torch.equal(table.grow_(1300)(torch.arange(1000)), before), table(torch.tensor([1299])).shape
        (True, torch.Size([1, 16]))
        """
        grow_(self, 0, check_int("n", n), optimizer)
        self.num_embeddings, self.scheme = self.specs[0].num_embeddings, self.specs[0].scheme
        return self

    def to_dense(self) -> Tensor:
        """The full table, ``[n, D]``, or ``[n, K, D]`` for feature generation; differentiable."""
        return self.dense()

    def fit_(self, embeddings: Tensor | nn.Module, frequencies: Tensor | None = None) -> Self:
        """Set the stored tables to the best fit of a trained table, by least squares (see ``quorem.fit``).

        Args:
            embeddings: the trained table ``[n, D]``, or a module whose ``weight`` it is.
            frequencies: how often each id occurs, ``[n]``: the weight of its error. If None, all weights are equal.

        Raises:
            ValueError: if ``embeddings`` or ``frequencies`` does not fit, the scheme has no such fit (``Path``), or
                rows are quantized.

        >>> from quorem import QR
        >>> table, trained = Embedding(1000, 16, QR(num_collisions=4)), torch.nn.Embedding(1000, 16)
        >>> bool(torch.dist(table.fit_(trained).weight, trained.weight) < trained.weight.norm())
        True
        """
        self._check_writable()
        dense = trained_table(embeddings)
        options: dict[str, Any] = {"padding_idx": self.padding[0], "ranks": self.ranks_of[0]}
        with torch.no_grad():
            tables = self._views(self.all_extents)
            fit_(tables, self.specs[0], dense, frequencies, matrix=self.projection(), **options)
        return self

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor | nn.Module,
        scheme: Scheme | None = None,
        *,
        frequencies: Tensor | None = None,
        freeze: bool = True,
        **options: Any,
    ) -> Self:
        """The best fit of a trained table ``[n, D]`` by a scheme; exact for ``Full()``, the default.

        Args:
            embeddings: the trained table, or a module whose ``weight`` it is, such as ``nn.Embedding``.
            scheme: how to store it; least squares finds its tables (see ``quorem.fit``).
            frequencies: how often each id occurs, ``[n]``: the weight of its error, and its rank for ``HotCold``.
            freeze: whether the tables take no gradient.
            options: options of the constructor. ``padding_idx``, ``unknown`` and, for bags, ``mode`` and
                ``include_last_offset`` are those of ``embeddings`` unless given. The vector of ``padding_idx`` is zero
                even if ``embeddings`` holds another.

        Raises:
            ValueError: if ``embeddings`` is not 2-D or cannot be fitted, or the scheme has no such fit (``Path``).

        >>> from quorem import QR, EmbeddingBag
        >>> Embedding.from_pretrained(nn.Embedding(1000, 16), QR(num_collisions=4)).stored.shape
        torch.Size([254, 16])
        >>> EmbeddingBag.from_pretrained(nn.EmbeddingBag(1000, 16, mode="sum")).mode
        'sum'
        """
        table = trained_table(embeddings)
        inherited: dict[str, Any] = {"device": table.device, "dtype": table.dtype}
        if isinstance(embeddings, nn.Module):
            inherited |= {name: getattr(embeddings, name) for name in cls.inherited if hasattr(embeddings, name)}
        if isinstance(embeddings, Embedding):
            inherited |= {"unknown": embeddings.unknown[0], "raw_ids": embeddings.raw_ids[0]}
        num_embeddings, embedding_dim = table.shape
        module = cls(num_embeddings, embedding_dim, scheme, frequencies=frequencies, **(inherited | options))
        module.fit_(table, frequencies)
        module.requires_grad_(not freeze)
        return module

    def extra_repr(self) -> str:
        spec = self.specs[0]
        kept = f" ({spec.fallback})" if spec.fallback else ""
        pad = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        size = f"{self.num_embeddings}, {self.embedding_dim}"
        return f"{size}, {self.scheme}{kept}{pad}, compression={self.compression:.1f}"


def trained_table(embeddings: Tensor | nn.Module) -> Tensor:
    """``embeddings``, or its ``weight`` if it is a module; it must be a table ``[n, D]``."""
    table = getattr(embeddings, "weight", None) if isinstance(embeddings, nn.Module) else embeddings
    if not isinstance(table, Tensor):
        raise TypeError(f"embeddings ({type(embeddings).__name__}) must be a Tensor, or a module with a weight")
    if table.layout != torch.strided or not table.is_floating_point():
        raise TypeError(f"embeddings ({table.layout}, {table.dtype}) must be a dense tensor of floating-point numbers")
    if table.dim() != 2:
        raise ValueError(f"embeddings has shape {tuple(table.shape)} but must be 2-D")
    return table.detach()
