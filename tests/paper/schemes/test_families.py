"""Schemes: what each means for a table, when it gives way to the full one, JSON, and what is refused."""

import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import CASES
from refusals import refused

import quorem
from quorem import QR, ChineseRemainder, Custom, Embedding, Full, GeneralizedQR, Hash, HotCold, Path, Pool, Table
from quorem.paper.operations import OPERATIONS
from quorem.paper.partitions import ExplicitPartition, Partition, is_complementary
from quorem.paper.schemes import Scheme, from_json, to_json

FAMILIES = [
    QR(4),
    QR(4, large="quotient"),
    GeneralizedQR(2),
    GeneralizedQR(3),
    ChineseRemainder(2),
    ChineseRemainder(3),
]


WITH_OPTIONS = [  # every option of every scheme has another value than its default
    Full(width=3, force=True),
    Hash(9, width=3, force=True),
    QR(9, large="quotient", operation="concat", dims=(3, 5), width=8, force=True),
    GeneralizedQR(4, num_rows=99, operation="feature", width=8, force=True),
    ChineseRemainder(2, num_collisions=7, operation="add", dims=(1,), force=True),
    Custom([Partition(2, 3), ExplicitPartition([0, 9, 1])], operation="add", dims=(4, 4), check=False, force=True),
    HotCold(9, cold=Pool(9, 3, name="cold"), num_rest=2, width=4, force=True),
    HotCold(9, cold=QR(4, operation="add")),
    Path(7, (3, 10**6), num_partitions=4, activation="sigmoid", width=4, force=True),
]


@pytest.mark.parametrize("scheme", [*CASES.values(), *WITH_OPTIONS], ids=str)
def test_json_round_trip(scheme: Scheme) -> None:
    again = from_json(to_json(scheme))
    assert again == scheme and type(again) is type(scheme)
    assert to_json(again) == to_json(scheme)


def test_json_leaves_defaults_out_and_is_plain_json() -> None:
    assert json.loads(to_json(QR())) == {"scheme": "QR"}
    text = to_json(Custom((Partition(2, 3), ExplicitPartition([0, 1])), operation="add"))
    assert json.loads(text) == {
        "scheme": "Custom",
        "operation": "add",
        "partitions": [{"stride": 2, "size": 3}, {"index": [0, 1]}],
    }


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "Expecting property name"),
        ("[]", r"scheme JSON \('\[\]'\) must be an object whose 'scheme' is one of Full, Hash, QR"),
        ('{"num_collisions": 4}', "must be an object whose 'scheme' is one of"),
        ('{"scheme": "TensorTrain"}', "TensorTrain.* must be an object whose 'scheme' is one of"),
        ('{"scheme": ["QR"]}', "must be an object whose 'scheme' is one of"),
        ('{"scheme": "QR", "colisions": 4}', "colisions is not known: QR has force, width, operation"),
        ('{"scheme": "QR", "num_collisions": "4"}', r"num_collisions \('4'\) must be an int"),
        (
            '{"scheme": "HotCold", "num_hot": 3, "cold": {"scheme": "Hash", "num_collisions": 0}}',
            "cold: num_collisions",
        ),
        ('{"scheme": "Custom"}', "partitions is missing"),
        ('{"scheme": "Custom", "partitions": [3]}', r"partition JSON \('3'\) must hold stride and size"),
        ('{"scheme": "Custom", "partitions": [{"stride": 3}]}', "must hold stride and size, or index"),
    ],
)
def test_json_refuses(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        from_json(text)


def test_schemes_are_values() -> None:
    assert QR(4) == QR(num_collisions=4) != QR(5)
    assert len({QR(4), QR(4), Hash(4), Path(4, [64]), Path(4)}) == 3
    assert replace(QR(4, operation="add"), num_collisions=60) == QR(60, operation="add")
    with pytest.raises(dataclasses.FrozenInstanceError):
        QR(4).num_collisions = 5  # type: ignore[misc]


@pytest.mark.parametrize("scheme", [Full(), Hash(4), *FAMILIES, Path(4)], ids=str)
def test_a_spec_allocates_nothing(scheme: Scheme) -> None:
    n = 10**15
    spec = scheme.spec(n, 128)
    assert spec.num_embeddings == n and spec.num_parameters > 0


@given(st.integers(1, 5000), st.integers(1, 200), st.integers(1, 40), st.booleans())
def test_a_table_never_grows_unless_forced(n: int, collisions: int, d: int, concat: bool) -> None:
    operation = "concat" if concat and d % 6 == 0 else "mult"
    for scheme in (Hash(collisions), QR(collisions, operation=operation), GeneralizedQR(3, operation=operation)):
        spec = scheme.spec(n, d)
        forced = replace(scheme, force=True).spec(n, d)
        assert spec.num_parameters == min(n * d, forced.num_parameters)
        assert (spec.fallback is not None) == (forced.num_parameters >= n * d) == isinstance(spec.scheme, Full)
        assert spec.embedding_dim == d and forced.scheme.force


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_a_table_that_gives_way_keeps_its_operation(operation: str) -> None:
    asked = GeneralizedQR(3, operation=operation, num_rows=9)
    with pytest.warns(UserWarning, match="1 of 1 tables stay full: GeneralizedQR would store"):
        table = Embedding(2, 3, asked)
    assert table.scheme == Full()
    assert table(torch.tensor([1])).shape == ((1, 1, 3) if operation == "feature" else (1, 3))


def test_a_table_that_gives_way_says_so_once_for_all() -> None:
    tables = [Table("a", 2, 8, QR(4)), Table("b", 1000, 8, QR(4)), Table("c", 3, 8, QR(4))]
    with pytest.warns(UserWarning, match=r"2 of 3 tables stay full: a: QR would store 24 .* has 16; c: QR") as caught:
        module = quorem.EmbeddingCollection(tables)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert [type(s.scheme) for s in module.specs] == [Full, QR, Full]
    for module in (Embedding, quorem.EmbeddingBag):
        with pytest.warns(UserWarning, match="1 of 1 tables stay full: QR would store 24") as caught:
            table = module(2, 8, QR(4))
        assert caught[0].filename == __file__ and "QR would store" in repr(table)


@given(st.integers(2, 3000), st.integers(1, 4), st.integers(0, 300))
def test_rows_to_spend(n: int, k: int, spare: int) -> None:
    """``num_rows`` is spent, never exceeded, and the ids stay apart."""
    for scheme in (GeneralizedQR, ChineseRemainder):
        fewest = sum(p.size for p in scheme(k).partitions_of(n))
        parts = scheme(k, num_rows=fewest + spare).partitions_of(n)
        rows = [p.size for p in parts]
        assert len(rows) == k and sum(rows) <= fewest + spare
        assert is_complementary(parts, n)
        with pytest.raises(ValueError, match=rf"num_rows \({fewest - 1}\) must be at least ({fewest}|{k})"):
            scheme(k, num_rows=fewest - 1).partitions_of(n)


@pytest.mark.parametrize("scheme", [GeneralizedQR, ChineseRemainder])
@given(n=st.integers(1, 3000), k=st.integers(1, 4), c=st.integers(1, 2000))
def test_a_share_of_the_rows_is_spent(scheme: type[Scheme], n: int, k: int, c: int) -> None:
    """``num_collisions`` is ``num_rows`` relative to the table, but never too few to tell the ids apart."""
    parts = scheme(k, num_collisions=c).partitions_of(n)
    fewest = sum(p.size for p in scheme(k).partitions_of(n))
    rows = sum(p.size for p in parts)
    assert is_complementary(parts, n)
    assert rows == fewest if -(-n // c) <= fewest else rows <= -(-n // c)
    if -(-n // c) > fewest:
        assert parts == scheme(k, num_rows=-(-n // c)).partitions_of(n)


def test_path_divides_its_collisions_among_the_levels() -> None:
    spec = Path(12, num_partitions=3).spec(12_000, 4)
    assert spec.shapes == ((1000, 4),) and spec.path_sizes == (4, 3)
    assert is_complementary(spec.partitions, 12_000)
    assert Full().spec(10, 4).path_sizes == ()


def test_numpy_integers_are_integers() -> None:
    scheme = QR(np.int64(4), operation="concat", dims=(np.int32(3), np.int64(5)))
    assert from_json(to_json(scheme)) == scheme
    table = Embedding(np.int64(100), np.int32(8), scheme)
    assert table(torch.tensor([99])).shape == (1, 8) and type(table.num_parameters) is int


CONCAT, GROUPS, PARTS = QR(operation="concat"), ExplicitPartition([0, 1, 0]), [Partition(1, 4), Partition(1, 6)]


test_refusals = refused(
    (lambda: QR(0), ValueError, r"num_collisions \(0\) must be at least 1"),
    (lambda: QR(True), TypeError, r"num_collisions \(True\) must be an int"),
    (lambda: QR(operation="max"), ValueError, r"operation \('max'\) must be one of 'concat', 'add', 'mult'"),
    (lambda: QR(operation="concat", dims=(0, 4)), ValueError, r"dims \(0\) must be at least 1"),
    (lambda: QR(operation="concat", dims=8), TypeError, r"dims \(8\) must be a tuple of widths"),
    (lambda: QR(force=1), TypeError, r"force \(1\) must be a bool"),
    (lambda: GeneralizedQR(3, num_rows=2), ValueError, r"num_rows \(2\) must be at least 3"),
    (lambda: GeneralizedQR(2, num_rows=9, num_collisions=4), ValueError, r"num_collisions \(4\) must be None"),
    (lambda: Path(hidden=("a",)), TypeError, r"hidden \('a'\) must be an int"),
    (lambda: Custom(None), TypeError, r"partitions \(None\) must be a tuple of Partition"),
    (lambda: Path(num_partitions=1), ValueError, r"num_partitions \(1\) must be at least 2"),
    (lambda: Custom(()), ValueError, r"partitions \(\(\)\) must be one or more Partition"),
    (lambda: Custom([(1, 4)]), ValueError, "must be one or more Partition or ExplicitPartition"),
    (lambda: Full().spec(0, 4), ValueError, r"num_embeddings \(0\) must be at least 1"),
    (lambda: Full().spec(4, 0.0), TypeError, r"embedding_dim \(0.0\) must be an int"),
    (lambda: CONCAT.spec(100, 7), ValueError, r"embedding_dim \(7\) must be divisible by the number of part"),
    (lambda: replace(CONCAT, dims=(8, 4)).spec(100, 16), ValueError, r"dims \(\(8, 4\)\) must be 2 widths"),
    (lambda: QR(4, dims=(8, 8)).spec(100, 16), ValueError, r"dims \(\(8, 8\)\) must be None unless oper"),
    (lambda: GeneralizedQR(2, num_rows=19).spec(100, 4), ValueError, r"at least 20 for 2 tables to cover 100 ids"),
    (lambda: ChineseRemainder(2, num_rows=20).spec(100, 4), ValueError, r"at least 21 for 2 coprime tables"),
    (lambda: Custom([GROUPS]).spec(5, 4), ValueError, r"index of Explicit.* has 3 entries, but num_embed"),
    (lambda: Custom(PARTS).spec(24, 4), ValueError, r"must be complementary over 24 ids \(check=False"),
)
