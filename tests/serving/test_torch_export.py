"""Exported torch programs against the modules they were made from, in this process and in one without quorem."""

import errno
import gc
import io
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hot_cold_cases import COUNTS, FEATURES, hot_and_cold, several_widths
from oracles import CASES, TOLERANCE, D, N, fill_
from torch import Tensor, nn

from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, GeneralizedQR, HotCold, Pool, Table, quantize_
from quorem.models import DCN, DLRM, DeepFM
from quorem.serving.plain import PlainModel
from quorem.serving.torch_export import export_program, write_program

IDS = torch.tensor([3, 3, 7, 59, 0, 1, 1, 7, 7, 12, 58, 33])
OFFSETS = torch.tensor([0, 4, 4, 7, 9, 11])  # an empty bag, one of padding only, and an id past the last offset
WEIGHTS = torch.linspace(-1, 2, len(IDS))
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


def only_torch(program: torch.export.ExportedProgram) -> bool:
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return not any("quorem" in call for call in calls)


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
    check_lookup(PlainModel(module), module, 50)
    for mode in ("sum", "mean"):
        module = collection(CASES, mode=mode)
        check_bags(PlainModel(module, jagged=True), module, 4)


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_hot_and_cold_ids_in_plain_operators(bits: int) -> None:
    module = hot_and_cold(bits)
    ids = torch.arange(N)[:, None].expand(N, FEATURES)  # every id of every table
    assert_near(PlainModel(module)(ids)["vectors"], module(ids))
    check_lookup(PlainModel(module), module, 2)
    offsets = torch.arange(0, N * FEATURES + 1, 3)
    values = ids.T.reshape(-1)
    assert_near(PlainModel(module, jagged=True)(values, offsets)["vectors"], module(values, offsets))
    if bits:
        module = several_widths(bits)
        assert_near(PlainModel(module)(ids[:, :5])["vectors"], module(ids[:, :5]))


def test_raw_ids_in_plain_operators() -> None:
    tables = [Table("user", 2**40, D, GeneralizedQR(4), raw_ids=True, padding_idx=-5), Table("day", 7, D)]
    module = fill_(EmbeddingCollection(tables))
    raw = torch.tensor([*UNKNOWN, -5, 0, 7])
    ids = torch.stack([raw, raw.remainder(7)], 1)
    assert_near(PlainModel(module)(ids)["vectors"], module(ids))
    offsets = torch.arange(0, ids.numel() + 1, 3)
    assert_near(PlainModel(module, jagged=True)(ids.T.flatten(), offsets)["vectors"], module(ids.T.flatten(), offsets))


def test_a_program_with_hot_and_cold_ids_and_quantized_rows() -> None:
    tables = [
        Table("user", N, D, HotCold(5, cold=Pool(40), num_rest=10), frequencies=COUNTS),
        Table("item", N, D, HotCold(3, cold=Pool(40)), features=("clicked", "seen"), padding_idx=2),
    ]
    module = quantize_(fill_(EmbeddingCollection(tables)), 4)
    program = export_program(module)
    assert only_torch(program)
    check_lookup(program.module(), module, 50)


def test_programs_of_one_scheme_of_each_kind_in_any_batch_size() -> None:
    module = collection(KINDS)
    program = export_program(module)
    assert only_torch(program)
    for rows in (0, 1, 2, 50):
        check_lookup(program.module(), module, rows)


def test_programs_of_jagged_collections() -> None:
    module = collection(KINDS, mode="mean")
    program = export_program(module, jagged=True, sample_weights=True)
    assert only_torch(program)
    for rows in (1, 4):
        check_bags(program.module(), module, rows)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode: str) -> None:
    module = fill_(EmbeddingBag(N, D, QR(4), mode=mode, padding_idx=7, include_last_offset=True))
    jagged = export_program(module, jagged=True).module()
    assert_near(jagged(IDS, OFFSETS)["vectors"], module(IDS, OFFSETS))
    rows = export_program(module).module()
    assert_near(rows(IDS.view(4, 3))["vectors"], module(IDS.view(4, 3)))
    if mode != "max":
        weighted = export_program(module, sample_weights=True).module()
        assert_near(
            weighted(IDS.view(4, 3), WEIGHTS.view(4, 3))["vectors"], module(IDS.view(4, 3), None, WEIGHTS.view(4, 3))
        )
    zeros = export_program(module, jagged=True, unknown="zeros").module()
    ids, offsets = torch.tensor([3, N, 5, -1]), torch.tensor([0, 2, 4])
    assert_near(zeros(ids, offsets)["vectors"], module(ids[[0, 2]], torch.tensor([0, 1, 2])))
    assert jagged(ids, offsets)["vectors"].isnan().all()


def test_offsets_without_the_last() -> None:
    module = fill_(EmbeddingBag(N, D, QR(4), mode="sum"))
    program = export_program(module, jagged=True).module()
    for offsets in (OFFSETS, OFFSETS[:1], OFFSETS[:0]):  # without bags, every id is past the last
        assert_near(program(IDS, offsets)["vectors"], module(IDS, offsets))


NETWORKS = {
    "dlrm": lambda tables: DLRM(tables, num_dense=3, bottom=(8,), top=(6,)),
    "dlrm-no-dense": lambda tables: DLRM(tables, num_dense=0, top=(6,)),
    "dcn": lambda tables: DCN(tables, num_dense=3, deep=(7,), num_cross=3),
    "deepfm": lambda tables: DeepFM(tables, num_dense=3, deep=(7,)),
}


def small_tables() -> EmbeddingCollection:
    return EmbeddingCollection([Table("user", N, D, QR(4)), Table("day", 7, D), Table("path", N, D, CASES["path-mlp"])])


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str) -> None:
    model = NETWORKS[name](small_tables())
    program = export_program(model)
    assert only_torch(program)
    for rows in (1, 33):
        ids, dense = batch(rows, 3) % 7, torch.rand(rows, model.num_dense)
        outputs = program.module()(dense, ids)
        assert_near(outputs["logits"], model(dense, ids))
        assert_near(outputs["probabilities"], model(dense, ids).sigmoid())
    ids[3, 1] = 7
    assert program.module()(dense, ids)["logits"].isnan().nonzero().flatten().tolist() == [3]


def test_a_program_leaves_its_model_as_it_was() -> None:
    model = NETWORKS["dlrm"](small_tables())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    program = export_program(model)
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

    program = export_program(Embedding(N, D, QR(4)))
    monkeypatch.setattr("quorem.serving.torch_export.replacing", lambda path: nullcontext(Full()))
    with pytest.raises(OSError, match="No space left on device"):
        write_program(program, "model.pt2")
    gc.collect()  # torch's writer completes its archive when it is deleted


def test_a_program_runs_where_quorem_cannot_be_imported(tmp_path: Path) -> None:
    model = NETWORKS["dlrm"](small_tables())
    ids, dense = batch(5, 3) % 7, torch.rand(5, 3)
    expected = model(dense, ids).detach()
    ids[2, 0], expected[2] = 2**40, torch.nan
    write_program(export_program(model), tmp_path / "model.pt2")
    torch.save((dense, ids), tmp_path / "inputs")
    torch.save(expected, tmp_path / "expected")
    names = [str(tmp_path / name) for name in ("model.pt2", "inputs", "expected")]
    run = subprocess.run([sys.executable, "-c", FRESH, *names], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


def test_half_precision_is_computed_in_float32() -> None:
    module = fill_(Embedding(N, D, QR(4), dtype=torch.bfloat16))
    vectors = export_program(module).module()(IDS)["vectors"]
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors.bfloat16(), module(IDS).detach())


def test_options_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"unknown \('error'\) must be 'nan' or 'zeros'"):
        export_program(Embedding(N, D, QR(4)), unknown="error")
    with pytest.raises(ValueError, match=r"jagged \(True\) must be False for Embedding, which does not pool"):
        export_program(Embedding(N, D, QR(4)), jagged=True)
    with pytest.raises(TypeError, match=r"model \(Linear\) must be an Embedding"):
        PlainModel(nn.Linear(2, 2))
