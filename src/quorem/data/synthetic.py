"""A synthetic click log with Criteo's shape and a planted signal. Needs only torch and NumPy.

A counter-based generator computes every value from ``(seed, row, column)``, so that any rows can be drawn, in chunks of
any size. A category's hidden effect is a hash of ``(feature, id)``. This needs no table, whatever the cardinality, and
gives each category its own effect, so that categories that share an embedding cost accuracy. Effects are summed as
integers, which is exact.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..checks import check_int
from ..files.provenance import versions
from ..paper.hashing import GOLDEN, mix
from .batches import Batch
from .folder import ProgressCallback, new_folder
from .meta import Columns, Meta
from .prepared import Prepared
from .shape import CARDINALITIES, day_split

CALIBRATION_ROWS = 1 << 14
CHUNK_ROWS = 1 << 12  # fits in the cache
WRITE_ROWS = 1 << 17
LOG_UNIT = 1 << 20
MISSING = -(2**31)  # marks a missing count
MISSING_SHARE = round(0.05 * 2048)  # of 2048 categories or counts, so many are missing
DEVIATIONS = (1.0, 0.7, 0.5)  # standard deviations of the log-odds' parts: categories, pairs, dense features
NORMAL_DEVIATION = 2 * ((8192**2 - 1) / 3) ** 0.5  # standard deviation of the results of _normals

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ClickLog:
    """The hidden model and the frequencies of a log; ``draw`` gives its rows.

    Ids are Zipf distributed (log-uniform): id k > 0 has probability ``log((k + 1) / k) / log(n)``; id 0 is NULL.
    Dense features are heavy-tailed counts. A twentieth of the categories and counts are missing. The log-odds of a
    click are a sum of three parts (``DEVIATIONS``): an effect of every category; for every pair of neighbouring
    features the product of two hidden factors; and a weighted sum of the logarithms of the dense features.

    Args:
        cardinalities: number of ids of each feature, NULL included.
        num_dense: number of dense features.
        click_rate: mean probability of a click.
        seed: seed of all random numbers.

    >>> rows, probability = ClickLog(cardinalities=(10, 1000), num_dense=2).draw(0, 5)
    >>> rows.ids.shape, rows.dense.shape, probability.shape
    (torch.Size([5, 2]), torch.Size([5, 2]), torch.Size([5]))
    """

    cardinalities: tuple[int, ...] = CARDINALITIES
    num_dense: int = 13
    click_rate: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "cardinalities", tuple(self.cardinalities))
        if not self.cardinalities or not all(1 <= n < 2**31 for n in self.cardinalities):
            raise ValueError(f"cardinalities ({self.cardinalities}) must be one or more numbers in [1, 2**31)")
        check_int("num_dense", self.num_dense, 0)
        check_int("seed", self.seed, 0, 2**31 - 1)
        if not 0 < self.click_rate < 1:
            raise ValueError(f"click_rate ({self.click_rate}) must be in (0, 1)")

    def draw(self, start: int, stop: int) -> "Draw":
        """Rows ``[start, stop)``. A row is the same in every call that includes it.

        >>> log = ClickLog(cardinalities=(10, 1000), num_dense=2)
        >>> log.draw(0, 4).batch.ids.shape, bool((log.draw(2, 4).batch.ids == log.draw(0, 4).batch.ids[2:]).all())
        (torch.Size([4, 2]), True)
        """
        if not 0 <= start <= stop:
            raise ValueError(f"start ({start}) and stop ({stop}) must be 0 <= start <= stop")
        first = start - start % CHUNK_ROWS
        chunks = in_threads(self.chunk, range(first, max(stop, first + 1), CHUNK_ROWS))
        columns = zip(*((c.labels.byte(), c.logs.T.float(), c.ids.T.int(), c.probability) for c in chunks), strict=True)
        labels, dense, ids, probability = (torch.cat(parts)[start - first : stop - first] for parts in columns)
        return Draw(Batch(labels, dense, ids), probability)

    def chunk(self, start: int) -> "Chunk":
        """The rows of a whole chunk from ``start`` on.

        It is never cut: functions may round the last elements of a tensor differently.
        """
        scales, bias = _calibration(self)
        ids, counts, logs, bits = self._drawn(start, start + CHUNK_ROWS)
        log_odds = torch.full_like(bits, bias, dtype=torch.float64)
        for scale, effect in zip(scales, self._effects(ids, logs), strict=True):
            log_odds += effect.double().mul_(scale)
        probability = log_odds.sigmoid_()
        return Chunk(_uniform(bits) < probability, counts, logs, ids, probability)

    def _drawn(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids ``[F, B]``, counts and their logs ``[num_dense, B]``, and 64 random bits ``[B]`` for the labels.

        Counts are heavy-tailed integers, some below zero; missing ones are ``MISSING``.
        """
        features, columns = len(self.cardinalities), len(self.cardinalities) + self.num_dense + 1
        row = torch.arange(start, stop, device="cpu") * columns
        bits = _hash(row + torch.arange(columns, device="cpu")[:, None], self.seed)
        of_ids, of_counts, of_labels = bits[:features], bits[features:-1], bits[-1]

        n = torch.tensor(self.cardinalities, device="cpu")[:, None]
        ids = (_uniform(of_ids) * n.double().log()).exp_().long().clamp_(max=n - 1)
        ids.masked_fill_((of_ids & 2047) < MISSING_SHARE, 0)  # bits that _uniform does not use

        column = torch.arange(self.num_dense, device="cpu")[:, None]
        normal = _normals(of_counts)[0].double().mul_(1 / NORMAL_DEVIATION)
        counts = (normal * (0.5 + column % 4 / 4) + 1 + column % 5 / 2).exp_().long()
        counts -= 1 + column % 3
        counts.masked_fill_((of_counts & 2047) < MISSING_SHARE, MISSING)
        return ids, counts, counts.clamp(min=0).double().log1p(), of_labels

    def _effects(self, ids: Tensor, logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The unscaled parts of the log-odds from categories, pairs and dense features, as integers."""
        feature = torch.arange(len(ids), device=ids.device)[:, None]
        effect, factor = _normals(_hash(ids + (feature << 32), self.seed + (1 << 32)))
        unit = (logs * LOG_UNIT).long()
        weight = _hash(torch.arange(len(logs), device=ids.device)[:, None], self.seed + (2 << 32)) >> 58
        return effect.sum(0), (factor * factor.roll(1, 0)).sum(0), (unit * weight).sum(0)


class Draw(NamedTuple):
    """Rows and their true probabilities of a click ``[B]``."""

    batch: Batch
    probability: Tensor


class Chunk(NamedTuple):
    """Rows by column: labels and probability ``[B]``, counts and their logs ``[num_dense, B]``, ids ``[F, B]``."""

    labels: Tensor
    counts: Tensor
    logs: Tensor
    ids: Tensor
    probability: Tensor


@lru_cache(maxsize=16)
def _calibration(log: ClickLog) -> tuple[list[float], float]:
    """Scales of the effects and a bias, rounded, that give the wanted deviations and click rate on the first rows."""
    ids, _, logs, _ = log._drawn(0, CALIBRATION_ROWS)
    effects = [effect.double().numpy() for effect in log._effects(ids, logs)]
    scales = []
    for effect, target in zip(effects, DEVIATIONS, strict=True):
        deviation = effect.std()
        scales.append(float(f"{target / deviation:.6g}") if deviation > 0 else 0.0)
    log_odds = sum(effect * scale for effect, scale in zip(effects, scales, strict=True))
    low, high = -100.0, 100.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        rate = (1 / (1 + np.exp(-(log_odds - np.mean(log_odds) + middle)))).mean()
        low, high = (middle, high) if rate < log.click_rate else (low, middle)
    return scales, float(f"{low - np.mean(log_odds):.6g}")


def in_threads(work: Callable[[int], T], starts: Sequence[int]) -> list[T]:
    """Run ``work`` for each start, one chunk per thread.

    This is faster than running each of a chunk's hundred short operations on all threads.
    """
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, starts))
    finally:
        torch.set_num_threads(threads)


def _hash(counter: Tensor, stream: int) -> Tensor:
    """64 random bits for each counter: splitmix64 from a start that depends on the stream."""
    start = int(mix(torch.tensor(stream) * GOLDEN))
    return mix(counter * GOLDEN + start)


def _uniform(bits: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) from the upper 53 bits."""
    return (bits >> 11).bitwise_and_((1 << 53) - 1).double().mul_(2.0**-53)


def _normals(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Two uncorrelated, nearly normal integers from the upper 52 bits.

    Both are sums of the same four uniform integers; in the second, two of them are subtracted.
    """
    first, second, third, fourth = ((bits >> (12 + 13 * k)).bitwise_and_(8191) for k in range(4))
    first += second
    third += fourth
    return (first + third).mul_(2).sub_(4 * 8191), first.sub_(third).mul_(2)


def synthesize(
    log: ClickLog,
    num_rows: int,
    out: str | os.PathLike[str],
    *,
    days: int = 7,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> Prepared:
    """Write the first rows of a log as a prepared folder, with the best log loss that any model can reach.

    For each split, ``meta.json`` holds the expected log loss of the true probabilities (``bayes_log_loss``).

    Args:
        log: the hidden model.
        num_rows: number of rows.
        out: folder to write; it appears under this name only once it is complete.
        days: number of equal parts. The last part is halved into validation and test; the others train.
        overwrite: replace prepared data in ``out``.
        progress: called with the stage, the fraction of it that is done, and the rows so far.

    Raises:
        FileExistsError: if ``out`` exists, and is not prepared data that may be overwritten.
        ValueError: if ``num_rows`` is below 1.

    >>> import tempfile
    >>> data = synthesize(ClickLog(cardinalities=(10, 1000), num_dense=2), 70, tempfile.mkdtemp() + "/log")
    >>> data.num_rows, data.names, data.dense_names
    (70, ['C1', 'C2'], ['I1', 'I2'])
    """
    check_int("num_rows", num_rows)
    split = day_split(num_rows, days)
    base = np.cumsum([0, *log.cardinalities])
    counts = torch.zeros(int(base[-1]), dtype=torch.int64)
    expected = np.zeros(3)
    features = len(log.cardinalities)
    with new_folder(out, overwrite=overwrite) as folder:
        labels = folder.array("labels.npy", np.uint8)
        dense = folder.array("dense.npy", np.float32, (log.num_dense,))
        ids = folder.array("categorical.npy", np.int32, (features,))
        for start in range(0, num_rows, WRITE_ROWS):
            stop = min(start + WRITE_ROWS, num_rows)
            batch, probability = log.draw(start, stop)
            labels.append(batch.labels.numpy())
            dense.append(batch.dense.numpy())
            ids.append(batch.ids.numpy())
            training = batch.ids[: max(0, split["train"][1] - start)]
            flat = (training + torch.from_numpy(base[:-1])).flatten()
            counts.index_add_(0, flat, torch.ones_like(flat))
            for k, (first, last) in enumerate(split.values()):
                p = probability[max(first - start, 0) : max(last - start, 0)]
                expected[k] -= float((p * p.log() + (1 - p) * torch.log1p(-p)).sum())
            if progress is not None:
                progress("draw", stop / num_rows, stop)
        numbers = tuple(f"I{k + 1}" for k in range(log.num_dense))
        columns = Columns("label", numbers, tuple(f"C{k + 1}" for k in range(features)), missing=())
        for k, name in enumerate(columns.categorical):
            folder.save_counts(name, counts[base[k] : base[k + 1]].numpy())
        sizes = np.array([max(last - first, 1) for first, last in split.values()])
        folder.commit(
            Meta(
                num_rows=num_rows,
                columns=columns,
                cardinalities=list(log.cardinalities),
                split=split,
                transforms=dict.fromkeys(columns.dense, "none"),  # the numbers are transformed already
                config={"synthetic": asdict(log), "days": days},
                versions=versions(),
                bayes_log_loss=dict(zip(split, (expected / sizes).tolist(), strict=True)),
            )
        )
    return Prepared(out)
