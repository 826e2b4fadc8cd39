"""quorem's tables as TorchRec's, in one process: every scheme, jagged oddities, ids out of range, errors."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quorem

pytest.importorskip("torchrec", reason="needs TorchRec: `make install`, or the line in docs/torchrec.md")

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from quorem.integrations import torchrec as integration
from quorem.integrations.torchrec import EmbeddingBagCollection, EmbeddingCollection, names, rows

N, D = oracles.N, 48  # every stored width has to be a multiple of 4
CASES = {name: scheme for name, scheme in oracles.CASES.items() if "dims" not in name}
CASES["qr-dims"] = quorem.QR(4, operation="concat", dims=(8, 40))
PERMUTED = quorem.QR(4, operation="add", permute=3)


FREQUENCIES = torch.randperm(N, generator=torch.Generator().manual_seed(0)) // 3
POOL = quorem.Pool(40, num_partitions=2)
HOT = {
    "hot-pool": quorem.HotCold(10, cold=POOL, num_rest=5),
    "hot-pool-ranked": quorem.HotCold(4, cold=POOL),
    "cold-pool": quorem.HotCold(0, cold=POOL),
    "hot-add": quorem.HotCold(10, cold=quorem.QR(4, operation="add", permute=1)),
    "hot-add-ranked": quorem.HotCold(10, cold=quorem.ChineseRemainder(2, operation="add"), num_rest=9),
    "hot-mult": quorem.HotCold(10, cold=quorem.QR(4), num_rest=20),
    "hot-mult-ranked": quorem.HotCold(10, cold=quorem.GeneralizedQR(3)),
    "hot-concat": quorem.HotCold(10, cold=quorem.QR(4, operation="concat"), num_rest=1),
    "hot-path-ranked": quorem.HotCold(10, cold=quorem.Path(4, (5,)), num_rest=3, force=True),
    "hot-only": quorem.HotCold(20, cold=quorem.Full(), num_rest=40),
}


def all_tables(pad: bool = True) -> list[quorem.Table]:
    """Every scheme and operation; every third table has a padding id, the last ones are read by two features."""
    schemes = {**CASES, "permuted": PERMUTED, **HOT}
    tables = [
        quorem.Table(
            name,
            N,
            D,
            scheme,
            padding_idx=7 if pad and i % 3 == 0 else None,
            frequencies=FREQUENCIES if "ranked" in name else None,
        )
        for i, (name, scheme) in enumerate(schemes.items())
    ]
    for name, scheme in {
        "add": PERMUTED,
        "mult": quorem.QR(4),
        "path": CASES["path-mlp"],
        "pool": HOT["hot-pool"],
    }.items():
        tables.append(quorem.Table(f"two-{name}", N, D, scheme, features=(f"{name}-x", f"{name}-y")))
    return tables


@pytest.fixture(params=[None, 3], ids=["tables", "shards"])
def shards(request: pytest.FixtureRequest) -> dict[str, int | None]:
    """A table of TorchRec's for each table, and all rows in three."""
    return {"num_shards": request.param}


def features_of(tables: list[quorem.Table]) -> list[str]:
    return [name for table in tables for name in table.features]


def collection_of(tables: list[quorem.Table], mode: str = "sum") -> quorem.EmbeddingCollection:
    made = quorem.EmbeddingCollection(tables, mode=mode)
    oracles.fill_(made)
    return made


def jagged(keys: list[str], batch: int, seed: int = 0, weighted: bool = False) -> KeyedJaggedTensor:
    """Zero to three ids in each bag, some of them the padding id."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(keys) * batch,), generator=draw)
    ids = torch.randint(0, N, (int(lengths.sum()),), generator=draw)
    ids[torch.rand(ids.shape, generator=draw) < 0.1] = 7
    weights = torch.rand(ids.shape, generator=draw) if weighted else None
    return KeyedJaggedTensor(keys, ids, lengths=lengths, weights=weights)


def expected(collection: quorem.EmbeddingCollection, features: KeyedJaggedTensor) -> Tensor:
    """What the single-device collection gives for the same ids, ``[B, sum D]``."""
    parts = [features[name] for name in collection.features]
    lengths = torch.cat([part.lengths() for part in parts])
    weights = None if features.weights_or_none() is None else torch.cat([part.weights() for part in parts])
    ids = torch.cat([part.values() for part in parts])
    return collection(ids, F.pad(lengths.cumsum(0), (1, 0)), weights).flatten(1)


def gradients(module: EmbeddingBagCollection | EmbeddingCollection) -> dict[str, Tensor]:
    """Gradients by quorem's names of the stored tables and the networks."""
    grads = {}
    for key, sizes in names.table_rows(module).items():
        grads.update(zip(sizes, module.get_parameter(key).grad.split(list(sizes.values())), strict=True))
    return grads | {name: p.grad for name, p in module.compose.named_parameters()}


def expected_gradients(collection: quorem.EmbeddingCollection) -> dict[str, Tensor]:
    stored = next(p for name, p in collection.named_parameters() if not name.startswith("paths."))
    networks = {name: p.grad for name, p in collection.named_parameters() if name.startswith("paths.")}
    return dict(collection.named_tables(stored.grad)) | networks


def assert_same(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(actual) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_of_every_scheme_equal_the_single_device_collection(mode: str, weighted: bool, shards: Any) -> None:
    tables = all_tables()
    collection = collection_of(tables, mode)
    module = integration.from_collection(collection, is_weighted=weighted, **shards)
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
    assert_same(gradients(module), expected_gradients(collection))
    for grad in grads:
        torch.testing.assert_close(features.weights().grad, grad, rtol=1e-5, atol=1e-5)


def test_vectors_of_every_scheme_equal_the_dense_tables(shards: Any) -> None:
    tables = all_tables()
    collection = collection_of(tables)
    module = EmbeddingCollection(tables, **shards)
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
    assert_same(gradients(module), expected_gradients(collection))


def test_bags_equal_embedding_bag_of_the_dense_table() -> None:
    tables = all_tables(pad=False)
    module = EmbeddingBagCollection(tables, mode="mean")
    dense = integration.to_collection(module).to_dense()
    features = jagged(features_of(tables), 3)
    out = module(features)
    for table in tables:
        for name in table.features:
            part = features[name]
            bags = F.embedding_bag(part.values(), dense[table.name].flatten(1), part.offsets()[:-1], mode="mean")
            torch.testing.assert_close(out[name], bags, rtol=1e-5, atol=1e-6, msg=name)


FEW = [
    quorem.Table("user", 100, 8, quorem.QR(4, operation="add")),
    quorem.Table("item", 90, 8, quorem.QR(4), padding_idx=3),
    quorem.Table("shop", 80, 8, quorem.QR(4, operation="concat")),
    quorem.Table("word", 70, 8, quorem.Path(4, (4,))),
    quorem.Table("day", 7, 8),
]
NAMES = [table.name for table in FEW]


@pytest.fixture
def few(shards: Any) -> tuple[quorem.EmbeddingCollection, EmbeddingBagCollection]:
    collection = collection_of(FEW)
    return collection, integration.from_collection(collection, **shards)


@pytest.mark.parametrize("lengths", [[0] * 10, [0, 2, 0, 0, 1, 1, 0, 0, 0, 3], [2, 2, 0, 0, 0, 0, 0, 0, 0, 0]])
def test_empty_features(lengths: list[int], few: Any) -> None:
    collection, module = few
    features = KeyedJaggedTensor(NAMES, torch.arange(sum(lengths)) % 7, lengths=torch.tensor(lengths))
    torch.testing.assert_close(module(features).values(), expected(collection, features), rtol=1e-5, atol=1e-6)


def test_an_empty_batch(few: Any, shards: Any) -> None:
    _, module = few
    empty = torch.zeros(0, dtype=torch.int64)
    out = module(KeyedJaggedTensor(NAMES, empty, lengths=empty, stride=0)).values()
    assert out.shape == (0, 40)
    out.sum().backward()
    vectors = EmbeddingCollection(FEW, **shards)(KeyedJaggedTensor(NAMES, empty, lengths=empty, stride=0))
    assert [v.values().shape for v in vectors.values()] == [(0, 8)] * 5


def test_keys_may_come_in_any_order_and_be_more(few: Any) -> None:
    collection, module = few
    keys = ["day", "unknown", "word", "user", "shop", "item"]
    lengths = torch.tensor([1, 2, 3, 1, 0, 2, 2, 0, 1, 1, 0, 1])
    features = KeyedJaggedTensor(keys, torch.arange(14) % 7, lengths=lengths)
    out = module(features)
    assert out.keys() == NAMES
    torch.testing.assert_close(out.values(), expected(collection, features), rtol=1e-5, atol=1e-6)


def test_int32_ids(few: Any) -> None:
    collection, module = few
    features = jagged(NAMES, 4)
    small = KeyedJaggedTensor(NAMES, features.values().int() % 7, lengths=features.lengths().int())
    torch.testing.assert_close(module(small).values(), expected(collection, small), rtol=1e-5, atol=1e-6)


def test_missing_keys_are_named(few: Any) -> None:
    _, module = few
    with pytest.raises(KeyError, match=re.escape("must have 'item', 'word'")):
        module(KeyedJaggedTensor(["user", "day", "shop"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int64)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [-1, 1000])
def test_ids_out_of_range_raise(name: str, bad: int, few: Any) -> None:
    _, module = few
    ids = torch.zeros(10, dtype=torch.int64)
    ids[2 * NAMES.index(name) + 1] = bad
    n = FEW[NAMES.index(name)].num_embeddings
    with pytest.raises(IndexError, match=re.escape(f"id {bad} is outside [0, {n}) of table {name}")):
        module(KeyedJaggedTensor(NAMES, ids, lengths=torch.ones(10, dtype=torch.int64)))


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ids on the CPU be treated as on a GPU."""
    monkeypatch.setattr(rows, "raises_at_once", lambda ids: False)


def test_ids_out_of_range_give_zeros_on_a_gpu(monkeypatch: pytest.MonkeyPatch, few: Any, shards: Any) -> None:
    on_a_gpu(monkeypatch)
    collection, module = few
    ids = torch.tensor([1, 100, -1, 2, 3, 80, 70, 5, 6, 7])
    features = KeyedJaggedTensor(NAMES, ids, lengths=torch.full((5,), 2))
    good = KeyedJaggedTensor(NAMES, torch.tensor([1, 2, 3, 5, 6]), lengths=torch.ones(5, dtype=torch.int64))
    with pytest.warns(UserWarning, match="5 ids out of range in table user, table item.*each gave a vector of zeros"):
        out = module(features)
    torch.testing.assert_close(out.values(), expected(collection, good), rtol=1e-5, atol=1e-6)
    with pytest.raises(IndexError, match="5 ids are out of range in table user"):
        EmbeddingBagCollection(FEW, on_invalid_id="raise", **shards)(features)
    vectors = EmbeddingCollection(FEW, on_invalid_id="trust", **shards)(features)
    assert [bool(vectors[name].values()[1].eq(0).all()) for name in NAMES] == [True, False, True, False, True]


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


def test_collections_convert_both_ways(shards: Any) -> None:
    collection = collection_of(all_tables(), "mean")
    back = integration.to_collection(integration.from_collection(collection, **shards))
    assert back.mode == "mean" and back.specs == collection.specs and back.padding == collection.padding
    for key, value in collection.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key
    unpooled = EmbeddingCollection(all_tables(), **shards)
    integration.copy_state_(unpooled, collection)
    again = integration.to_collection(unpooled).state_dict()
    assert all(torch.equal(again[key], value) for key, value in collection.state_dict().items())


def test_a_plan_becomes_tables_in_one_call() -> None:
    draw = torch.Generator().manual_seed(0)
    counts = {n: (1e4 / (1 + torch.arange(n))).long()[torch.randperm(n, generator=draw)] for n in (900, 500, 9)}
    tables = [quorem.Table(f"t{n}", n, 8, frequencies=count) for n, count in counts.items()]
    plan = quorem.plan(tables, "26kB", optimizer="adagrad")
    assert any(isinstance(getattr(scheme, "cold", None), quorem.Pool) for scheme in plan.values()), plan
    module = EmbeddingBagCollection(plan.applied_to(tables))
    collection = integration.to_collection(module)
    rows = collection.row_numbers(torch.stack([torch.arange(9)] * 3, 1))
    for f, table in enumerate(tables):
        part = KeyedJaggedTensor([t.name for t in tables], torch.arange(27) % 9, lengths=torch.ones(27).int())
        stored = torch.cat([collection.stored, torch.zeros(1, 8)])  # number -1 is no row
        torch.testing.assert_close(module(part)[table.name], stored[rows[:, f]].sum(1), rtol=1e-5, atol=1e-6)


def test_half_precision(shards: Any) -> None:
    collection = quorem.EmbeddingCollection(FEW, mode="sum", dtype=torch.float16)
    module = integration.from_collection(collection, **shards)
    features = KeyedJaggedTensor(NAMES, torch.arange(10) % 7, lengths=torch.full((5,), 2))
    out = module(features)
    for name, dense in collection.to_dense().items():
        wanted = dense.float()[features[name].values()].sum(0, keepdim=True)
        torch.testing.assert_close(out[name], wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        ([quorem.Table("a.b", 10, 8)], {}, "name ('a.b') must not contain '.'"),
        ([quorem.Table("a", 10, 6)], {}, "width (6) of table 'a' must be a multiple of 4"),
        ([quorem.Table("a", 90, 12, quorem.QR(4, operation="concat"))], {}, "width (6) of table 'a:0' must be a"),
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


def test_batches_that_do_not_fit_are_refused(few: Any) -> None:
    _, module = few
    ones = torch.ones(5, dtype=torch.int64)
    with pytest.raises(ValueError, match="features must have weights"):
        EmbeddingBagCollection(FEW, is_weighted=True)(KeyedJaggedTensor(NAMES, ones, lengths=ones))
    with pytest.raises(TypeError, match=r"features dtype .* must be torch.int32 or torch.int64"):
        module(KeyedJaggedTensor(NAMES, ones.float(), lengths=ones))
    uneven = KeyedJaggedTensor(NAMES, ones, lengths=ones, stride_per_key_per_rank=[[1], [1], [1], [2], [0]])
    with pytest.raises(ValueError, match="features must have one batch size for all keys"):
        module(uneven)
    with pytest.raises(TypeError, match=r"module .Linear. must be a collection of quorem.integrations.torchrec"):
        integration.to_collection(torch.nn.Linear(1, 1))


def test_the_install_line_of_the_document_is_that_of_the_makefile() -> None:
    root = Path(__file__).parents[1]
    (version,) = re.findall(r"^TORCHREC := (\S+)$", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    line = f'pip install "quorem[torchrec-cpu]" && pip install --no-deps {version} '
    assert line in (root / "docs" / "torchrec.md").read_text(encoding="utf-8")
    assert f"--no-deps {version}" in Path(integration.__file__).read_text(encoding="utf-8")


def test_docstrings() -> None:
    for info in pkgutil.iter_modules(integration.__path__, f"{integration.__name__}."):
        result = doctest.testmod(importlib.import_module(info.name), optionflags=doctest.NORMALIZE_WHITESPACE)
        assert result.failed == 0, info.name


def test_raw_and_unknown_ids_are_those_of_the_single_device(shards: Any) -> None:
    hot = quorem.HotCold(10, cold=quorem.QR(4, operation="add"), num_rest=9)
    tables = [
        quorem.Table("raw", 2**40, D, quorem.GeneralizedQR(4, operation="add"), raw_ids=True, padding_idx=-1),
        quorem.Table("rest", N, D, hot, unknown="rest", frequencies=FREQUENCIES),
        quorem.Table("cold", N, D, hot, unknown="hash", frequencies=FREQUENCIES),
        quorem.Table("hash", N, D, quorem.QR(4), unknown="hash"),
    ]
    source = quorem.EmbeddingCollection(tables, mode="sum")
    module = integration.from_collection(source, **shards)
    ids = torch.tensor([[-1, 5, 2**62, 59], [-1, 5, 60, 59], [-1, 5, 2**62, 59], [-9, 5, 2**62, 59]])
    lengths = torch.tensor([2, 2] * 4)
    batch = KeyedJaggedTensor(keys=["raw", "rest", "cold", "hash"], values=ids.flatten(), lengths=lengths)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    torch.testing.assert_close(module(batch).values().view(2, 4, D), source(ids.flatten(), offsets))
    back = integration.to_collection(module)
    assert (back.raw_ids, back.unknown, back.padding_ids) == (source.raw_ids, source.unknown, source.padding_ids)
    drawn = next(EmbeddingBagCollection(tables[:1]).parameters()).detach()
    assert 2**-11 < float(drawn.abs().max()) <= 2**-10  # as a full table of 2**20 ids, not of 2**40
