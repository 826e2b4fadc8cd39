"""Ids without a vocabulary: strings are hashed to 64-bit integers, and any 64-bit integer to one of n ids.

A string becomes the XXH64 of its UTF-8 bytes (seed 0), read as a signed integer; most languages have this hash. A raw
id is mixed by splitmix64, a bijection of the 64-bit integers, and reduced to ``[0, n)``: partitions need ids whose
digits are evenly distributed. Neither hash is cryptographic.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .partitions import int64


def hash_strings(values: Sequence[str | bytes] | Iterable[str | bytes] | NDArray[np.generic]) -> Tensor:
    """The XXH64 hash (seed 0) of each string's UTF-8 bytes, as signed 64-bit integers ``[len(values)]``.

    The result is the same on every machine and in every version. Strings are not normalized.

    Args:
        values: str or bytes; a list, an array, a column of a data frame.

    Raises:
        TypeError: if ``values`` is a single string, or one of them is neither str nor bytes (a missing value).
        ValueError: if a str cannot be written in UTF-8 (half of a surrogate pair).

    >>> hash_strings(["", "a", b"abc"])
    tensor([-1205034819632174695, -3292477735350538661,  4952883123889572249])
    """
    if isinstance(values, str | bytes):
        raise TypeError(f"values ({values!r}) must be a sequence of strings, such as [{values!r}]")
    import xxhash  # not with ``quorem``: few programs hash strings

    strings = map(_encoded, values.tolist() if isinstance(values, np.ndarray) else values)
    return torch.tensor([*map(xxhash.xxh64_intdigest, strings)], dtype=torch.uint64).view(torch.int64)


def _encoded(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    raise TypeError(f"value ({value!r}) must be a str or bytes")


# splitmix64: the golden ratio that is added, (shift, multiplier) of each round, and the last shift; signed integers.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
LAST_SHIFT = 31


def mix(ids: Tensor) -> Tensor:
    """splitmix64, a bijection of the 64-bit integers, as int64: every output bit depends on all bits of the id.

    Args:
        ids: int64; uint64, whose bits are reinterpreted as int64; or narrower integers, which are widened.

    Raises:
        TypeError: if ``ids`` does not hold integers.

    >>> mix(torch.tensor([0, 1, -1]))
    tensor([-2152535657050944081, -7995527694508729151, -1956407806741107680])
    """
    x = as_int64(ids) + GOLDEN
    for shift, multiplier in ROUNDS:
        x ^= _shifted(x, shift)
        x *= multiplier
    return x.bitwise_xor_(_shifted(x, LAST_SHIFT))


def mixed_ids(ids: Tensor, num_embeddings: int | Tensor) -> Tensor:
    """The id in ``[0, num_embeddings)`` of each raw id: the low 63 bits of ``mix``, modulo ``num_embeddings``.

    Args:
        ids: any 64-bit integers, as in ``mix``.
        num_embeddings: size of the id space, or a tensor with the size for each id. Of N raw ids, N * (N - 1) / 2 pairs
            divided by it share an id: sizes of 2**40 to 2**62 keep that rare.

    >>> mixed_ids(torch.tensor([7, 7 + 2**20, -7]), 2**40)
    tensor([ 980748996055, 1069577029096,  430629333360])
    """
    return (mix(ids) & (2**63 - 1)) % num_embeddings


def as_int64(ids: Tensor) -> Tensor:
    """``ids`` as int64: the bits of uint64 are reinterpreted, narrower integers keep their value.

    Args:
        ids: integers; others are a TypeError.

    >>> as_int64(torch.tensor([2**64 - 1], dtype=torch.uint64))
    tensor([-1])
    """
    return ids.view(torch.int64) if getattr(ids, "dtype", None) == torch.uint64 else int64("ids", ids)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """``values >> bits``, filled with zeros from the left; torch's shift of signed integers copies the sign bit."""
    return (values >> bits) & (2 ** (64 - bits) - 1)
