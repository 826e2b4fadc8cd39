"""Exported ONNX graphs in ONNX Runtime against the modules they were made from, ids that no table has included."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hot_cold_cases import COUNTS
from oracles import CASES, FEW, D, N, assert_near, bags_by_torch, dense_by_hand, fill_, twin_of
from torch import Tensor, nn

import quorem
from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, HotCold, Pool, Table, export, quantize_
from quorem.models import DCN, DLRM
from quorem.modules.tied import TiedLinear
from quorem.serving.export import export_named

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
    export_named(model, path, **options)
    onnx.checker.check_model(str(path), full_check=True)
    graph = onnx.load(str(path), load_external_data=False)
    assert [opset.domain for opset in graph.opset_import] == [""] and not graph.functions
    assert {node.domain for node in graph.graph.node} == {""}
    assert {weight.name for weight in graph.graph.initializer} <= {
        name for node in graph.graph.node for name in node.input
    }
    return path


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_schemes_and_ids_that_they_do_not_have(bits: int, tmp_path: Path) -> None:
    """One of each kind; test_torch_export.py has every scheme in the operators that are exported."""
    names = FEW if bits == 0 else ("qr-mult", "qr-feature")
    tables = [Table(name, N, D, CASES[name], padding_idx=7) for name in names]
    module = fill_(EmbeddingCollection(tables))
    expected = torch.cat([dense_by_hand(twin_of(module), t).flatten(1) for t in range(len(tables))], 1)
    if bits:
        quantize_(module, bits)
        expected = module(torch.arange(N)[:, None].expand(N, len(tables))).flatten(1)
    path = exported(module, tmp_path / "tables.onnx")
    ids = torch.cat([torch.arange(N), torch.tensor(UNKNOWN)])[:, None].expand(-1, len(tables)).contiguous()
    vectors = run(path, ids=ids)["vectors"].flatten(1)
    assert_near(vectors[:N], expected)
    assert vectors[N:].isnan().all()
    assert run(path, ids=ids[:0])["vectors"].shape[0] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Vectors have the dtype of the module; those in bfloat16, which numpy has not, are seen in a network."""
    tables = [Table(name, N, D, CASES[name]) for name in FEW if name != "path-mlp"]
    module = fill_(EmbeddingCollection(tables, dtype=dtype))
    ids = torch.arange(N)[:, None].expand(N, len(tables)).contiguous()
    if dtype == torch.bfloat16:
        model, dense = DCN(module, num_dense=0, deep=(7,), num_cross=1, dtype=torch.float64), torch.empty(N, 0)
        logits = run(exported(model, tmp_path / "model.onnx"), dense=dense, ids=ids)["logits"]
        assert_near(logits, model(dense.double(), ids).detach(), torch.float64)
    else:
        vectors = run(exported(module, tmp_path / "tables.onnx"), ids=ids)["vectors"]
        assert vectors.dtype == dtype
        assert_near(vectors, module(ids).detach(), dtype)


IDS = torch.tensor([3, 3, 7, 59, 0, 1, 1, 7, 7, 12, 58, 33])
OFFSETS = torch.tensor([0, 4, 4, 7, 9, 11])  # an empty bag, one of padding only, and an id past the last offset
WEIGHTS = torch.linspace(-1, 2, len(IDS))


@pytest.mark.parametrize(("case", "mode"), [("qr-mult", "sum"), ("path-mlp", "mean")])
def test_jagged_bags(case: str, mode: str, tmp_path: Path) -> None:
    module = fill_(EmbeddingBag(N, D, CASES[case], mode=mode, padding_idx=7, include_last_offset=True))
    dense = dense_by_hand(twin_of(module)).float()
    counted = int(OFFSETS[-1])
    weighted = tmp_path / "weighted.onnx"
    export(module, (IDS, OFFSETS, WEIGHTS), weighted, output_names=["vectors"])
    inputs = {"input": IDS, "offsets": OFFSETS, "per_sample_weights": WEIGHTS}
    expected = bags_by_torch(dense, IDS[:counted], OFFSETS, mode, WEIGHTS[:counted], 7).detach()
    assert_near(run(weighted, **inputs)["vectors"], expected)
    path = exported(module, tmp_path / "bag.onnx", jagged=True)
    expected = bags_by_torch(dense, IDS[:counted], OFFSETS, mode, None, 7).detach()
    assert_near(run(path, input=IDS, offsets=OFFSETS)["vectors"], expected)
    nothing = run(path, input=IDS[:0], offsets=torch.tensor([0, 0, 0]))["vectors"]
    assert nothing.shape[0] == 2 and not nothing.any()


def test_bags_of_one_length(tmp_path: Path) -> None:
    module = fill_(EmbeddingBag(N, D, QR(4, operation="feature"), mode="mean", padding_idx=7))
    path = exported(module, tmp_path / "bag.onnx")
    assert_near(run(path, input=IDS.view(4, 3))["vectors"], module(IDS.view(4, 3)).detach())
    assert_near(run(path, input=IDS[:0].view(2, 0))["vectors"], module(IDS[:0].view(2, 0)).detach())


def test_an_unknown_id_in_a_bag(tmp_path: Path) -> None:
    """By default it makes its bag NaN, and no other; as zeros it is left out, as on a GPU."""
    module = fill_(EmbeddingBag(N, D, QR(4), mode="mean", padding_idx=7, include_last_offset=True))
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
        Table("item", 45, D, QR(3), padding_idx=2),
        Table("path", N, D, CASES["path-mlp"]),
        Table("words", 10**12, D, quorem.GeneralizedQR(4)),
        Table("car", N, width, CASES["explicit"]),
        Table("hour", 24, width, quorem.Full(), padding_idx=0),
        Table("other path", 44, D, quorem.Path(4, hidden=(5,), force=True)),
        Table("parts", N, D, CASES["qr-feature"]),
    ]


SIZES = torch.tensor([table.num_embeddings for table in tables()])


def batch(rows: int = 33) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return (torch.rand(rows, len(SIZES), generator=draw, dtype=torch.float64) * SIZES).long()


def test_collections_of_several_widths(tmp_path: Path) -> None:
    module = fill_(EmbeddingCollection(tables(5)))
    path = exported(module, tmp_path / "tables.onnx")
    ids = batch()
    for rows in (33, 1):
        assert_near(run(path, ids=ids[:rows])["vectors"], module(ids[:rows]).detach())
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


def test_offsets_and_rows_that_are_not_finite(tmp_path: Path) -> None:
    """Padding is not read, whatever its rows hold."""
    some = [Table("user", N, D, QR(4), padding_idx=7), Table("day", 9, D), Table("item", N, D, QR(3))]
    module = fill_(EmbeddingCollection(some, mode="sum"))
    with torch.no_grad():
        module.tables(0)[0][7] = torch.inf
    path, ids = exported(module, tmp_path / "tables.onnx", jagged=True), torch.arange(1, 9)
    for right in ([0, 1, 2, 3, 5, 6, 7], [0, 3, 3, 8], [0]):  # the last has no rows
        vectors = run(path, ids=ids, offsets=torch.tensor(right))["vectors"]
        assert_near(vectors, module(ids, torch.tensor(right)).detach())
    zeros = run(path, ids=torch.tensor([7, 3, 5]), offsets=torch.arange(4))["vectors"][0, 0]
    assert torch.equal(zeros, torch.zeros(D))
    with pytest.raises(Exception, match="out of data bounds"):
        run(path, ids=ids, offsets=torch.tensor([0, 1, 2, 9]))


@pytest.mark.parametrize("bits", [0, 4])
def test_bags_of_hot_and_cold_ids(bits: int, tmp_path: Path) -> None:
    """Two kinds; test_torch_export.py has the others in the operators that are exported."""
    schemes = [HotCold(5, cold=Pool(40), num_rest=10), HotCold(4, cold=QR(4), num_rest=11, force=True)]
    some = [Table(str(i), N, D, scheme, frequencies=COUNTS) for i, scheme in enumerate(schemes)]
    module = fill_(EmbeddingCollection(some, mode="sum"))
    module = quantize_(module, bits) if bits else module
    path = exported(module, tmp_path / "tables.onnx", jagged=True)
    values, offsets = torch.arange(N).repeat(2), torch.arange(0, 2 * N + 1, 3)
    assert_near(run(path, ids=values, offsets=offsets)["vectors"], module(values, offsets).detach())
    weights = [tuple(weight.dims) for weight in onnx.load(str(path)).graph.initializer]
    assert weights.count(tuple(module.stored.shape)) == 1  # every row is there once
    assert sum(sizes == (31744, 1) for sizes in weights) == bool(bits)  # the scales, too


def test_a_tied_head_gives_its_padding_id_zero(tmp_path: Path) -> None:
    table = fill_(Embedding(N, D, QR(4, operation="add"), padding_idx=7))
    export(TiedLinear(table), (torch.ones(3, D),), tmp_path / "head.onnx", output_names=["scores"])
    queries = torch.randn(5, D)
    assert_near(run(tmp_path / "head.onnx", input=queries)["scores"], queries @ table.weight.detach().T)


@pytest.mark.parametrize("width", [None, 4])
def test_a_tied_head_in_few_bits(width: int | None, tmp_path: Path) -> None:
    """Sums of rows are scored by products with all rows."""
    scheme = HotCold(5, cold=Pool(40), num_rest=10, width=width, force=True)
    embedding = quantize_(fill_(Embedding(N, D, scheme)), 8)
    model, path = nn.Sequential(embedding, TiedLinear(embedding)), tmp_path / "model.onnx"
    export(model, (IDS,), path, output_names=["scores"])
    assert_near(run(path, input=IDS)["scores"], model(IDS).detach())


def test_raw_ids(tmp_path: Path) -> None:
    tables = [
        Table("user", 2**62, D, quorem.GeneralizedQR(5), raw_ids=True, padding_idx=-5),
        Table("day", 7, D),
        Table("item", 2**40, D, quorem.GeneralizedQR(4), raw_ids=True),
        Table("word", 1000, D, QR(4), raw_ids=True),
    ]
    module = fill_(EmbeddingCollection(tables))
    path = exported(module, tmp_path / "tables.onnx")
    raw = torch.tensor([*UNKNOWN, -5, 0, 7])
    ids = torch.stack([raw, raw.remainder(7), raw, raw], 1)
    vectors = run(path, ids=ids)["vectors"]
    assert_near(vectors, module(ids).detach())
    assert vectors.isfinite().all() and not vectors[len(UNKNOWN), 0].any()
    path = exported(module, path, jagged=True)
    offsets = torch.arange(0, ids.numel() + 1, 2)
    assert_near(run(path, ids=ids.T.flatten(), offsets=offsets)["vectors"], module(ids.T.flatten(), offsets).detach())


NETWORKS = {
    "dlrm": lambda module: DLRM(module, num_dense=3, bottom=(8, 4), top=(6,)),
    "dcn": lambda module: DCN(module, num_dense=3, deep=(7, 5), num_cross=3),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = NETWORKS[name](EmbeddingCollection(tables()[:3]))
    if isinstance(model, DCN):
        nn.init.normal_(model.cross_bias)
    path = exported(model, tmp_path / "model.onnx")
    ids, dense = batch()[:, :3].contiguous(), torch.rand(33, model.num_dense)
    for count in (33, 1, 0):
        outputs, expected = run(path, dense=dense[:count], ids=ids[:count]), model(dense[:count], ids[:count]).detach()
        assert_near(outputs["logits"], expected)
        assert_near(outputs["probabilities"], expected.sigmoid())
    ids[3, 0] = N  # the score of a row with an unknown id cannot be taken for one
    logits = run(path, dense=dense, ids=ids)["logits"]
    assert logits.isnan().nonzero().flatten().tolist() == [3]


def test_weights_in_a_file_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorem.serving.export.EXTERNAL_BYTES", 1000)
    some = [Table("user", 9000, D, QR(4)), Table("day", 7, D)]
    module, ids = fill_(EmbeddingCollection(some)), batch()[:, :2].contiguous()
    for factor in (1, 2):
        with torch.no_grad():
            module.stored.mul_(factor)
        path = exported(module, tmp_path / "tables.onnx")
        assert {each.name for each in tmp_path.iterdir()} == {"tables.onnx", "tables.onnx.data"}
        assert path.stat().st_size < (tmp_path / "tables.onnx.data").stat().st_size
        assert_near(run(path, ids=ids)["vectors"], module(ids).detach())


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"jagged \(True\) must be False for Embedding, which does not pool"):
        export_named(Embedding(N, D, QR(4)), tmp_path / "a.onnx", jagged=True)
    with pytest.raises(ValueError, match=r"model \(Linear\) has 0 modules of tables but must have one"):
        export_named(nn.Linear(2, 2), tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())
