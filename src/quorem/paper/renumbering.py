"""Bijections that renumber ids before they are partitioned, so that patterns in the ids do not become collisions."""

import itertools
import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import INT64_MAX, check_int
from .partitions import int64


@dataclass(frozen=True)
class Permutation:
    """The bijection ``i -> (multiplier * i + shift) % n``, to renumber ids before they are partitioned.

    It takes two integers; storing a permutation of n ids would take more memory than the compressed table. It is
    affine, so it does not mix: ids a fixed distance apart stay a fixed distance apart. ``Mixing`` does mix.

    Raises:
        ValueError: if ``multiplier`` and ``n`` share a factor, ``shift`` is not in ``[0, n)``, or
            ``multiplier * (n - 1) + shift`` overflows int64.

    >>> Permutation(multiplier=3, shift=1, n=10)(torch.arange(10))
    tensor([1, 4, 7, 0, 3, 6, 9, 2, 5, 8])
    """

    multiplier: int
    shift: int
    n: int

    def __post_init__(self) -> None:
        n, multiplier = check_int("n", self.n), check_int("multiplier", self.multiplier)
        shift = check_int("shift", self.shift, 0, n - 1)
        if (common := math.gcd(multiplier, n)) != 1:
            raise ValueError(f"multiplier ({multiplier}) must be coprime with n ({n}); their gcd is {common}")
        if multiplier * (n - 1) + shift > INT64_MAX:
            raise ValueError(f"multiplier ({multiplier}) * (n - 1) + shift must be < 2**63 for n ({n})")
        for name, value in (("multiplier", multiplier), ("shift", shift), ("n", n)):
            object.__setattr__(self, name, value)

    @classmethod
    def from_seed(cls, n: int, seed: int) -> "Permutation":
        """A random permutation determined by ``seed``; ``multiplier`` is 1 (a rotation) only if no other fits."""
        n, draw = check_int("n", n), random.Random(check_int("seed", seed, 0))
        high = min(n, INT64_MAX // n)
        start = draw.randrange(2, high) if high > 2 else 2
        candidates = itertools.chain(range(start, high), range(2, min(start, high)))
        multiplier = next((m for m in candidates if math.gcd(m, n) == 1), 1)
        return cls(multiplier, draw.randrange(min(n, 2**63 - multiplier * (n - 1))), n)

    def __call__(self, ids: Tensor) -> Tensor:
        return (int64("ids", ids) * self.multiplier + self.shift) % self.n

    def inverse(self, numbers: Tensor) -> Tensor:
        """The ids that have these numbers.

        Raises:
            ValueError: if ``n`` is 2**31 or more: the products would overflow int64.

        >>> permutation = Permutation(multiplier=3, shift=1, n=10)
        >>> permutation.inverse(permutation(torch.arange(10)))
        tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
        """
        if self.n >= 2**31:
            raise ValueError(f"n ({self.n}) must be < 2**31 for an inverse")
        return (int64("numbers", numbers) - self.shift) % self.n * pow(self.multiplier, -1, self.n) % self.n


@dataclass(frozen=True)
class Mixing:
    """A bijection of ``[0, 2**bits)`` that mixes: regular patterns in the ids do not survive it.

    It is three rounds of xor with the number shifted by half its bits, and multiplication by an odd factor.
    ``MIXING_FACTORS`` are fixed, so that every device, file and version gives the same numbers. It is a bijection
    because each step can be undone.

    Raises:
        ValueError: if ``bits`` is not in ``[1, 62]``.

    >>> sorted(Mixing(4)(torch.arange(16)).tolist()) == list(range(16))
    True
    """

    bits: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_int("bits", self.bits, 1, 62))

    @classmethod
    def covering(cls, n: int) -> "Mixing":
        """The ``Mixing`` with the fewest bits that covers ``n`` numbers.

        >>> Mixing.covering(1000)
        Mixing(bits=10)
        """
        return cls(max(1, (check_int("n", n, 0) - 1).bit_length()))

    def __call__(self, ids: Tensor) -> Tensor:
        return mixed_numbers(int64("ids", ids), torch.tensor(self.bits, device=ids.device))

    def inverse(self, numbers: Tensor) -> Tensor:
        """The ids that have these numbers; as the shift is more than half the bits, its xor undoes itself.

        >>> mixing = Mixing(4)
        >>> mixing.inverse(mixing(torch.arange(16))).tolist() == list(range(16))
        True
        """
        shift, mask = self.bits // 2 + 1, (1 << self.bits) - 1
        ids = int64("numbers", numbers) & mask
        ids = ids ^ (ids >> shift)
        for factor in reversed(MIXING_FACTORS):
            ids = (ids * pow(factor, -1, 1 << self.bits)) & mask
            ids = ids ^ (ids >> shift)
        return ids


MIXING_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)  # odd, below 2**62


def mixed_numbers(numbers: Tensor, bits: Tensor) -> Tensor:
    """``Mixing(bits)`` of ``numbers``, where ``bits`` may differ per number; 0 bits leave a number unchanged."""
    shift, mask = bits // 2 + 1, (torch.ones_like(numbers) << bits) - 1
    mixed = numbers & mask
    for factor in MIXING_FACTORS:
        mixed = ((mixed ^ (mixed >> shift)) * factor) & mask
    mixed = mixed ^ (mixed >> shift)
    return torch.where(bits > 0, mixed, numbers)
