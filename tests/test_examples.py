"""The examples run, and do what they say."""

import importlib
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
