"""A bijection that renumbers ids before they are partitioned, so that patterns in the ids do not become collisions."""

from dataclasses import dataclass

from torch import Tensor

from ..checks import check_int
from .partitions import int64


@dataclass(frozen=True)
class Mixing:
    """A bijection of ``[0, 2**bits)`` that mixes: regular patterns in the ids do not survive it.

    It is three rounds of xor with the number shifted by half its bits, and multiplication by an odd factor; each step
    can be undone. Every device, file and version gives the same numbers.

    Raises:
        ValueError: if ``bits`` is not in ``[1, 62]``.

    >>> import torch
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
        return mixing_rounds(int64("ids", ids) & ((1 << self.bits) - 1), self.bits)

    def inverse(self, numbers: Tensor) -> Tensor:
        """The ids that have these numbers; as the shift is more than half the bits, its xor undoes itself."""
        shift, mask = self.bits // 2 + 1, (1 << self.bits) - 1
        ids = int64("numbers", numbers) & mask
        ids = ids ^ (ids >> shift)
        for factor in reversed(MIXING_FACTORS):
            ids = (ids * pow(factor, -1, 1 << self.bits)) & mask
            ids = ids ^ (ids >> shift)
        return ids


MIXING_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)  # odd, below 2**62


def mixing_rounds(numbers: Tensor, bits: int | Tensor) -> Tensor:
    """``Mixing(bits)`` of ``numbers`` in ``[0, 2**bits)``; int64 ``bits`` may differ per number.

    It divides since ONNX has no shift of signed integers.
    """
    divisor, mask = 2 ** (bits // 2 + 1), 2**bits - 1
    for factor in MIXING_FACTORS:
        numbers = ((numbers ^ (numbers // divisor)) * factor) & mask
    return numbers ^ (numbers // divisor)
