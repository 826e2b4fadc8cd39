"""Exported torch programs against the modules they were made from, in this process and in one without quorem.

ONNX graphs are made from such programs: ``test_onnx`` has bags, networks and dtypes.
"""

import errno
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import onnxruntime
import pytest
import torch
from foreign_model import KINDS, trained
from foreign_model import batch as two_inputs
from hot_cold_cases import FEATURES, hot_and_cold, several_widths
from oracles import CASES, D, N, assert_near, fill_
from processes import python
from torch import Tensor, nn

from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, GeneralizedQR, Table, export, quantize_
from quorem.models import DLRM
from quorem.modules.tied import TiedLinear
from quorem.serving.export import export_named

IDS = torch.tensor([3, 3, 7, 59, 0, 1, 1, 7, 7, 12, 58, 33])
OFFSETS = torch.tensor([0, 4, 4, 7, 9, 11])  # an empty bag, one of padding only, and an id past the last offset
SCHEMES = ("qr-mult", "mixed-add", "qr-feature", "path-mlp")  # of exported programs: tracing takes seconds
TABLE = Embedding(N, D, QR(4))
UNKNOWN = [-1, N, 2**31, 2**62, -(2**63), 2**63 - 1]


def collection(names: Iterable[str], **options: object) -> EmbeddingCollection:
    """Schemes side by side, one with a padding id."""
    tables = [Table(name, N, D, CASES[name], padding_idx=7 if name == "qr-mult" else None) for name in names]
    return fill_(EmbeddingCollection(tables, **options))


def batch(rows: int, features: int) -> Tensor:
    return torch.randint(0, N, (rows, features), generator=torch.Generator().manual_seed(rows))


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
    with mock.patch.multiple(torch.compiler, _is_exporting_flag=True, _is_compiling_flag=True):
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


def check_bags(model: nn.Module, module: EmbeddingCollection, rows: int, weighted: bool = False) -> None:
    lengths = torch.arange(len(module.names) * rows) % 4
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, N, (int(offsets[-1]),), generator=torch.Generator().manual_seed(1))
    inputs = [ids, offsets, *([torch.linspace(-1, 1, len(ids))] if weighted else [])]
    assert_near(model(*inputs)["vectors"], module(*inputs).detach())
    if rows > 1:
        ids[0] = -1  # in the second bag of the first feature; the first is empty
        vectors = model(*inputs)["vectors"]
        assert vectors[1, 0].isnan().all() and int(vectors.isnan().sum()) == D


def test_every_scheme_in_plain_operators() -> None:
    module = collection(CASES)
    check_lookup(Plain(module), module, 50)
    for mode in ("sum", "mean"):
        module = collection(CASES, mode=mode)
        check_bags(Plain(module), module, 4, weighted=True)


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


def test_programs_of_one_scheme_of_each_kind_in_any_batch_size(program_of: Callable[..., nn.Module]) -> None:
    module = collection(SCHEMES)
    program = program_of(module)
    for rows in (0, 1, 2, 50):
        check_lookup(program, module, rows)
    module = collection(SCHEMES, mode="mean")
    program = program_of(module, jagged=True)
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
    names = [tmp_path / name for name in ("model.pt2", "inputs", "expected")]
    python("-c", FRESH, *names, cwd=tmp_path)


def run_graph(path: Path, users: Tensor, items: Tensor) -> Tensor:
    (scores,) = onnxruntime.InferenceSession(path).run(None, {"users": users.numpy(), "items": items.numpy()})
    return torch.from_numpy(scores)


@pytest.mark.parametrize("kind", KINDS)
def test_anyones_model_by_the_exporters_of_torch(kind: str, tmp_path: Path) -> None:
    model, (users, items) = trained(kind, tmp_path).eval(), two_inputs(0)
    rows = ({0: torch.export.Dim("rows")},) * 2
    exported = torch.export.export(model, (users, items), dynamic_shapes=rows)
    assert not any("quorem" in str(node.target) for node in exported.graph.nodes)
    program, graph = exported.module(), tmp_path / "model.onnx"
    torch.onnx.export(model, (users, items), graph, dynamo=True, dynamic_shapes=rows, verbose=False)
    for count in (64, 1):
        expected = model(users[:count], items[:count]).detach()
        assert_near(program(users[:count], items[:count]), expected)
        assert_near(run_graph(graph, users[:count], items[:count]), expected)
    unknown = program(torch.tensor([0, 3000, -1]), items[:3])
    assert unknown.isnan().tolist() == [False, True, True]


def test_tied_heads_take_batches_of_any_size() -> None:
    """``mult`` is scored in blocks of ids, whose size depends on the number of queries elsewhere."""
    embedding = fill_(Embedding(N, D, QR(4)))
    model, rows = nn.Sequential(embedding, TiedLinear(embedding)), ({0: torch.export.Dim("rows")},)
    program = torch.export.export(model, (IDS[:4],), dynamic_shapes=rows).module()
    for ids in (IDS, IDS[:1], IDS.repeat(500)):
        assert_near(program(ids), model(ids).detach())


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.filterwarnings("error")
def test_a_tied_head_of_partial_scores_is_exported_without_a_warning(tmp_path: Path, bits: int | None) -> None:
    """Its ids are no digits, so the rows of each are looked up in the layout."""
    embedding = fill_(Embedding(N, D, GeneralizedQR(2, num_rows=24, operation="add")))
    if bits is not None:
        quantize_(embedding, bits)
    model = nn.Sequential(embedding, TiedLinear(embedding))
    export(model, (IDS,), tmp_path / "model.pt2")
    assert_near(torch.export.load(tmp_path / "model.pt2").module()(IDS), model(IDS).detach())


def test_an_export_takes_its_format_from_the_path(tmp_path: Path) -> None:
    model, inputs = trained("qr", tmp_path), two_inputs(0)
    export(model, inputs, tmp_path / "model.pt2")
    export(model, inputs, tmp_path / "model.onnx", output_names=["score"])
    assert model.training and model.users.exported_unknown == "nan"
    scores = model(*inputs).detach()
    assert_near(torch.export.load(tmp_path / "model.pt2").module()(*inputs), scores)
    assert_near(run_graph(tmp_path / "model.onnx", *inputs), scores)
    assert [put.name for put in onnxruntime.InferenceSession(tmp_path / "model.onnx").get_outputs()] == ["score"]


def test_a_graph_is_small() -> None:
    tables = [Table(name, n, D, QR(4)) for name, n in (("user", 1000), ("item", 500), ("day", 100))]
    program = torch.export.export(EmbeddingCollection(tables), (torch.zeros(2, 3, dtype=torch.int64),))
    assert len([node for node in program.graph.nodes if node.op == "call_function"]) < 40


@pytest.mark.parametrize(
    ("model", "ids", "name", "options", "error", "message"),
    [
        (TABLE, IDS, "a.pt2", {"unknown": "error"}, ValueError, r"unknown \('error'\) must be one of 'nan', 'zeros'"),
        (TABLE, IDS, "a.pt2", {"format": "tflite"}, ValueError, r"format \('tflite'\) must be one of 'onnx', 'torch-"),
        (TABLE, IDS, "a.so", {"format": "aot-inductor"}, ValueError, r"path \(.*a.so\) must end in .pt2 for AOTInduct"),
        (TABLE, IDS, "a.bin", {}, ValueError, r"path \(.*a.bin\) must end in .onnx, .pt2 .*, or format must"),
        (TABLE, IDS[:1], "a.pt2", {}, ValueError, r"has a tensor of shape \(1,\) but must have 2 rows or more"),
        (fill_, IDS, "a.pt2", {}, TypeError, r"model \(function\) must be an nn.Module"),
    ],
)
def test_arguments_that_do_not_fit(model, ids, name, options, error, message, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        export(model, (ids,), tmp_path / name, **options)
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
compiled = torch.compile(table, backend="aot_eager")  # it runs as it is: such tables are not compiled
torch.testing.assert_close(compiled(torch.arange(60)), table.to_dense())
"""


def test_rows_that_lag_behind_where_no_kernel_is_compiled_yet(tmp_path: Path) -> None:
    """Numba cannot compile while torch traces, which replaces builtins."""
    python("-c", TRAINED, env={"NUMBA_CACHE_DIR": str(tmp_path)})
