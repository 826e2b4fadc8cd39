"""Strings and raw ids: against the two algorithms written out in plain Python integers, and against fixed vectors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from quorem.paper.hashing import as_int64, hash_strings, mix, mixed_ids

MASK = 2**64 - 1
PRIMES = (11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579, 2870177450012600261)


def rotated(x: int, bits: int) -> int:
    return (x << bits | x >> (64 - bits)) & MASK


def xxh64_by_hand(data: bytes) -> int:
    """XXH64 with seed 0, one byte string and one step at a time, from its specification."""
    p1, p2, p3, p4, p5 = PRIMES
    total = len(data)

    def step(lane: int, word: int) -> int:
        return rotated((lane + word * p2) & MASK, 31) * p1 & MASK

    def read(size: int) -> int:
        nonlocal data
        word, data = int.from_bytes(data[:size], "little"), data[size:]
        return word

    if total >= 32:
        lanes = [(p1 + p2) & MASK, p2, 0, -p1 & MASK]
        while len(data) >= 32:
            lanes = [step(lane, read(8)) for lane in lanes]
        h = sum(rotated(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            h = ((h ^ step(0, lane)) * p1 + p4) & MASK
    else:
        h = p5
    h = (h + total) & MASK
    while len(data) >= 8:
        h = (rotated(h ^ step(0, read(8)), 27) * p1 + p4) & MASK
    if len(data) >= 4:
        h = (rotated(h ^ (read(4) * p1 & MASK), 23) * p2 + p3) & MASK
    while data:
        h = rotated(h ^ (read(1) * p5 & MASK), 11) * p1 & MASK
    h = (h ^ h >> 33) * p2 & MASK
    h = (h ^ h >> 29) * p3 & MASK
    return h ^ h >> 32


def splitmix64_by_hand(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def unsigned(hashes: torch.Tensor) -> list[int]:
    return [value & MASK for value in hashes.tolist()]


# The first four are widely published for XXH64; all came from xxh64_by_hand.
VECTORS = {
    "": 0xEF46DB3751D8E999,
    "a": 0xD24EC4F1A98C6E5B,
    "abc": 0x44BC2CF5AD770999,
    "Nobody inspects the spammish repetition": 0xFBCEA83C8A378BF1,
}


def test_fixed_vectors() -> None:
    assert unsigned(hash_strings(list(VECTORS))) == list(VECTORS.values())
    assert [xxh64_by_hand(text.encode()) for text in VECTORS] == list(VECTORS.values())


def test_every_length_equals_the_plain_algorithm() -> None:
    data = [bytes((7 * i + 13 * n) % 256 for i in range(n)) for n in [*range(101), 1000, 4096]]
    assert unsigned(hash_strings(data)) == [xxh64_by_hand(value) for value in data]


@given(st.lists(st.one_of(st.text(max_size=60), st.binary(max_size=80)), max_size=20))
def test_any_strings_equal_the_plain_algorithm(values: list[str | bytes]) -> None:
    expected = [xxh64_by_hand(v.encode() if isinstance(v, str) else v) for v in values]
    hashes = hash_strings(values)
    assert hashes.dtype == torch.int64 and hashes.shape == (len(values),)
    assert unsigned(hashes) == expected


def test_strings_come_in_many_containers() -> None:
    values = ["é", "long enough for a stripe of thirty-two bytes", ""]
    expected = hash_strings(values)
    for other in (tuple(values), iter(values), np.array(values), np.array(values, dtype=object)):
        assert torch.equal(hash_strings(other), expected)
    assert torch.equal(hash_strings([value.encode() for value in values]), expected)


test_what_is_no_string_is_refused = refused(
    (lambda: hash_strings("user"), TypeError, r"values \('user'\) must be a sequence of strings, such as \['user'\]"),
    (lambda: hash_strings(["user", None]), TypeError, r"value \(None\) must be a str or bytes"),
    (lambda: hash_strings([3]), TypeError, r"value \(3\) must be a str or bytes"),
    (lambda: hash_strings(["\ud800"]), ValueError, "surrogates not allowed"),
)


EXTREMES = [0, 1, 2, -1, 2**31, 2**62, 2**63 - 1, -(2**63), 2**20, 2**40 + 1]


def test_mixing_equals_the_plain_algorithm() -> None:
    assert unsigned(mix(torch.tensor(EXTREMES))) == [splitmix64_by_hand(x & MASK) for x in EXTREMES]
    first = 0xE220A8397B1DCDAF  # splitmix64's first number from seed 0, widely published
    assert unsigned(mix(torch.tensor([0]))) == [first]


@given(st.integers(-(2**63), 2**63 - 1))
def test_mixing_can_be_undone(x: int) -> None:
    """So it is a bijection: no two raw ids meet before they are reduced to the id space."""
    (y,) = unsigned(mix(torch.tensor([x])))
    y ^= y >> 31 ^ y >> 62
    y = y * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    y ^= y >> 27 ^ y >> 54
    y = y * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    y ^= y >> 30 ^ y >> 60
    assert (y - 0x9E3779B97F4A7C15) & MASK == x & MASK


def test_unsigned_and_narrow_ids() -> None:
    big = [2**64 - 1, 2**63, 5]
    signed = torch.tensor([x - 2**64 if x >= 2**63 else x for x in big])
    assert torch.equal(mix(torch.tensor(big, dtype=torch.uint64)), mix(signed))
    assert torch.equal(mix(torch.tensor([-3, 4], dtype=torch.int32)), mix(torch.tensor([-3, 4])))
    for wrong in (torch.ones(2), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(TypeError, match=r"ids \(torch.*\) must be an integer tensor"):
            as_int64(wrong)
    with pytest.raises(TypeError, match=r"ids \(list\) must be an integer tensor"):
        mix([1])


@pytest.mark.parametrize("num_embeddings", [1, 1000, 2**40, 2**62])
def test_mixed_ids_lie_in_the_id_space(num_embeddings: int) -> None:
    ids = mixed_ids(torch.tensor(EXTREMES), num_embeddings)
    expected = [(splitmix64_by_hand(x & MASK) & (2**63 - 1)) % num_embeddings for x in EXTREMES]
    assert ids.tolist() == expected


def test_collisions_are_as_rare_as_those_of_random_numbers() -> None:
    ids = mixed_ids(torch.arange(20_000), 2**24)
    expected = 20_000 * 19_999 / 2 / 2**24
    seen = sum(int(n) * (int(n) - 1) // 2 for n in ids.unique(return_counts=True)[1])
    assert abs(seen - expected) < 4 * expected**0.5
