"""Batches of TorchRec in one process: empty ones, keys in any order, ids out of range, raw ids; and what is refused."""

import re

import pytest
import torch

import quorem

pytest.importorskip("torchrec", reason="needs TorchRec: `make install`, or the line in docs/torchrec.md")

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_tables import FEW, FREQUENCIES, NAMES, D, N, bags_of, expected, few

from quorem.integrations import torchrec as integration
from quorem.integrations.torchrec import EmbeddingBagCollection, EmbeddingCollection, rows


@pytest.mark.parametrize("lengths", [[0] * 10, [0, 2, 0, 0, 1, 1, 0, 0, 0, 3], [2, 2, 0, 0, 0, 0, 0, 0, 0, 0]])
def test_empty_features(lengths: list[int]) -> None:
    collection, module = few()
    features = KeyedJaggedTensor(NAMES, torch.arange(sum(lengths)) % 7, lengths=torch.tensor(lengths))
    torch.testing.assert_close(module(features).values(), expected(collection, features), rtol=1e-5, atol=1e-6)


def test_an_empty_batch() -> None:
    _, module = few()
    empty = torch.zeros(0, dtype=torch.int64)
    out = module(KeyedJaggedTensor(NAMES, empty, lengths=empty, stride=0)).values()
    assert out.shape == (0, 40)
    out.sum().backward()
    vectors = EmbeddingCollection(FEW)(KeyedJaggedTensor(NAMES, empty, lengths=empty, stride=0))
    assert [v.values().shape for v in vectors.values()] == [(0, 8)] * 5


def test_keys_may_come_in_any_order_and_be_more() -> None:
    collection, module = few()
    keys = ["day", "unknown", "word", "user", "shop", "item"]
    lengths = torch.tensor([1, 2, 3, 1, 0, 2, 2, 0, 1, 1, 0, 1])
    for dtype in (torch.int64, torch.int32):
        features = KeyedJaggedTensor(keys, torch.arange(14, dtype=dtype) % 7, lengths=lengths.to(dtype))
        out = module(features)
        assert out.keys() == NAMES
        torch.testing.assert_close(out.values(), expected(collection, features), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [-1, 1000])
def test_ids_out_of_range_raise(name: str, bad: int) -> None:
    _, module = few()
    ids = torch.zeros(10, dtype=torch.int64)
    ids[2 * NAMES.index(name) + 1] = bad
    n = FEW[NAMES.index(name)].num_embeddings
    with pytest.raises(IndexError, match=re.escape(f"id {bad} is outside [0, {n}) of table {name}")):
        module(KeyedJaggedTensor(NAMES, ids, lengths=torch.ones(10, dtype=torch.int64)))


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ids on the CPU be treated as on a GPU."""
    monkeypatch.setattr(rows, "raises_at_once", lambda ids: False)


def test_ids_out_of_range_give_zeros_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch)
    collection, module = few()
    ids = torch.tensor([1, 100, -1, 2, 3, 80, 70, 5, 6, 7])
    features = KeyedJaggedTensor(NAMES, ids, lengths=torch.full((5,), 2))
    good = KeyedJaggedTensor(NAMES, torch.tensor([1, 2, 3, 5, 6]), lengths=torch.ones(5, dtype=torch.int64))
    with pytest.warns(UserWarning, match="5 ids out of range in table user, table item.*each gave a vector of zeros"):
        out = module(features)
    torch.testing.assert_close(out.values(), expected(collection, good), rtol=1e-5, atol=1e-6)
    with pytest.raises(IndexError, match="5 ids are out of range in table user"):
        EmbeddingBagCollection(FEW, on_invalid_id="raise")(features)
    vectors = EmbeddingCollection(FEW, on_invalid_id="trust")(features)
    assert [bool(vectors[name].values()[1].eq(0).all()) for name in NAMES] == [True, False, True, False, True]


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        ([quorem.Table("a", 10, 6)], {}, "width (6) of tables.a.0 must be a multiple of 4"),
        ([quorem.Table("a", 90, 12, quorem.QR(4, operation="concat"))], {}, "width (6) of tables.a.0 must be a"),
        ([quorem.Table("a", 10, 8)], {"dtype": torch.bfloat16}, "dtype (torch.bfloat16) must be torch.float32 or"),
        ([quorem.Table("a", 10, 8)], {"num_shards": 0}, "num_shards (0) must be"),
        ([quorem.Table("a", 10, 8)], {"mode": "max"}, "mode ('max') must be one of 'mean', 'sum'"),
        ([quorem.Table("a", 10, 8)], {"on_invalid_id": "no"}, "on_invalid_id ('no') must be one of"),
        ([quorem.Table("a", 10, 8), quorem.Table("a", 10, 8)], {}, "names of tables ('a') must be unique"),
    ],
)  # fmt: skip
def test_tables_that_torchrec_cannot_take_are_refused(tables, options, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=re.escape(message)):
        EmbeddingBagCollection(tables, **options)


def test_batches_that_do_not_fit_are_refused() -> None:
    _, module = few()
    ones = torch.ones(5, dtype=torch.int64)
    with pytest.raises(KeyError, match=re.escape("must have 'item', 'word'")):
        module(KeyedJaggedTensor(["user", "day", "shop"], ones[:3], lengths=ones[:3]))
    with pytest.raises(ValueError, match="features must have weights"):
        EmbeddingBagCollection(FEW, is_weighted=True)(KeyedJaggedTensor(NAMES, ones, lengths=ones))
    with pytest.raises(TypeError, match=r"features dtype .* must be torch.int32 or torch.int64"):
        module(KeyedJaggedTensor(NAMES, ones.float(), lengths=ones))
    uneven = KeyedJaggedTensor(NAMES, ones, lengths=ones, stride_per_key_per_rank=[[1], [1], [1], [2], [0]])
    with pytest.raises(ValueError, match="features must have one batch size for all keys"):
        module(uneven)
    with pytest.raises(TypeError, match=r"module .Linear. must be a collection of quorem.integrations.torchrec"):
        integration.to_collection(torch.nn.Linear(1, 1))


def test_raw_and_unknown_ids_are_those_of_the_single_device() -> None:
    hot = quorem.HotCold(10, cold=quorem.QR(4, operation="add"), num_rest=9)
    tables = [
        quorem.Table("raw", 2**40, D, quorem.GeneralizedQR(4, operation="add"), raw_ids=True, padding_idx=-1),
        quorem.Table("rest", N, D, hot, unknown="rest", frequencies=FREQUENCIES),
        quorem.Table("cold", N, D, hot, unknown="hash", frequencies=FREQUENCIES),
        quorem.Table("hash", N, D, quorem.QR(4), unknown="hash"),
    ]
    source = quorem.EmbeddingCollection(tables, mode="sum")
    module = bags_of(source, tables)
    ids = torch.tensor([[-1, 5, 2**62, 59], [-1, 5, 60, 59], [-1, 5, 2**62, 59], [-9, 5, 2**62, 59]])
    lengths = torch.tensor([2, 2] * 4)
    batch = KeyedJaggedTensor(keys=["raw", "rest", "cold", "hash"], values=ids.flatten(), lengths=lengths)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    torch.testing.assert_close(module(batch).values().view(2, 4, D), source(ids.flatten(), offsets))
    back = integration.to_collection(module)
    assert (back.raw_ids, back.unknown, back.padding_ids) == (source.raw_ids, source.unknown, source.padding_ids)
    drawn = next(EmbeddingBagCollection(tables[:1]).parameters()).detach()
    assert 2**-11 < float(drawn.abs().max()) <= 2**-10  # as a full table of 2**20 ids, not of 2**40
