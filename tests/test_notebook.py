"""examples/quickstart.ipynb runs from top to bottom. Its outputs are those of such a run.

To write them anew: jupyter nbconvert --execute --inplace examples/quickstart.ipynb
"""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason='needs nbformat: pip install "quorem[dev]"')

PATH = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


def losses_of(notebook) -> dict[str, str]:  # type: ignore[no-untyped-def]
    """The test loss that each line of the notebook's outputs ends with, by the name that it starts with."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    printed = "".join(output.text for output in outputs if "text" in output)
    return dict(re.findall(r"^(\S+) .*test loss (\S+)$", printed, re.M))


def test_the_notebook_runs(tmp_path: Path) -> None:
    client = pytest.importorskip("nbclient", reason='needs nbclient: pip install "quorem[dev]"')
    notebook = nbformat.read(PATH, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    losses = {name: float(loss) for name, loss in losses_of(notebook).items()}
    assert losses["full"] < losses["HotCold"] < losses["QR(4)"] < losses["Hash(4)"]
    assert (tmp_path / "user.safetensors").exists()
    kept = losses_of(nbformat.read(PATH, as_version=4))
    assert {name: round(float(loss), 2) for name, loss in kept.items()} == pytest.approx(losses, abs=0.02)
