"""Initial values, chosen by operation so that a composed vector has the distribution of a row of the full table."""

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from .schemes import TableSpec
from .schemes.families import Activation

RAW_STD = sqrt(1 / (3 * 2**20))  # standard deviation of vectors of raw ids: that of a full table of 2**20 ids
NOISE = 0.01  # relative deviation of the small factors around their neutral value


def intervals(spec: TableSpec, std: float | None = None) -> list[tuple[float, float]]:
    """The interval from which ``init_`` draws each stored table of ``spec``, uniformly.

    The largest table is drawn like a full one; the others are neutral: one plus noise for ``mult``, and noise around
    zero for ``add``. ``concat`` and ``feature`` keep every vector, so all their tables are drawn like a full one.

    Args:
        spec: the spec of the table.
        std: standard deviation of the composed vector; if None, that of U(-sqrt(1/n), sqrt(1/n)).

    >>> from quorem import QR
    >>> intervals(QR(num_collisions=4).spec(10_000, 16))
    [(-0.01, 0.01), (0.99, 1.01)]
    """
    bound = sqrt(1 / spec.num_embeddings) if std is None else sqrt(3) * std
    full = (-bound, bound)
    neutral = (1 - NOISE, 1 + NOISE) if spec.operation == "mult" else (-NOISE * bound, NOISE * bound)
    own = [full] * (spec.num_own > 0)
    rows = [size for size, _ in spec.shapes[len(own) :]]
    alike = spec.operation in ("concat", "feature")
    return own + [full if alike or j == rows.index(max(rows)) else neutral for j in range(len(rows))]


def init_(tables: Sequence[Tensor], spec: TableSpec, *, std: float | None = None) -> None:
    """Draw the stored ``tables`` of one spec in place. The other arguments are those of ``intervals``.

    >>> from quorem import QR
    >>> spec = QR(num_collisions=4).spec(1000, 16)
    >>> tables = [torch.empty(shape) for shape in spec.shapes]
    >>> init_(tables, spec)
    >>> bool((tables[0].abs() <= 1000**-0.5).all()), bool((tables[1] - 1).abs().max() <= 0.011)
    (True, True)
    """
    with torch.no_grad():
        for table, interval in zip(tables, intervals(spec, std), strict=True):
            table.uniform_(*interval)


def deviation(table: Tensor) -> float | None:
    """The standard deviation of a table's entries, estimated from a sample of rows; None if it is 0 or not finite.

    >>> deviation(torch.zeros(10, 4)), round(deviation(torch.tensor([[-1.0, 1.0]] * 1000)), 2)
    (None, 1.0)
    """
    with torch.no_grad():
        rows = torch.randint(len(table), (10_000,), device=table.device)
        std = float(table[rows].float().std())
    return std if 0 < std < float("inf") else None


def pool_bound(num_tables: int, members: Sequence[TableSpec], std: float | None = None) -> float:
    """The b of the interval [-b, b] from which a pool of ``num_tables`` tables is drawn.

    ``std`` is the standard deviation of a sum of one row per table; if None, that of a row of the full tables of the
    ``members``, averaged over the cold ids.
    """
    if std is not None:
        return sqrt(3 / num_tables) * std
    cold = sum(spec.num_composed for spec in members)
    bound = sum(spec.num_composed * sqrt(1 / spec.num_embeddings) for spec in members) / max(cold, 1)
    return bound / sqrt(num_tables)


def pool_(tables: Sequence[Tensor], members: Sequence[TableSpec], *, std: float | None = None) -> None:
    """Draw the tables of a pool in place, by ``pool_bound``."""
    bound = pool_bound(len(tables), members, std)
    with torch.no_grad():
        for table in tables:
            table.uniform_(-bound, bound)


def projection_(matrix: Tensor) -> None:
    """Draw the matrix ``[d, D]`` of narrow rows: orthogonal rows of length sqrt(D / d).

    Its rank is d, so distinct rows give distinct vectors, and the entries of vectors vary as those of rows do.
    """
    if matrix.is_meta:
        return
    d, out = matrix.shape
    with torch.no_grad():
        wide = torch.empty_like(matrix, dtype=torch.promote_types(matrix.dtype, torch.float32))
        matrix.copy_(torch.nn.init.orthogonal_(wide, gain=sqrt(out / d)))


def path_(weights: Sequence[Tensor], biases: Sequence[Tensor], activation: Activation) -> None:
    """Draw path networks (section 4.1) as close to the identity as their width allows, plus noise.

    With ``relu``, a direction q passes as ``relu(q x) - relu(-q x)``: 2 D hidden units carry D dimensions, and fewer
    carry some, scaled to keep the variance. With ``sigmoid``, close to ``1/2 + x / 4`` for small x, D units suffice.
    Each layer has weights ``[G, in, out]`` and biases ``[G, out]``, for G networks of one shape.
    """
    if weights[0].is_meta:  # there is nothing to draw, and torch would load its compiler
        return
    d = weights[0].shape[1]
    units = min((w.shape[2] for w in weights[:-1]), default=d)
    signs = (1.0, -1.0)[: min(units, 2 if activation == "relu" and len(weights) > 1 else 1)]
    directions = min(units // len(signs), d)
    device = weights[0].device
    spread = torch.kron(torch.eye(directions, device=device), torch.tensor([signs], device=device))  # to units
    gain = 1 if activation == "relu" else 4
    with torch.no_grad():
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            if i == 0:
                carry = spread
            elif i == len(weights) - 1:
                carry = spread.T * gain * sqrt(d / directions)
            else:
                carry = gain * torch.eye(min(weight.shape[1:]), device=device)
            values = torch.empty_like(weight, dtype=torch.float32).normal_(0, NOISE / sqrt(weight.shape[1]))
            values[:, : carry.shape[0], : carry.shape[1]] += carry
            weight.copy_(values)
            bias.zero_()
            if i > 0 and activation == "sigmoid":  # sigmoid(0) is 1/2: subtract the sum that this adds
                bias.copy_(-values.sum(1) / 2)
