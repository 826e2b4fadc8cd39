"""Nothing is timed before the kernels are checked: by their tests, or by a comparison with the reference."""

from pathlib import Path

import pytest
import torch

from quorem.experiments.bench import check

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


def kernel_tests(folder: Path, **passing: bool) -> None:
    """A checkout with a test for the kernels of each device, and one of nothing that is timed."""
    (folder / "tests" / "ops").mkdir(parents=True)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = kernels(device)\n")
    for name, passes in passing.items():
        mark = "" if name == "other" else f"import pytest\npytestmark = pytest.mark.kernels(device={name!r})\n"
        test = f"{mark}def test_{name}():\n    assert {passes}\n"
        (folder / "tests" / "ops" / f"test_{name}.py").write_text(test)


@pytest.mark.parametrize("passes", [True, False])
def test_the_kernel_tests_of_the_device_decide(tmp_path, monkeypatch, passes):
    kernel_tests(tmp_path, cpu=passes, gpu=not passes, other=False)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "differences", lambda device: "not asked for")
    wrong = check.kernels_are_wrong(CPU, quick=False)
    assert wrong is None if passes else "test_cpu" in wrong
    wrong = check.kernels_are_wrong(torch.device("cuda"), quick=False)
    assert wrong is None if not passes else "test_gpu" in wrong


@pytest.mark.parametrize("passing", [{"gpu": False}, {"other": False}, {}])
def test_without_kernel_tests_lookup_and_step_are_compared(tmp_path, monkeypatch, passing):
    kernel_tests(tmp_path, **passing)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "differences", lambda device: "compared")
    assert check.kernels_are_wrong(CPU, quick=False) == "compared"


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_kernels_of_every_mode_have_tests(device):
    """``--mode dlrm`` times the dense layers and their optimizer too, which are Triton's."""
    files = [path for path in ROOT.glob("tests/**/test_*.py") if check.MARKER in path.read_text(encoding="utf-8")]
    text = "".join(
        p.read_text(encoding="utf-8") for p in files if f'kernels(device="{device}")' in p.read_text("utf-8")
    )
    names = {"cpu": ["ops.cpu"], "gpu": ["ops.gpu", "FusedStep", "foreach"]}
    assert all(name in text for name in names[device])


def test_the_quick_check_compares_lookup_and_step(monkeypatch):
    assert check.differences(CPU) is None
    lookup, update = check.lookup.lookup, check.rules.update_
    monkeypatch.setattr(check.lookup, "lookup", lambda *args: lookup(*args) + 1)
    assert check.differences(CPU).startswith("QR(4), lookup")
    monkeypatch.undo()
    twice = lambda grad, batch, stored, lr, *rest, **options: update(grad, batch, stored, 2 * lr, *rest, **options)  # noqa: E731
    monkeypatch.setattr(check.rules, "update_", twice)
    assert check.differences(CPU).startswith("QR(4), step")
