"""Exported ONNX graphs in ONNX Runtime against the modules they were made from, ids that no table has included."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hot_cold_cases import FEATURES, hot_and_cold, several_widths
from oracles import CASES, FEW, TOLERANCE, D, N, bags_by_torch, dense_by_hand, fill_, twin_of
from torch import Tensor, nn

from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, Full, GeneralizedQR, Table, quantize_
from quorem import Path as PathScheme
from quorem.models import DCN, DLRM, DeepFM
from quorem.serving.onnx_export import export_onnx
from quorem.serving.onnx_graph import OPSET

UNKNOWN = [-1, -N, -(2**63), N, N + 1, 2**31, 2**40, 2**62, 2**63 - 1]  # ids that a table of N ids does not have


def run(path: Path, **inputs: Tensor) -> dict[str, Tensor]:
    """The outputs of a model in ONNX Runtime, by name."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    results = session.run(names, {name: value.numpy() for name, value in inputs.items()})
    return {name: torch.from_numpy(np.asarray(values)) for name, values in zip(names, results, strict=True)}


def exported(model: nn.Module, path: Path, **options: object) -> Path:
    export_onnx(model, path, **options)
    onnx.checker.check_model(str(path), full_check=True)
    graph = onnx.load(str(path), load_external_data=False)
    assert [(opset.domain, opset.version) for opset in graph.opset_import] == [("", OPSET)]
    assert {node.domain for node in graph.graph.node} == {""}
    assert {weight.name for weight in graph.graph.initializer} <= {
        name for node in graph.graph.node for name in node.input
    }
    return path


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert actual.shape == expected.shape
    close = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=close, atol=close, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
def test_every_scheme_and_ids_that_it_does_not_have(case: str, tmp_path: Path) -> None:
    module = fill_(Embedding(N, D, replace(CASES[case], permute=2), padding_idx=7))
    path = exported(module, tmp_path / "table.onnx")
    known, unknown = torch.arange(N), torch.tensor(UNKNOWN)
    dense = dense_by_hand(twin_of(module))
    vectors = run(path, input=torch.cat([known, unknown]))["vectors"]
    assert_near(vectors[:N], dense)
    assert vectors[N:].isnan().all()
    assert run(path, input=known[:0])["vectors"].shape == (0, *dense.shape[1:])


@pytest.mark.parametrize("bits", [8, 4])
def test_every_scheme_in_few_bits(bits: int, tmp_path: Path) -> None:
    ids = torch.cat([torch.arange(N), torch.tensor(UNKNOWN)])
    for scheme in CASES.values():
        module = quantize_(fill_(Embedding(N, D, scheme, padding_idx=7)), bits)
        export_onnx(module, tmp_path / "table.onnx")
        vectors = run(tmp_path / "table.onnx", input=ids)["vectors"]
        assert_near(vectors[:N], module(ids[:N]))
        assert vectors[N:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", FEW)
def test_other_dtypes(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    module = fill_(Embedding(N, D, CASES[case], dtype=dtype))
    vectors = run(exported(module, tmp_path / "table.onnx"), input=torch.arange(N))["vectors"]
    assert vectors.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_near(vectors, dense_by_hand(twin_of(module)), torch.float64 if dtype == torch.float64 else torch.float32)


def test_unknown_ids_as_zeros(tmp_path: Path) -> None:
    module = fill_(Embedding(N, D, QR(4)))
    path = exported(module, tmp_path / "table.onnx", unknown="zeros")
    vectors = run(path, input=torch.tensor([*UNKNOWN, 3]))["vectors"]
    assert not vectors[:-1].any()
    assert_near(vectors[-1], module(torch.tensor(3)).detach())


IDS = torch.tensor([3, 3, 7, 59, 0, 1, 1, 7, 7, 12, 58, 33])
OFFSETS = torch.tensor([0, 4, 4, 7, 9, 11])  # an empty bag, one of padding only, and an id past the last offset
WEIGHTS = torch.linspace(-1, 2, len(IDS))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("case", FEW)
def test_jagged_bags(case: str, mode: str, tmp_path: Path) -> None:
    module = fill_(EmbeddingBag(N, D, CASES[case], mode=mode, padding_idx=7, include_last_offset=True))
    dense = dense_by_hand(twin_of(module)).float()
    counted = int(OFFSETS[-1])
    weights = None if mode == "max" else WEIGHTS[:counted]
    path = exported(module, tmp_path / "bag.onnx", jagged=True, sample_weights=weights is not None)
    inputs = {"input": IDS, "offsets": OFFSETS} | ({} if weights is None else {"per_sample_weights": WEIGHTS})
    expected = bags_by_torch(dense, IDS[:counted], OFFSETS, mode, weights, 7).detach()
    assert_near(run(path, **inputs)["vectors"], expected)
    plain = exported(module, tmp_path / "plain.onnx", jagged=True)
    expected = bags_by_torch(dense, IDS[:counted], OFFSETS, mode, None, 7).detach()
    assert_near(run(plain, input=IDS, offsets=OFFSETS)["vectors"], expected)
    nothing = run(plain, input=IDS[:0], offsets=torch.tensor([0, 0, 0]))["vectors"]
    assert nothing.shape[0] == 2 and not nothing.any()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_length(mode: str, tmp_path: Path) -> None:
    module = fill_(EmbeddingBag(N, D, QR(4, operation="feature"), mode=mode, padding_idx=7))
    path = exported(module, tmp_path / "bag.onnx")
    assert_near(run(path, input=IDS.view(4, 3))["vectors"], module(IDS.view(4, 3)).detach())
    assert_near(run(path, input=IDS[:0].view(2, 0))["vectors"], module(IDS[:0].view(2, 0)).detach())
    if mode != "max":
        path = exported(module, tmp_path / "bag.onnx", sample_weights=True)
        inputs = {"input": IDS.view(4, 3), "per_sample_weights": WEIGHTS.view(4, 3)}
        assert_near(run(path, **inputs)["vectors"], module(IDS.view(4, 3), None, WEIGHTS.view(4, 3)).detach())


def test_offsets_without_the_last(tmp_path: Path) -> None:
    module = fill_(EmbeddingBag(N, D, QR(4), mode="sum"))
    path = exported(module, tmp_path / "bag.onnx", jagged=True)
    assert_near(run(path, input=IDS, offsets=OFFSETS)["vectors"], module(IDS, OFFSETS).detach())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_an_unknown_id_in_a_bag(mode: str, tmp_path: Path) -> None:
    """By default it makes its bag NaN, and no other; as zeros it is left out, as on a GPU."""
    module = fill_(EmbeddingBag(N, D, QR(4), mode=mode, padding_idx=7, include_last_offset=True))
    ids = torch.tensor([3, N, 5, 6, -1, 7, 9])
    offsets = torch.tensor([0, 2, 4, 5, 7])
    path = exported(module, tmp_path / "bag.onnx", jagged=True)
    vectors = run(path, input=ids, offsets=offsets)["vectors"]
    expected = module(torch.tensor([3, 5, 6, 7, 9]), torch.tensor([0, 1, 3, 3, 5])).detach()
    assert vectors[[0, 2]].isnan().all()
    assert_near(vectors[[1, 3]], expected[[1, 3]])
    path = exported(module, tmp_path / "bag.onnx", jagged=True, unknown="zeros")
    assert_near(run(path, input=ids, offsets=offsets)["vectors"], expected)


def tables(width: int = D) -> list[Table]:
    """Groups of several tables, in an order that the groups do not have."""
    return [
        Table("user", N, D, QR(4)),
        Table("day", 7, width),
        Table("item", 45, D, QR(3, permute=1), padding_idx=2),
        Table("path", N, D, CASES["path-mlp"]),
        Table("words", 10**12, D, GeneralizedQR(4)),
        Table("car", N, width, CASES["explicit"]),
        Table("hour", 24, width, Full(permute=3), padding_idx=0),
        Table("other path", 44, D, PathScheme(4, hidden=(5,), force=True)),
        Table("parts", N, D, CASES["qr-feature"]),
    ]


SIZES = torch.tensor([table.num_embeddings for table in tables()])


def batch(rows: int = 33) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return (torch.rand(rows, len(SIZES), generator=draw, dtype=torch.float64) * SIZES).long()


@pytest.mark.parametrize("width", [D, 5])
def test_collections(width: int, tmp_path: Path) -> None:
    module = fill_(EmbeddingCollection(tables(width)))
    path = exported(module, tmp_path / "tables.onnx")
    ids = batch()
    assert_near(run(path, ids=ids)["vectors"], module(ids).detach())
    assert_near(run(path, ids=ids[:1])["vectors"], module(ids[:1]).detach())
    last = 0
    for feature, dims in enumerate([spec.embedding_dim * spec.num_vectors for spec in module.specs]):
        for wrong in (-1, int(SIZES[feature]), 2**62):
            changed = ids[:2].clone()
            changed[0, feature] = wrong
            vectors = run(path, ids=changed)["vectors"].flatten(1)
            nan = torch.zeros_like(vectors, dtype=torch.bool)
            nan[0, last : last + dims] = True
            assert torch.equal(vectors.isnan(), nan)
        last += dims


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_jagged_collections(mode: str, tmp_path: Path) -> None:
    module = fill_(EmbeddingCollection(tables(), mode=mode))
    lengths = torch.arange(4 * len(SIZES)) % 4  # 4 rows
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    sizes = SIZES.repeat_interleave(4).repeat_interleave(lengths)
    ids = (torch.rand(len(sizes), generator=torch.Generator().manual_seed(2), dtype=torch.float64) * sizes).long()
    path = exported(module, tmp_path / "tables.onnx", jagged=True)
    assert_near(run(path, ids=ids, offsets=offsets)["vectors"], module(ids, offsets).detach())
    path = exported(module, tmp_path / "tables.onnx", jagged=True, sample_weights=True)
    weights = torch.linspace(-1, 1, len(ids))
    vectors = run(path, ids=ids, offsets=offsets, per_sample_weights=weights)["vectors"]
    assert_near(vectors, module(ids, offsets, weights).detach())


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_hot_and_cold_ids(bits: int, tmp_path: Path) -> None:
    module = hot_and_cold(bits, mode="sum")
    path = exported(module, tmp_path / "tables.onnx")
    ids = torch.arange(N)[:, None].expand(N, FEATURES)  # every id of every table
    vectors = run(path, ids=ids.contiguous())["vectors"]
    assert_near(vectors, module(ids).detach())
    for wrong in UNKNOWN:
        assert run(path, ids=torch.full((2, FEATURES), wrong))["vectors"].isnan().all()
    path = exported(module, path, jagged=True)
    offsets = torch.arange(0, N * FEATURES + 1, 3)
    values = ids.T.reshape(-1)
    assert_near(run(path, ids=values, offsets=offsets)["vectors"], module(values, offsets).detach())
    stored = [len(table) for name, table in module.named_tables() if name.startswith("pools.")]
    weights = {w.name: w for w in onnx.load(str(path)).graph.initializer}
    suffix = "_codes" if bits else ""
    assert [weights[f"pool_pool_{j}{suffix}"].dims[0] for j in (0, 1)] == stored  # shared, and there once


def raw_tables() -> EmbeddingCollection:
    tables = [
        Table("user", 2**62, D, GeneralizedQR(5), raw_ids=True, padding_idx=-5),
        Table("day", 7, D),
        Table("item", 2**40, D, GeneralizedQR(4), raw_ids=True),
        Table("word", 1000, D, QR(4), raw_ids=True),
    ]
    return fill_(EmbeddingCollection(tables))


def test_raw_ids(tmp_path: Path) -> None:
    module = raw_tables()
    path = exported(module, tmp_path / "tables.onnx")
    raw = torch.tensor([*UNKNOWN, -5, 0, 7])
    ids = torch.stack([raw, raw.remainder(7), raw, raw], 1)
    vectors = run(path, ids=ids)["vectors"]
    assert_near(vectors, module(ids).detach())
    assert vectors.isfinite().all() and not vectors[len(UNKNOWN), 0].any()
    path = exported(module, path, jagged=True)
    offsets = torch.arange(0, ids.numel() + 1, 2)
    assert_near(run(path, ids=ids.T.flatten(), offsets=offsets)["vectors"], module(ids.T.flatten(), offsets).detach())


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_rows_of_several_widths(bits: int, tmp_path: Path) -> None:
    module = several_widths(bits)
    path = exported(module, tmp_path / "tables.onnx")
    ids = torch.arange(N)[:, None].expand(N, 5).contiguous()
    for count in (N, 1, 0):
        assert_near(run(path, ids=ids[:count])["vectors"], module(ids[:count]).detach())
    module = quantize_(fill_(EmbeddingBag(N, D, QR(4), mode="max", padding_idx=7, include_last_offset=True)), bits)
    path = exported(module, tmp_path / "bag.onnx", jagged=True)
    assert_near(run(path, input=IDS, offsets=OFFSETS)["vectors"], module(IDS, OFFSETS).detach())


NETWORKS = {
    "dlrm": lambda module: DLRM(module, num_dense=3, bottom=(8, 4), top=(6,)),
    "dlrm-raw": lambda module: DLRM(module, num_dense=3, bottom=(), top=(6, 5), raw_dense=True),
    "dlrm-no-dense": lambda module: DLRM(module, num_dense=0, top=(6,)),
    "dcn": lambda module: DCN(module, num_dense=3, deep=(7, 5), num_cross=3),
    "dcn-one": lambda module: DCN(module, num_dense=0, deep=(7,), num_cross=1),
    "deepfm": lambda module: DeepFM(module, num_dense=3, deep=(7, 5)),
    "deepfm-no-dense": lambda module: DeepFM(module, num_dense=0, deep=(7,)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = NETWORKS[name](EmbeddingCollection(tables()))
    if isinstance(model, DCN):
        nn.init.normal_(model.cross_bias)
    path = exported(model, tmp_path / "model.onnx")
    ids, dense = batch(), torch.rand(33, model.num_dense)
    outputs = run(path, dense=dense, ids=ids)
    assert_near(outputs["logits"], model(dense, ids).detach())
    assert_near(outputs["probabilities"], model(dense, ids).sigmoid().detach())
    for count in (1, 0):
        logits = run(path, dense=dense[:count], ids=ids[:count])["logits"]
        assert_near(logits, model(dense[:count], ids[:count]).detach())
    ids[3, 0] = N  # the score of a row with an unknown id cannot be taken for one
    logits = run(path, dense=dense, ids=ids)["logits"]
    assert logits.isnan().nonzero().flatten().tolist() == [3]


def test_networks_in_half_precision_and_jagged(tmp_path: Path) -> None:
    model = DLRM(fill_(EmbeddingCollection(tables(), dtype=torch.bfloat16)), num_dense=3, bottom=(8,), top=(6,))
    path = exported(model, tmp_path / "model.onnx", jagged=True)
    ids, dense = batch(4), torch.rand(4, 3)
    offsets = torch.arange(ids.numel() + 1)
    logits = run(path, dense=dense, ids=ids.T.flatten(), offsets=offsets)["logits"]
    twin = twin_of(model.embeddings)
    vectors = twin(ids).float()
    assert_near(logits, model.logits(dense, vectors).detach())


def test_a_network_around_a_single_table(tmp_path: Path) -> None:
    for model in (DLRM, DCN):
        network = model(Embedding(N, D, QR(4)), num_dense=2, embedding_dims=(D, D))
        path = exported(network, tmp_path / "model.onnx")
        ids, dense = torch.randint(0, N, (5, 2)), torch.rand(5, 2)
        assert_near(run(path, dense=dense, input=ids)["logits"], network(dense, ids).detach())


def test_weights_in_a_file_beside_it(tmp_path: Path) -> None:
    module = fill_(EmbeddingCollection(tables()))
    path = exported(module, tmp_path / "tables.onnx", external_bytes=1000)
    (data,) = tmp_path.glob("tables.onnx.*.data")
    assert path.stat().st_size < 20_000 < data.stat().st_size
    ids = batch()
    assert_near(run(path, ids=ids)["vectors"], module(ids).detach())
    with torch.no_grad():
        module.stored.mul_(2)
    exported(module, path, external_bytes=1000)  # the old data file goes, and only then
    (other,) = tmp_path.glob("tables.onnx.*.data")
    assert other != data
    assert_near(run(path, ids=ids)["vectors"], module(ids).detach())
    exported(module, path)
    assert [p.name for p in tmp_path.iterdir()] == ["tables.onnx"]


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    table, bag = Embedding(N, D, QR(4)), EmbeddingBag(N, D, QR(4), mode="max")
    with pytest.raises(ValueError, match=r"unknown \('error'\) must be 'nan' or 'zeros'"):
        export_onnx(table, tmp_path / "a.onnx", unknown="error")
    with pytest.raises(ValueError, match=r"jagged \(True\) must be False for Embedding, which does not pool"):
        export_onnx(table, tmp_path / "a.onnx", jagged=True)
    for module in (table, bag, EmbeddingCollection(tables())):
        with pytest.raises(ValueError, match=r"sample_weights \(True\) must be False"):
            export_onnx(module, tmp_path / "a.onnx", sample_weights=True)
    with pytest.raises(TypeError, match=r"model \(Linear\) must be an Embedding"):
        export_onnx(nn.Linear(2, 2), tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())
