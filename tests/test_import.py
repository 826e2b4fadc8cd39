"""`import quorem` loads torch and numpy, nothing heavier."""

import json

import pytest
from processes import python

HEAVY = {"numba", "triton", "polars", "pyarrow", "matplotlib", "typer", "rich", "pandas", "scipy"}
HEAVY |= {"torchrec", "fbgemm_gpu", "safetensors", "onnx", "onnxruntime"}


def top_level_modules(statement: str) -> set[str]:
    """The top-level packages a fresh interpreter has loaded after ``statement``."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps([name.split('.')[0] for name in sys.modules]))"
    return set(json.loads(python("-c", code).splitlines()[-1]))


def test_import_is_light():
    alone = top_level_modules("import torch, numpy")
    reading = "import quorem.data.prepared, quorem.data.synthetic"
    with_quorem = top_level_modules(f"import torch, numpy, quorem\nquorem.Embedding, quorem.load\n{reading}")
    assert "quorem" in with_quorem
    assert sorted((with_quorem - alone) & HEAVY) == []


def test_torch_is_loaded_with_the_first_name_that_is_used():
    assert "torch" not in top_level_modules("import quorem\nquorem.__version__")
    assert "torch" in top_level_modules("import quorem\nquorem.QR")


def test_every_public_name_is_an_attribute():
    names = "assert all(hasattr(quorem, name) for name in quorem.__all__) and not hasattr(quorem, 'nope')"
    star = "from pathlib import Path\nfrom quorem import *\nassert Embedding is quorem.Embedding"
    star += "\nassert Path is not quorem.Path and {'Embedding', 'Path'} <= {*dir(quorem)}"
    assert "quorem" in top_level_modules(f"import quorem\n{names}\n{star}")


@pytest.mark.parametrize("module", ["paper.init", "modules.lookup", "optim"])
def test_a_module_can_be_imported_first(module):
    """Whatever ``quorem.api`` would have imported before it."""
    assert "torch" in top_level_modules(f"import quorem.{module}\nimport torch")
