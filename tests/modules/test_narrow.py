"""Narrow rows: rows of d numbers, composed and pooled in d, then one learned matrix ``[d, D]`` of the table."""

import pathlib
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from modules.test_collection import NARROW as NARROW_AND_WIDE
from oracles import fill_
from refusals import refused
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import orthogonal

import quorem
from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, Full, Hash, HotCold, Path, Pool, Table
from quorem.fit import fit_
from quorem.paper.schemes import Scheme

N, D, NARROW = 200, 16, 4
POOL = HotCold(9, cold=Pool(64), num_rest=20, force=True)
SCHEMES: dict[str, Scheme] = {
    "full": Full(width=NARROW),
    "hash": Hash(4, width=NARROW),
    "mult": QR(4, width=NARROW),
    "add": QR(4, operation="add", width=NARROW),
    "concat": QR(4, operation="concat", width=NARROW),
    "pool": replace(POOL, width=NARROW),
    "path": Path(4, hidden=(5,), width=NARROW, force=True),
}
IDS = torch.tensor([[0, 3], [199, 7], [3, 3]])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).detach().norm() / expected.detach().norm())


# Sizes.


def test_a_spec_counts_the_matrix() -> None:
    spec = QR(4, width=NARROW).spec(1000, D)
    assert spec.shapes == ((250, 4), (4, 4)) and (spec.width, spec.embedding_dim) == (4, 16)
    assert spec.num_parameters == 254 * 4 + 4 * 16
    assert QR(4).spec(1000, D).width == D
    layers = 4 * 5 + 5 + 5 * 4 + 4
    assert Path(4, hidden=(5,), width=4).spec(1000, D).num_parameters == 250 * 4 + 4 * layers + 4 * 16
    for scheme in SCHEMES.values():
        module = Embedding(N, D, scheme)
        assert module.num_parameters == sum(p.numel() for p in module.parameters())


def test_rows_that_would_not_shrink_the_table_stay_full() -> None:
    """Full(width=4): 5 rows of 4 and a matrix of 64 numbers are 84, where the table has 80."""
    for scheme in (Full(width=NARROW), Hash(1, width=NARROW)):
        with pytest.warns(UserWarning, match="would store 84 parameters where the full table has 80"):
            module = Embedding(5, D, scheme)
        assert module.is_full() and not module.narrow and module.stored.shape == (5, D)
    assert Embedding(5, D, Full(width=NARROW, force=True)).narrow == (0,)


add, infinite = partial(Embedding, N, D, SCHEMES["add"]), torch.full((N, D), torch.inf)
test_errors = refused(
    (lambda: QR(4, width=D).spec(N, D), ValueError, r"width \(16\) of rows must be below embedding_dim \(16\)"),
    (lambda: QR(4, width=D + 1).spec(N, D), ValueError, r"width \(17\) of rows must be below embedding_dim \(16\)"),
    (lambda: QR(4, width=0), ValueError, r"width \(0\) must be at least 1"),
    (lambda: QR(4, operation="concat", width=3).spec(N, D), ValueError, r"width \(3\) must be divisible by the number"),
    (
        lambda: HotCold(9, cold=QR(4, width=4)),
        ValueError,
        r"width of cold \(.*\) must be None: all rows have",
    ),
    (lambda: add().row_numbers(IDS), ValueError, r"width \(4\) of rows must be embedding_dim \(16\)"),
    (lambda: fit_([infinite], Full(width=4).spec(N, D), infinite), ValueError, "matrix must be given for narrow rows"),
    (lambda: Embedding(N, D, Full(width=4)).fit_(infinite), ValueError, "dense, the table to fit, must be finite"),
)


# Initial values.


@pytest.mark.parametrize("case", SCHEMES)
@pytest.mark.parametrize("init_std", [None, 0.5])
def test_vectors_start_like_rows_of_a_full_table(case: str, init_std: float | None) -> None:
    torch.manual_seed(0)
    n = 20_000
    scheme = HotCold(100, cold=Pool(2000), width=NARROW) if case == "pool" else SCHEMES[case]
    module = Embedding(n, D, scheme, init_std=init_std)
    std = (3 * n) ** -0.5 if init_std is None else init_std
    assert abs(float(module.to_dense().detach().std()) / std - 1) < 0.1
    matrix = module.projections[0]
    torch.testing.assert_close(matrix @ matrix.T, D / NARROW * torch.eye(NARROW), rtol=1e-5, atol=1e-5)


# What a module can do with any table.


def best_error(dense: Tensor, width: int) -> float:
    return float(torch.linalg.svdvals(dense)[width:].norm() / dense.norm())


def test_a_fit_of_narrow_full_rows_is_the_truncated_svd() -> None:
    dense = torch.randn(N, D, dtype=torch.float64) @ torch.diag(0.8 ** torch.arange(D, dtype=torch.float64))
    for width in (1, 4, 15):
        module = Embedding.from_pretrained(dense, Full(width=width, force=True))
        assert not any(p.requires_grad for p in module.parameters())
        assert abs(relative_error(module.to_dense(), dense) - best_error(dense, width)) < 1e-12
    counts = torch.arange(N) % 7 + 1
    root = counts.double().sqrt()[:, None]
    module = Embedding.from_pretrained(dense, Full(width=4), frequencies=counts)
    assert abs(relative_error(root * module.to_dense(), root * dense) - best_error(root * dense, 4)) < 1e-12
    broken = dense.index_fill(0, torch.tensor([7]), torch.nan)
    module = Embedding.from_pretrained(broken, Full(width=4), padding_idx=7)
    kept = torch.arange(N) != 7
    expected = best_error(dense[kept], 4)
    assert abs(relative_error(module.to_dense()[kept], dense[kept]) - expected) < 1e-12


@pytest.mark.parametrize("case", ["add", "concat", "mult", "pool", "hash"])
def test_a_fit_is_that_of_the_projected_table(case: str) -> None:
    """The matrix as above, and the rows as the scheme fits them to the coordinates of the vectors."""
    dense, scheme = torch.randn(N, D, dtype=torch.float64), SCHEMES[case]
    module = Embedding.from_pretrained(dense, scheme)
    matrix = module.projections[0]
    largest = torch.linalg.svd(dense).Vh[:NARROW]
    torch.testing.assert_close((matrix @ largest.T).abs(), 2 * torch.eye(NARROW, dtype=torch.float64))
    expected = Embedding.from_pretrained(dense @ largest.T @ largest @ matrix.T / 4, replace(scheme, width=None))
    torch.testing.assert_close(module.stored, expected.stored, rtol=1e-6, atol=1e-6)
    source = Embedding(N, D, SCHEMES["add"], init_std=1.0, dtype=torch.float64).to_dense().detach()
    assert relative_error(Embedding.from_pretrained(source, SCHEMES["add"]).to_dense(), source) < 1e-6
    with pytest.raises(ValueError, match="must not be path-based"):
        Embedding.from_pretrained(dense, SCHEMES["path"])


@pytest.mark.parametrize("case", ["full", "mult", "add", "concat", "hash", "pool"])
def test_growth_keeps_old_vectors(case: str) -> None:
    torch.manual_seed(0)
    module = Embedding(N, D, SCHEMES[case])
    before, matrix = module.to_dense().detach().clone(), module.projections[0]
    module.grow_(N + 50)
    assert module.projections[0] is matrix and module.to_dense().shape == (N + 50, D)
    assert torch.equal(module.to_dense()[:N], before)
    torch.testing.assert_close(module(torch.arange(N + 50)), module.to_dense())
    module.grow_(N + 60)
    assert torch.equal(module.to_dense()[:N], before)


@pytest.mark.parametrize(("case", "mode"), [*((case, "mean") for case in SCHEMES), ("mult", "sum"), ("add", "max")])
def test_exported_bags(case: str, mode: str) -> None:
    module = fill_(EmbeddingBag(N, D, SCHEMES[case], mode=mode, padding_idx=3))
    program = torch.export.export(module, (IDS,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    every = torch.arange(N).view(-1, 2)
    torch.testing.assert_close(program(every), module(every))
    assert program(torch.tensor([[1, 2], [N, 3]])).isnan().any(1).tolist() == [False, True]


def test_a_file_brings_rows_and_matrices_back(tmp_path) -> None:
    module = fill_(EmbeddingCollection(NARROW_AND_WIDE))
    quorem.save(module, tmp_path / "tables.safetensors")
    loaded = quorem.load(tmp_path / "tables.safetensors")
    ids = torch.randint(module.specs[0].num_embeddings, (9, len(module.features)))
    assert torch.equal(loaded(ids), module(ids))
    tiny = Embedding(3, D, Full(width=1, force=True))
    quorem.save(tiny, tmp_path / "tiny.safetensors")
    assert torch.equal(quorem.load(tmp_path / "tiny.safetensors").to_dense(), tiny.to_dense())


# Training.


def test_the_state_of_narrow_rows_is_that_of_their_gradients() -> None:
    """Momentum is linear in the gradients, so one step of it, converted, is the gradient of the narrow rows."""
    model = nn.Sequential(nn.Embedding(N, D, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    weights = torch.randn(N, D, dtype=torch.float64)
    (model(torch.arange(N)) * weights).sum().backward()
    optimizer.step()
    quorem.compress_(model, Full(width=NARROW), fit=True, optimizer=optimizer)
    table = model[0]
    (gradient,) = torch.autograd.grad((table(torch.arange(N)) * weights).sum(), table.stored)
    momentum = optimizer.state[table.stored]["momentum_buffer"]
    torch.testing.assert_close(momentum, gradient, rtol=1e-5, atol=1e-5)


def test_tied_weights_share_the_matrix() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(N, D), "b": nn.EmbeddingBag(N, D)})
    model["b"].weight = model["a"].weight
    report = quorem.compress_(model, Full(width=NARROW), fit=True)
    assert model["a"].projections[0] is model["b"].projections[0] and model["a"].stored is model["b"].stored
    after = sum(entry.bytes_after for entry in report.entries)
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    assert after == sum(t.nbytes for t in tensors.values())


def test_a_plan_leaves_narrow_tables_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.ModuleDict({"narrow": Embedding(N, D, Full(width=4)), "wide": Embedding(N, D)})
    planned = quorem.plan(model, "8KB")
    assert [table.name for table in planned.tables] == ["wide"]


def test_gradients_of_gradients_beside_a_table_that_is_not_narrow() -> None:
    module = fill_(EmbeddingCollection([Table("a", N, D, QR(4, width=NARROW)), Table("b", N, D, QR(3))]).double())
    ids, dense, parameters = torch.tensor([[1, 2], [5, 9]]), module.to_dense(), list(module.parameters())
    found = []
    for vectors in (module(ids), torch.stack([dense["a"][ids[:, 0]], dense["b"][ids[:, 1]]], 1)):
        first = torch.autograd.grad(vectors.pow(3).sum(), parameters, create_graph=True)
        found.append(torch.autograd.grad(sum(g.pow(2).sum() for g in first), parameters))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("tables", [1, 2])
def test_no_bags_forward_mode_and_autocast(tables: int) -> None:
    """Narrow rows do what rows of D numbers do there."""
    collection = EmbeddingCollection([Table(f"t{t}", N, D, Full(width=NARROW)) for t in range(tables)])
    empty = torch.zeros(0, dtype=torch.long)
    assert collection(empty, torch.zeros(1, dtype=torch.long)).shape == (0, tables, D)
    ids = torch.randint(N, (5, tables))
    with torch.autocast("cpu", torch.bfloat16):
        bags = collection(ids.T.flatten(), torch.arange(5 * tables + 1))
    assert bags.dtype == torch.float32
    torch.testing.assert_close(bags, collection(ids))
    parameters = {name: p.detach() for name, p in collection.named_parameters()}
    with torch.autograd.forward_ad.dual_level():
        duals = {name: torch.autograd.forward_ad.make_dual(p, p) for name, p in parameters.items()}
        out = torch.func.functional_call(collection, duals, (ids,))
        tangent = torch.autograd.forward_ad.unpack_dual(out).tangent
    torch.testing.assert_close(tangent, 2 * collection(ids))  # a product of two factors


def test_narrow_rows_of_half_precision_run_in_onnx_runtime(tmp_path: pathlib.Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: make install")
    table = Embedding(50, D, Full(width=NARROW), dtype=torch.bfloat16)
    ids = torch.arange(7)
    quorem.export(table, (ids,), tmp_path / "table.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "table.onnx")
    assert session.get_outputs()[0].shape[-1] == D


@pytest.mark.parametrize("matrices", [[], [torch.zeros(2, 2)], [torch.zeros(4, 8), torch.zeros(4, 8)]])
def test_matrices_of_other_shapes_are_refused(matrices: list[Tensor]) -> None:
    table = Embedding(50, 8, Full(width=4))
    table.projections = nn.ParameterList(matrices)
    for read in (table.to_dense, lambda: table(torch.arange(50)), lambda: table.score(torch.zeros(1, 8))):
        with pytest.raises(ValueError, match=r"projections have shapes \[.*\] but must have \[\(4, 8\)\]"):
            read()


@pytest.mark.parametrize("change", [lambda m: prune.random_unstructured(m, "0", 0.5), lambda m: orthogonal(m, "0")])
def test_a_matrix_may_be_pruned_or_parametrized(change) -> None:  # type: ignore[no-untyped-def]
    table = Embedding(50, 8, Full(width=4))
    change(table.projections)
    expected = table.tables()[0] @ getattr(table.projections, "0")
    torch.testing.assert_close(table(torch.arange(50)), expected)
    torch.testing.assert_close(table.to_dense(), expected)


@pytest.mark.parametrize("width", [2, 8])
def test_rows_of_another_width_are_refused(width: int) -> None:
    """Kernels would read past them."""
    module = EmbeddingBag(1000, 8, Full(width=4))
    with pytest.raises(ValueError, match=rf"stored has rows of {width} numbers but must have rows of 4"):
        functional_call(module, {"stored": torch.ones(1000, width)}, (torch.arange(1000).view(-1, 2),))
