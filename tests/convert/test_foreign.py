"""``compress_`` in models of other libraries, by ``benchmarks/foreign_models.py``."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "foreign_models.py"
INSTALL = (
    "pip install --no-deps torch-rechub recbole deepctr-torch; pip install transformers scikit-learn pandas colorlog"
)


@pytest.fixture(scope="module")
def foreign():
    spec = importlib.util.spec_from_file_location("foreign_models", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # only here: benchmarks/ has files with the names of folders of tests/
        patch.setattr(sys, "path", [*sys.path, str(SCRIPT.parent)])  # as when the script is run
        spec.loader.exec_module(module)
    module.IDS, module.BATCH = 10_000, 64
    return module


@pytest.mark.filterwarnings("ignore")  # of the libraries' own
@pytest.mark.parametrize(
    "name",
    [
        "torch-rechub DeepFM",
        "torch-rechub DCN",
        "torch-rechub HSTU, tied head",
        "transformers BERT, tied head",
        "RecBole BPR",
        "RecBole SASRec",
        "DeepCTR-Torch DeepFM",
        "matrix factorization",
    ],
)
def test_a_model_trains_before_and_after_in_less_memory(foreign, name):
    try:
        row = foreign.measure(name, steps=20)
    except ImportError as error:
        pytest.skip(f"{error}; {INSTALL}")
    assert row["swapped"] and row["bytes_after"] < row["bytes_before"] / 2
    assert not row["outdated"] and not any("not free" in line for line in row["references"])
    assert row["loss_after"] < row["first_loss"] and row["loss_after"] < row["loss_before"] * 1.1
