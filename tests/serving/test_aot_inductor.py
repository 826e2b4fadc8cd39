"""A model compiled by AOTInductor, in a process that cannot import quorem. Needs a C++ compiler: ``CXX`` names it."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import invoke
from foreign_model import batch, trained
from oracles import fill_

from quorem import QR, EmbeddingCollection, Full, HotCold, Table, export, quantize_, save
from quorem.models import DLRM
from quorem.serving.export import export_named

N, D = 60, 8
FRESH = """
import sys
sys.modules["quorem"] = None  # importing it raises
import torch
model = torch._inductor.aoti_load_package(sys.argv[1])
for inputs, expected in torch.load(sys.argv[2]):
    torch.testing.assert_close(model(*inputs)["logits"], expected, equal_nan=True)
"""


needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler: CXX"
)


def network() -> DLRM:
    tables = [Table("user", N, D, QR(4), unknown="hash"), Table("item", N, D, QR(3))]
    return DLRM(quantize_(fill_(EmbeddingCollection(tables)), 8), num_dense=3, bottom=(8,), top=(6,))


def loads_a_package_of_torch_alone(folder: Path) -> bool:
    """Whether this torch can load what it compiled: torch 2.11.0+cu130 with Python 3.12 crashed on a linear layer."""
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.rand(3, 2),))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "linear.pt2"))
    code = "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1])"
    return subprocess.run([sys.executable, "-c", code, package], capture_output=True).returncode == 0


@needs_compiler
def test_a_compiled_network_runs_where_quorem_cannot_be_imported(tmp_path: Path) -> None:
    model, cases = network(), []
    for rows in (1, 2, 33):
        dense, ids = torch.rand(rows, 3), torch.randint(0, N, (rows, 2))
        ids[0, 0] = 2**40
        expected = model(dense, ids).detach()
        if rows > 1:
            ids[1, 1], expected[1] = -1, torch.nan
        cases.append(((dense, ids), expected))
    save(model, tmp_path / "model")
    torch.save(cases, tmp_path / "cases")
    invoke("export", "--format", "aot-inductor", tmp_path / "model", "--out", tmp_path / "model.pt2")
    fresh = [sys.executable, "-c", FRESH, str(tmp_path / "model.pt2"), str(tmp_path / "cases")]
    run = subprocess.run(fresh, capture_output=True, text=True, cwd=tmp_path)
    if run.returncode == -signal.SIGSEGV and not loads_a_package_of_torch_alone(tmp_path):
        pytest.skip("needs a torch that can load a package of torch alone: pip install torch==2.13.0")
    assert run.returncode == 0, run.stderr


@needs_compiler
@pytest.mark.parametrize("kind", ["counts", "quantized"])
def test_anyones_model(kind: str, tmp_path: Path) -> None:
    """A model of torch.nn with a plan by counts, and quantized; test_torch_export.py has the third kind."""
    model = trained(kind, tmp_path).eval()
    export(model, batch(0), tmp_path / "model.pt2", format="aot-inductor")
    package = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))
    for rows in (64, 1):
        users, items = (ids[:rows] for ids in batch(1))
        torch.testing.assert_close(package(users, items), model(users, items).detach())
    assert package(torch.tensor([3000, 2999]), items.expand(2, -1).contiguous()).isnan().tolist() == [True, False]


@needs_compiler
@pytest.mark.parametrize(("features", "bits", "in_network"), [(7, 0, False), (3, 8, True)])
def test_jagged_bags_keep_every_row(features: int, bits: int, in_network: bool, tmp_path: Path) -> None:
    """The batch size is computed from the length of the offsets, and must not be rounded down."""
    schemes = [QR(4), HotCold(5, cold=QR(4), num_rest=9), Full()]
    tables = [Table(f"table {i}", N, D, schemes[i % 3]) for i in range(features)]
    module = fill_(EmbeddingCollection(tables, mode="sum"))
    module = quantize_(module, bits) if bits else module
    model = DLRM(module, num_dense=3, bottom=(8,), top=(6,)) if in_network else module
    export_named(model, tmp_path / "model.pt2", format="aot-inductor", jagged=True)
    package = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))
    for rows in (1, 2, 3, 5, 6, 7, 11, 49):
        offsets = torch.arange(0, 2 * features * rows + 1, 2)
        inputs = (torch.rand(rows, 3),) * in_network + (torch.randint(0, N, (int(offsets[-1]),)), offsets)
        output = package(*inputs)["logits" if in_network else "vectors"]
        torch.testing.assert_close(output, model(*inputs).detach())
