"""An order of ids that carries meaning: ids that occur together get neighbouring numbers.

In a quotient-remainder table of ids in such an order, the quotient is a cluster of ids and the remainder tells its
members apart: a learned partition that takes no memory. Ids in any other order share the quotient's row with strangers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import check_int
from .partitions import int64

DIRECTIONS = 32  # of the co-occurrences in which ids are compared
ROUNDS = 4  # of the power iteration that finds them


def order_by_cooccurrence(sessions: Sequence[Tensor], num_embeddings: int | None = None, *, seed: int = 0) -> Tensor:
    """A new number for each id, so that ids of the same sessions have neighbouring numbers.

    Ids are split into two halves again and again, each time by the direction in which their co-occurrences differ the
    most. The co-occurrences themselves are never stored: memory grows with the visits and with the number of ids.

    Args:
        sessions: the ids of each session, ``[L]``; only training sessions, or the test would be known.
        num_embeddings: number of ids, n; None for one more than the largest.
        seed: seed of the random directions that the search begins with.

    Returns:
        ``[n]``: the new number of each id. Renumber ids by ``number[ids]`` wherever the table is used.

    Raises:
        TypeError: if a session does not hold integers.
        ValueError: if there is no id, or one is outside ``[0, num_embeddings)``.

    >>> number = order_by_cooccurrence([torch.tensor([0, 2, 4]), torch.tensor([1, 3, 5])] * 5)
    >>> sorted(number[[0, 2, 4]].tolist()) in ([0, 1, 2], [3, 4, 5])
    True
    """
    if not any(map(len, sessions)):
        raise ValueError("sessions must hold at least one id")
    items = torch.cat([int64("session", torch.as_tensor(session).reshape(-1)) for session in sessions if len(session)])
    n = int(items.max()) + 1 if num_embeddings is None else check_int("num_embeddings", num_embeddings)
    if len(outside := items[(items < 0) | (items >= n)]):
        raise ValueError(f"sessions hold id {int(outside[0])}, which must be in [0, {n})")
    vectors = _vectors(items, torch.tensor([len(session) for session in sessions]), n, seed)
    order = torch.cat(_halved(torch.arange(n), vectors))
    return torch.empty_like(order).index_copy_(0, order, torch.arange(n))


def _vectors(items: Tensor, lengths: Tensor, n: int, seed: int) -> Tensor:
    """The main directions of the co-occurrences, ``[n, q]``: ids that occur in the same sessions have close vectors."""
    session = torch.arange(len(lengths)).repeat_interleave(lengths)
    weights = (torch.bincount(items, minlength=n).clamp(min=1)[items] * lengths[session]).float().rsqrt()

    def cooccurring(x: Tensor) -> Tensor:
        summed = x.new_zeros(len(lengths), x.shape[1]).index_add_(0, session, weights[:, None] * x[items])
        return x.new_zeros(n, x.shape[1]).index_add_(0, items, weights[:, None] * summed[session])

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, min(DIRECTIONS, n), generator=generator)
    for _ in range(ROUNDS):
        x = torch.linalg.qr(cooccurring(x)).Q
    return cooccurring(x).double()


def _halved(ids: Tensor, vectors: Tensor) -> list[Tensor]:
    """The ids in order, as parts of at most two."""
    if len(ids) <= 2:
        return [ids]
    centred = vectors[ids] - vectors[ids].mean(0)
    largest = centred.abs().max()  # vectors of rare ids are so small that eigh would not converge
    centred = centred / largest if largest > 0 else centred
    direction = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -1]
    halves = ids[torch.argsort(centred @ direction, stable=True)].tensor_split(2)
    return [part for half in halves for part in _halved(half, vectors)]
