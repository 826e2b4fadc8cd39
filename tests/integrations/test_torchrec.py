"""quorem's tables as TorchRec's, in one process: every scheme equals the single-device collection."""

import re

import oracles
import pytest
import torch
from torch import Tensor

import quorem

pytest.importorskip("torchrec", reason="needs TorchRec: `make install`, or the line in docs/torchrec.md")

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_tables import FEW, FREQUENCIES, NAMES, D, N, bags_of, collection_of, expected, features_of, few, jagged

from quorem.integrations import torchrec as integration
from quorem.integrations.torchrec import EmbeddingBagCollection, EmbeddingCollection, rows

CASES = {name: scheme for name, scheme in oracles.CASES.items() if "dims" not in name}
CASES["qr-dims"] = quorem.QR(4, operation="concat", dims=(8, 40))
NARROW = {
    "narrow-full": quorem.Full(width=12),
    "narrow-add": quorem.QR(4, operation="add", width=12),
    "narrow-mult": quorem.QR(4, width=12),
    "narrow-concat": quorem.QR(4, operation="concat", width=24),
    "narrow-path": quorem.Path(4, (5,), width=12, force=True),
    "narrow-pool-ranked": quorem.HotCold(10, cold=quorem.Pool(40), num_rest=5, width=12),
}


POOL = quorem.Pool(40, num_partitions=2)
HOT = {
    "hot-pool": quorem.HotCold(10, cold=POOL, num_rest=5),
    "hot-pool-ranked": quorem.HotCold(4, cold=POOL),
    "cold-pool": quorem.HotCold(0, cold=POOL),
    "hot-add": quorem.HotCold(10, cold=quorem.QR(4, operation="add")),
    "hot-add-ranked": quorem.HotCold(10, cold=quorem.ChineseRemainder(2, operation="add"), num_rest=9),
    "hot-mult": quorem.HotCold(10, cold=quorem.QR(4), num_rest=20),
    "hot-mult-ranked": quorem.HotCold(10, cold=quorem.GeneralizedQR(3)),
    "hot-concat": quorem.HotCold(10, cold=quorem.QR(4, operation="concat"), num_rest=1),
    "hot-path-ranked": quorem.HotCold(10, cold=quorem.Path(4, (5,)), num_rest=3, force=True),
    "hot-only": quorem.HotCold(20, cold=quorem.Full(), num_rest=40),
}


def all_tables() -> list[quorem.Table]:
    """Every scheme and operation; every third table has a padding id, the last ones are read by two features."""
    schemes = {**CASES, "sums": quorem.QR(4, operation="add"), **HOT, **NARROW}
    tables = []
    for i, (name, scheme) in enumerate(schemes.items()):
        padding_idx, frequencies = 7 if i % 3 == 0 else None, FREQUENCIES if "ranked" in name else None
        tables.append(quorem.Table(name, N, D, scheme, padding_idx, frequencies=frequencies))
    for name in ("sums", "qr-mult", "path-mlp", "hot-pool", "narrow-add"):
        tables.append(quorem.Table(f"two-{name}", N, D, schemes[name], features=(f"{name}-x", f"{name}-y")))
    return tables


def gradients(module: EmbeddingBagCollection | EmbeddingCollection) -> dict[str, Tensor]:
    """Gradients by quorem's names of the stored tables and the networks."""
    grads = {}
    for key, parts in module.parts_of_weights().items():
        rows = module.get_parameter(key).grad.split([part.num_rows for part in parts])
        grads |= {part.name: grad for part, grad in zip(parts, rows, strict=True)}
    return grads | {name: p.grad for name, p in module.compose.named_parameters()}


def expected_gradients(collection: quorem.EmbeddingCollection) -> dict[str, Tensor]:
    others = {name: p.grad for name, p in collection.named_parameters() if name != "stored"}
    return dict(collection.named_tables(collection.stored.grad)) | others


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_of_every_scheme_equal_the_single_device_collection(mode: str, weighted: bool) -> None:
    tables = all_tables()
    collection = collection_of(tables, mode)
    module = bags_of(collection, tables, is_weighted=weighted)
    features = jagged(features_of(tables), 5, weighted=weighted)
    if weighted:
        features.weights().requires_grad_()
    out, wanted = module(features), expected(collection, features)
    assert out.keys() == features_of(tables)
    torch.testing.assert_close(out.values(), wanted, rtol=1e-5, atol=1e-5)
    slope = torch.randn(wanted.shape)
    grads = torch.autograd.grad((wanted * slope).sum(), features.weights(), retain_graph=True) if weighted else ()
    (wanted * slope).sum().backward()
    if weighted:
        features.weights().grad = None
    (out.values() * slope).sum().backward()
    torch.testing.assert_close(gradients(module), expected_gradients(collection), rtol=1e-5, atol=1e-5)
    for grad in grads:
        torch.testing.assert_close(features.weights().grad, grad, rtol=1e-5, atol=1e-5)


def test_vectors_of_every_scheme_equal_the_dense_tables() -> None:
    tables = all_tables()
    collection = collection_of(tables)
    module = EmbeddingCollection(tables)
    integration.copy_state_(module, collection)
    features = jagged(features_of(tables), 5)
    out = module(features)
    assert list(out) == features_of(tables)
    total = torch.zeros(())
    for name, t in zip(collection.features, collection.table_of, strict=True):
        part = features[name]
        wanted = collection.dense(t).flatten(1)[part.values()]
        torch.testing.assert_close(out[name].values(), wanted, rtol=1e-5, atol=1e-5, msg=name)
        assert torch.equal(out[name].lengths(), part.lengths())
        slope = torch.randn(wanted.shape)
        (wanted * slope).sum().backward()
        total = total + (out[name].values() * slope).sum()
    total.backward()
    torch.testing.assert_close(gradients(module), expected_gradients(collection), rtol=1e-5, atol=1e-5)


def test_tables_are_drawn_as_the_single_device_collection() -> None:
    schemes = {op: quorem.QR(100, operation=op) for op in ("add", "mult", "concat")}
    schemes |= {"full": quorem.Full(), "path": quorem.Path(4, ())}
    tables = [quorem.Table(name, 10_000, 16, scheme) for name, scheme in schemes.items()]
    torch.manual_seed(0)
    made = dict(integration.to_collection(EmbeddingBagCollection(tables)).named_tables())
    for name, table in quorem.EmbeddingCollection(tables).named_tables():
        low, high = table.min().item(), table.max().item()
        slack = 0.1 * (high - low)
        assert made[name].min() > low - slack and made[name].max() < high + slack, name
        assert made[name].std().item() == pytest.approx(table.std().item(), rel=0.2), name  # of 800 numbers or more


def test_collections_convert_both_ways() -> None:
    collection = collection_of(all_tables(), "mean")
    back = integration.to_collection(bags_of(collection, all_tables()))
    assert back.mode == "mean" and back.specs == collection.specs and back.padding == collection.padding
    torch.testing.assert_close(back.state_dict(), collection.state_dict(), rtol=0, atol=0)
    unpooled = EmbeddingCollection(all_tables())
    integration.copy_state_(unpooled, collection)
    again = integration.to_collection(unpooled).state_dict()
    torch.testing.assert_close(again, collection.state_dict(), rtol=0, atol=0)


def test_a_plan_becomes_tables_in_one_call() -> None:
    draw = torch.Generator().manual_seed(0)
    counts = {n: (1e4 / (1 + torch.arange(n))).long()[torch.randperm(n, generator=draw)] for n in (900, 500, 9)}
    tables = [quorem.Table(f"t{n}", n, 8, frequencies=count) for n, count in counts.items()]
    plan = quorem.plan(tables, "18kB", optimizer="adagrad", row_multiple=4)
    assert any(isinstance(getattr(scheme, "cold", None), quorem.Pool) for scheme in plan.values()), plan
    module = EmbeddingBagCollection(plan.applied_to(tables))
    collection = integration.to_collection(module)
    features = KeyedJaggedTensor([t.name for t in tables], torch.arange(27) % 9, lengths=torch.ones(27).int())
    torch.testing.assert_close(module(features).values(), expected(collection, features), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"width \(2\) of tables.* for a plan, give row_multiple=4"):
        EmbeddingBagCollection([quorem.Table("user", 100, 8, quorem.Full(width=2))])


def test_half_precision() -> None:
    collection = quorem.EmbeddingCollection(FEW, mode="sum", dtype=torch.float16)
    module = bags_of(collection, FEW, dtype=torch.float16)
    features = KeyedJaggedTensor(NAMES, torch.arange(10) % 7, lengths=torch.full((5,), 2))
    out = module(features)
    for name, dense in collection.to_dense().items():
        wanted = dense.float()[features[name].values()].sum(0, keepdim=True)
        torch.testing.assert_close(out[name], wanted, rtol=1e-2, atol=1e-3)


def test_the_planner_is_told_how_many_rows_a_sample_reads() -> None:
    bags = EmbeddingBagCollection([quorem.Table("user", 100_000, 16, quorem.QR(4, operation="add"))], num_shards=1)
    few, many = (
        integration.constraints(bags, batch_size=64, ids_per_sample={"user": n})["rows16:0"].pooling_factors[0]
        for n in (1, 3)
    )
    assert 0 < few < many < 6  # two rows for each id, of which the remainder's repeat
    with pytest.raises(ValueError, match="ids_per_sample names 'usr' but must name features of the model"):
        integration.constraints(bags, batch_size=64, ids_per_sample={"usr": 3})


def test_weights_are_copied_only_between_the_same_tables() -> None:
    tables = [quorem.Table("user", 100, 8, quorem.QR(4)), quorem.Table("day", 7, 8)]
    target = EmbeddingBagCollection(tables)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(ValueError, match=r"source must have tables\.day\.0"):
        integration.copy_state_(target, EmbeddingBagCollection(tables[:1]))
    for scheme in (quorem.QR(2), quorem.QR(4, operation="add")):
        source = EmbeddingBagCollection([quorem.Table("user", 100, 8, scheme), tables[1]])
        with pytest.raises(ValueError, match="differs: the tables must have the same sizes, partitions and operations"):
            integration.copy_state_(target, source)
        with pytest.raises(ValueError, match="must be tables of the same names, sizes, partitions and operations"):
            target.load_state_dict(source.state_dict(), strict=False)
    assert all(value.equal(before[name]) for name, value in target.state_dict().items())


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
