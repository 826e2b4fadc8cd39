"""examples/quickstart.ipynb runs from top to bottom. It is kept without outputs, so that none can be out of date."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason='needs nbformat: pip install "quorem[dev]"')

PATH = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


def test_the_notebook_is_kept_without_outputs() -> None:
    """To clear them: jupyter nbconvert --clear-output --inplace examples/quickstart.ipynb"""
    notebook = nbformat.read(PATH, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


def test_the_notebook_runs(tmp_path: Path) -> None:
    client = pytest.importorskip("nbclient", reason='needs nbclient: pip install "quorem[dev]"')
    notebook = nbformat.read(PATH, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    printed = "".join(output.text for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output)
    losses = {name: float(loss) for name, loss in re.findall(r"^(\S+) .*test loss (\S+)$", printed, re.M)}
    assert losses["full"] < losses["HotCold"] < losses["QR(4)"] < losses["Hash(4)"]
    assert (tmp_path / "user.safetensors").exists()
