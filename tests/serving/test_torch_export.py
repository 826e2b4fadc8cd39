"""Exported torch programs against the modules they were made from, in this process and in one without quorem.

ONNX graphs are made from such programs: ``test_onnx`` has bags, networks and dtypes.
"""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import onnxruntime
import pytest
import torch
from hot_cold_cases import COUNTS, FEATURES, hot_and_cold, several_widths
from oracles import CASES, TOLERANCE, D, N, fill_
from torch import Tensor, nn

from quorem import (
    QR,
    Embedding,
    EmbeddingBag,
    EmbeddingCollection,
    GeneralizedQR,
    HotCold,
    Pool,
    Table,
    compress_,
    export,
    quantize_,
)
from quorem.models import DLRM
from quorem.serving.named import export_named

IDS = torch.tensor([3, 3, 7, 59, 0, 1, 1, 7, 7, 12, 58, 33])
OFFSETS = torch.tensor([0, 4, 4, 7, 9, 11])  # an empty bag, one of padding only, and an id past the last offset
KINDS = ("qr-mult", "mixed-add", "qr-feature", "path-mlp")  # of exported programs: tracing takes seconds
UNKNOWN = [-1, N, 2**31, 2**62, -(2**63), 2**63 - 1]


def collection(names: Iterable[str], **options: object) -> EmbeddingCollection:
    """Schemes side by side, one of them permuted, one with a padding id."""
    tables = [Table(name, N, D, CASES[name], padding_idx=7 if name == "qr-mult" else None) for name in names]
    return fill_(EmbeddingCollection([*tables, Table("permuted", N, D, QR(4, permute=3))], **options))


def batch(rows: int, features: int) -> Tensor:
    return torch.randint(0, N, (rows, features), generator=torch.Generator().manual_seed(rows))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    close = TOLERANCE[torch.float32]
    torch.testing.assert_close(actual.double(), expected.detach().double(), rtol=close, atol=close, equal_nan=True)


@pytest.fixture
def program_of(tmp_path: Path) -> Callable[..., nn.Module]:
    """Writes the program of a model, which must have torch's operators only, and loads it again."""

    def program_of(model: nn.Module, **options: object) -> nn.Module:
        export_named(model, tmp_path / "model.pt2", **options)
        program = torch.export.load(tmp_path / "model.pt2")
        calls = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert not any("quorem" in call for call in calls)
        return program.module()

    return program_of


@contextmanager
def exporting() -> Iterator[None]:
    """Modules run the operators that an export would trace."""
    with mock.patch.object(torch.compiler, "_is_exporting_flag", True):
        yield


class Plain(nn.Module):
    """A module in plain operators, as an exported program runs it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        with exporting():
            return {"vectors": self.module(*inputs)}


def check_lookup(model: Callable[[Tensor], dict[str, Tensor]], module: EmbeddingCollection, rows: int) -> None:
    """In any batch size; and ids that no table has give NaN."""
    ids = batch(rows, len(module.features))
    expected = module(ids)
    assert_near(model(ids)["vectors"], expected)
    if rows > 1:
        for wrong in UNKNOWN:
            ids[1] = wrong
            vectors = model(ids)["vectors"]
            assert vectors[1].isnan().all()
            assert_near(vectors[0], expected[0])


def check_bags(model: Callable[..., dict[str, Tensor]], module: EmbeddingCollection, rows: int) -> None:
    lengths = torch.arange(len(module.names) * rows) % 4
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, N, (int(offsets[-1]),), generator=torch.Generator().manual_seed(1))
    weights = torch.linspace(-1, 1, len(ids))
    expected = module(ids, offsets, weights)
    assert_near(model(ids, offsets, weights)["vectors"], expected)
    if rows > 1:
        ids[0] = -1  # in the second bag of the first feature; the first is empty
        vectors = model(ids, offsets, weights)["vectors"]
        assert vectors[1, 0].isnan().all() and int(vectors.isnan().sum()) == D


def test_every_scheme_in_plain_operators() -> None:
    module = collection(CASES)
    check_lookup(Plain(module), module, 50)
    for mode in ("sum", "mean"):
        module = collection(CASES, mode=mode)
        check_bags(Plain(module), module, 4)


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_hot_and_cold_ids_in_plain_operators(bits: int) -> None:
    module = hot_and_cold(bits)
    ids = torch.arange(N)[:, None].expand(N, FEATURES)  # every id of every table
    assert_near(Plain(module)(ids)["vectors"], module(ids))
    check_lookup(Plain(module), module, 2)
    offsets = torch.arange(0, N * FEATURES + 1, 3)
    values = ids.T.reshape(-1)
    assert_near(Plain(module)(values, offsets)["vectors"], module(values, offsets))
    if bits:
        module = several_widths(bits)
        assert_near(Plain(module)(ids[:, :5])["vectors"], module(ids[:, :5]))


def test_raw_ids_in_plain_operators() -> None:
    tables = [Table("user", 2**40, D, GeneralizedQR(4), raw_ids=True, padding_idx=-5), Table("day", 7, D)]
    module = fill_(EmbeddingCollection(tables))
    raw = torch.tensor([*UNKNOWN, -5, 0, 7])
    ids = torch.stack([raw, raw.remainder(7)], 1)
    assert_near(Plain(module)(ids)["vectors"], module(ids))
    offsets = torch.arange(0, ids.numel() + 1, 3)
    assert_near(Plain(module)(ids.T.flatten(), offsets)["vectors"], module(ids.T.flatten(), offsets))


def test_a_program_with_hot_and_cold_ids_and_quantized_rows(program_of: Callable[..., nn.Module]) -> None:
    tables = [
        Table("user", N, D, HotCold(5, cold=Pool(40), num_rest=10), frequencies=COUNTS),
        Table("item", N, D, HotCold(3, cold=Pool(40)), features=("clicked", "seen"), padding_idx=2),
    ]
    module = quantize_(fill_(EmbeddingCollection(tables)), 4)
    program = program_of(module)
    check_lookup(program, module, 50)


def test_programs_of_one_scheme_of_each_kind_in_any_batch_size(program_of: Callable[..., nn.Module]) -> None:
    module = collection(KINDS)
    program = program_of(module)
    for rows in (0, 1, 2, 50):
        check_lookup(program, module, rows)


def test_programs_of_jagged_collections(program_of: Callable[..., nn.Module]) -> None:
    module = collection(KINDS, mode="mean")
    program = program_of(module, jagged=True, sample_weights=True)
    for rows in (1, 4):
        check_bags(program, module, rows)


def test_offsets_without_the_last(program_of: Callable[..., nn.Module]) -> None:
    module = fill_(EmbeddingBag(N, D, QR(4), mode="sum"))
    program = program_of(module, jagged=True)
    for offsets in (OFFSETS, OFFSETS[:1], OFFSETS[:0]):  # without bags, every id is past the last
        assert_near(program(IDS, offsets)["vectors"], module(IDS, offsets))


def network() -> DLRM:
    tables = [Table("user", N, D, QR(4)), Table("day", 7, D), Table("path", N, D, CASES["path-mlp"])]
    return DLRM(EmbeddingCollection(tables), num_dense=3, bottom=(8,), top=(6,))


def test_a_program_leaves_its_model_as_it_was(program_of: Callable[..., nn.Module]) -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    program = program_of(model)
    with torch.no_grad():
        for parameter in program.parameters():
            parameter.zero_()
    assert isinstance(model.embeddings, EmbeddingCollection)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


FRESH = """
import sys
sys.modules["quorem"] = None  # importing it raises
import torch
path, inputs, expected = sys.argv[1:]
program = torch.export.load(path).module()
outputs = program(*torch.load(inputs))
torch.testing.assert_close(outputs["logits"], torch.load(expected), equal_nan=True)
"""


def test_a_full_disk_is_an_error_and_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("quorem.serving.export.replacing", lambda path, num_bytes: nullcontext(Full()))
    for name in ("model.pt2", "model.onnx"):
        with pytest.raises(OSError, match="No space left on device"):
            export(Embedding(N, D, QR(4)), (IDS,), name)


def test_a_program_runs_where_quorem_cannot_be_imported(tmp_path: Path) -> None:
    model = network()
    ids, dense = batch(5, 3) % 7, torch.rand(5, 3)
    expected = model(dense, ids).detach()
    ids[2, 0], expected[2] = 2**40, torch.nan
    export_named(model, tmp_path / "model.pt2")
    torch.save((dense, ids), tmp_path / "inputs")
    torch.save(expected, tmp_path / "expected")
    names = [str(tmp_path / name) for name in ("model.pt2", "inputs", "expected")]
    run = subprocess.run([sys.executable, "-c", FRESH, *names], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


class Foreign(nn.Module):
    """A model that knows nothing of quorem, before ``compress_``."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.day = nn.Embedding(1000, D), nn.Embedding(500, D, padding_idx=3), nn.Embedding(7, D)
        self.tags = nn.EmbeddingBag(300, D, mode="sum")
        self.top = nn.Linear(4 * D, 1)

    def forward(self, user: Tensor, item: Tensor, day: Tensor, tags: Tensor) -> Tensor:
        vectors = [self.user(user), self.item(item), self.day(day), self.tags(tags)]
        return self.top(torch.cat(vectors, 1)).squeeze(1)


def foreign(kind: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A compressed model in evaluation mode, and the inputs of four rows."""
    torch.manual_seed(0)
    model = Foreign()
    if kind == "counts":
        counts = {name: torch.randperm(n) for name, n in (("user", 1000), ("item", 500), ("day", 7), ("tags", 300))}
        compress_(model, budget="20KB", frequencies=counts)
    else:
        compress_(model, QR(4))
    if kind == "quantized":
        quantize_(model, 8)
    inputs = (torch.tensor([0, 999, 7, 8]), torch.tensor([499, 3, 3, 0]), torch.tensor([6, 0, 1, 2]))
    return model.eval(), (*inputs, torch.tensor([[299, 0], [1, 1], [5, 6], [0, 298]]))


@pytest.mark.parametrize("kind", ["qr", "counts", "quantized"])
def test_anyones_model_by_the_exporters_of_torch(kind: str, tmp_path: Path) -> None:
    model, inputs = foreign(kind)
    expected = model(*inputs).detach()
    rows = tuple({0: torch.export.Dim("rows")} for _ in inputs)
    program = torch.export.export(model, inputs, dynamic_shapes=rows)
    assert not any("quorem" in str(node.target) for node in program.graph.nodes)
    one = tuple(each[:1] for each in inputs)
    assert_near(program.module()(*inputs), expected)
    assert_near(program.module()(*one), expected[:1])
    unknown = (torch.tensor([0, 1000, -1, 8]), *inputs[1:])
    assert program.module()(*unknown).isnan().tolist() == [False, True, True, False]
    torch.onnx.export(model, inputs, tmp_path / "model.onnx", dynamo=True, dynamic_shapes=rows, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    names = [given.name for given in session.get_inputs()]
    for given, scores in ((inputs, expected), (one, expected[:1])):
        feeds = {name: tensor.numpy() for name, tensor in zip(names, given, strict=True)}
        assert_near(torch.from_numpy(session.run(None, feeds)[0]), scores)


def test_an_export_takes_its_format_from_the_path(tmp_path: Path) -> None:
    model, inputs = foreign("qr")
    model.train()
    export(model, inputs, tmp_path / "model.pt2")
    export(model, inputs, tmp_path / "model.onnx", output_names=["score"])
    assert model.training and model.user.exported_unknown == "nan"
    scores = model(*inputs).detach()
    assert_near(torch.export.load(tmp_path / "model.pt2").module()(*inputs), scores)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    feeds = {given.name: tensor.numpy() for given, tensor in zip(session.get_inputs(), inputs, strict=True)}
    assert list(feeds) == ["user", "item", "day", "tags"]
    assert_near(torch.from_numpy(session.run(["score"], feeds)[0]), scores)


def test_a_graph_is_small() -> None:
    tables = [Table(name, n, D, QR(4)) for name, n in (("user", 1000), ("item", 500), ("day", 100))]
    program = torch.export.export(EmbeddingCollection(tables), (torch.zeros(2, 3, dtype=torch.int64),))
    assert len([node for node in program.graph.nodes if node.op == "call_function"]) < 40


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    table = Embedding(N, D, QR(4))
    with pytest.raises(ValueError, match=r"unknown \('error'\) must be one of 'nan', 'zeros'"):
        export(table, (IDS,), tmp_path / "a.pt2", unknown="error")
    with pytest.raises(ValueError, match=r"format \('tflite'\) must be one of 'onnx', 'torch-export', 'aot-inductor'"):
        export(table, (IDS,), tmp_path / "a.pt2", format="tflite")
    with pytest.raises(ValueError, match=r"path \(.*a.bin\) must end in .onnx or .pt2, or format must be given"):
        export(table, (IDS,), tmp_path / "a.bin")
    with pytest.raises(ValueError, match=r"has a tensor of shape \(1,\) but must have 2 rows or more"):
        export(table, (IDS[:1],), tmp_path / "a.pt2")
    with pytest.raises(TypeError, match=r"model \(function\) must be an nn.Module"):
        export(fill_, (IDS,), tmp_path / "a.pt2")
    assert not list(tmp_path.iterdir())


TRAINED = """
import torch, quorem
from quorem.optim import Adam

table = quorem.Embedding(60, 8, quorem.QR(4), sparse=True)
optimizer = Adam(table.parameters(), lr=0.1)
for ids in ([*range(60)], [1, 2], [1, 2]):
    optimizer.zero_grad()
    table(torch.tensor(ids)).square().sum().backward()
    optimizer.step()
assert table.updates.lagging is not None
program = torch.export.export(table, (torch.arange(60),)).module()
assert torch.is_grad_enabled()
torch.testing.assert_close(program(torch.arange(60)), table.to_dense())
compiled = torch.compile(table, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(torch.arange(60)), table.to_dense())
"""


def test_rows_that_lag_behind_where_no_kernel_is_compiled_yet(tmp_path: Path) -> None:
    """Numba cannot compile while torch traces, which replaces builtins."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", TRAINED], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
