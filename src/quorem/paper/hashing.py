"""Ids without a vocabulary: strings are hashed to 64-bit integers, and any 64-bit integer to one of n ids.

A string becomes the XXH64 of its UTF-8 bytes (seed 0), read as a signed integer; most languages have this hash. A raw
id is mixed by splitmix64, a bijection of the 64-bit integers, and reduced to ``[0, n)``: partitions need ids whose
digits are evenly distributed. Neither hash is cryptographic.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .partitions import int64

Words = NDArray[np.uint64]

# XXH64's five primes.
P1, P2, P3, P4, P5 = map(
    np.uint64, (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
)
STRINGS_AT_ONCE = 1 << 16  # so many that their words fit in the cache
STRIPE = 32  # bytes that the four lanes consume in one step


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
    if isinstance(values, np.ndarray):
        values = values.tolist()
    values = list(values)
    hashes = np.empty(len(values), np.uint64)
    for start in range(0, len(values), STRINGS_AT_ONCE):
        strings = [_encoded(value) for value in values[start : start + STRINGS_AT_ONCE]]
        hashes[start : start + len(strings)] = xxh64(strings)
    return torch.from_numpy(hashes.view(np.int64))


def _encoded(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    raise TypeError(f"value ({value!r}) must be a str or bytes")


def xxh64(strings: Sequence[bytes]) -> Words:
    """XXH64 with seed 0 of each string; vectorized, so that all strings advance by one word together."""
    lengths = np.fromiter(map(len, strings), np.int64, len(strings))
    starts = np.cumsum(lengths) - lengths
    text = np.frombuffer(b"".join(strings) + bytes(8), np.uint8)  # padded: words past the end may be read
    words = np.ndarray(len(text) - 7, "<u8", text, strides=(1,))  # the eight bytes that start at each position
    state = np.full(len(strings), P5)
    long = np.flatnonzero(lengths >= STRIPE)
    state[long] = _stripes(words, starts[long], lengths[long] // STRIPE)
    state += lengths.astype(np.uint64)
    position, rest = starts + lengths // STRIPE * STRIPE, lengths % STRIPE
    for size, most, mixed_in in AFTER_STRIPES:
        for _ in range(most):
            (active,) = np.nonzero(rest >= size)
            word = words[position[active]] & np.uint64(2 ** (8 * size) - 1)
            state[active] = mixed_in(state[active], word)
            position[active] += size
            rest[active] -= size
    for shift, prime in ((33, P2), (29, P3)):
        state = (state ^ state >> np.uint64(shift)) * prime
    return state ^ state >> np.uint64(32)


def _stripes(words: Words, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> Words:
    """The state after the whole stripes of each string; every string has at least one."""
    with np.errstate(over="ignore"):  # NumPy warns when scalars wrap around, but not when arrays do
        first = (P1 + P2, P2, np.uint64(0), np.uint64(0) - P1)
    lanes = [np.full(len(starts), value) for value in first]
    for stripe in range(int(counts.max(initial=0))):
        (active,) = np.nonzero(counts > stripe)
        for number, values in enumerate(lanes):
            values[active] = _round(values[active], words[starts[active] + STRIPE * stripe + 8 * number])
    state = sum((_rotated(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)), np.uint64(0))
    for lane in lanes:
        state = (state ^ _round(np.uint64(0), lane)) * P1 + P4
    return np.asarray(state)


def _round(lane: Words | np.uint64, word: Words) -> Words:
    return _rotated(lane + word * P2, 31) * P1


def _rotated(value: Words, bits: int) -> Words:
    return value << np.uint64(bits) | value >> np.uint64(64 - bits)


# The bytes after the last whole stripe: so many at once, so often at most, and the state after them.
AFTER_STRIPES: tuple[tuple[int, int, Callable[[Words, Words], Words]], ...] = (
    (8, 3, lambda state, word: _rotated(state ^ _round(np.uint64(0), word), 27) * P1 + P4),
    (4, 1, lambda state, word: _rotated(state ^ word * P1, 23) * P2 + P3),
    (1, 3, lambda state, word: _rotated(state ^ word * P5, 11) * P1),
)

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
