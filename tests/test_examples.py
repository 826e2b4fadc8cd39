"""The examples run, and do what they say."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in [name for name, module in sys.modules.items() if str(EXAMPLES) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def example(name):
    return importlib.import_module(name)


def test_replace_tables(capsys):
    report, losses = example("replace_tables").main()
    assert report.bytes_after + report.state_bytes <= 2e6 and "total" in capsys.readouterr().out
    assert "day" in report.left and losses[-1] < losses[0]


def test_compress_and_finetune():
    losses = example("compress_and_finetune").main()
    assert losses["right after"] < losses["at first"] and losses["trained on"] < losses["right after"]


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning_module():
    straight, resumed = example("lightning_module").main()
    for (name, expected), (_, got) in zip(straight.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(got, expected), name


@pytest.mark.filterwarnings("ignore")  # torch-rechub's own
def test_torch_rechub():
    pytest.importorskip("torch_rechub", reason="pip install --no-deps torch-rechub; pip install pandas scikit-learn")
    report, losses = example("rechub_deepfm").main()
    assert report.bytes_after + report.state_bytes <= 4e6 and losses[-1] < losses[0]
    assert not report.outdated


def test_sequential():
    before, after = example("sequential").main(steps=30)
    assert after > before + 0.3


def losses_of(notebook) -> dict[str, str]:  # type: ignore[no-untyped-def]
    """The test loss that each line of the notebook's outputs ends with, by the name that it starts with."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    printed = "".join(output.text for output in outputs if "text" in output)
    return dict(re.findall(r"^(\S+) .*test loss (\S+)$", printed, re.M))


def test_the_notebook_runs(tmp_path: Path) -> None:
    """Its outputs are those of such a run: jupyter nbconvert --execute --inplace examples/quickstart.ipynb"""
    nbformat = pytest.importorskip("nbformat", reason='needs nbformat: pip install "quorem[dev]"')
    client = pytest.importorskip("nbclient", reason='needs nbclient: pip install "quorem[dev]"')
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    losses = {name: float(loss) for name, loss in losses_of(notebook).items()}
    assert losses["full"] < losses["HotCold"] < losses["QR(4)"] < losses["Hash(4)"]
    assert (tmp_path / "user.safetensors").exists()
    kept = losses_of(nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4))
    assert {name: round(float(loss), 2) for name, loss in kept.items()} == pytest.approx(losses, abs=0.02)
