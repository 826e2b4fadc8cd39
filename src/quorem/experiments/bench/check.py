"""Compare the kernels with the reference before a benchmark: times of wrong results are worthless."""

import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from ... import optim
from ...collection import EmbeddingCollection, Table
from ...ops import lookup, rules
from ...ops.rows import IdBatch
from ...ops.state import AdagradConstants, AdagradState
from .grid import SCHEMES, draw_ids

ROOT = Path(__file__).parents[4]
MARKER = "pytest.mark.kernels("  # text in files with tests of kernels
NO_TESTS = 5  # exit code of pytest if it selected no tests
SIZES = (1000, 4, 63, 7, 20_000)


def kernels_are_wrong(device: torch.device, quick: bool) -> str | None:
    """What is wrong with the kernels of ``device``, or None.

    Runs the tests of the checkout that are marked ``kernels(device="cpu")`` or ``kernels(device="gpu")``. If there are
    none, or pytest is missing, or ``quick`` is set, it only compares a lookup and a training step of every scheme with
    the reference.
    """
    files = [str(path) for path in sorted(ROOT.glob("tests/**/test_*.py")) if MARKER in path.read_text("utf-8")]
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if quick or missing or not files:
        return differences(device)
    marked = f"kernels(device={'gpu' if device.type == 'cuda' else 'cpu'!r})"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "-m", marked]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == NO_TESTS:
        return differences(device)
    return None if done.returncode == 0 else (done.stdout + done.stderr).strip()


def differences(device: torch.device) -> str | None:
    """Where a fused lookup or step differs from the reference, or None."""
    ids = draw_ids("zipf", SIZES, 257, seed=1).to(device)
    batch = IdBatch(ids)
    for name, scheme in SCHEMES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tables that stay full
            module = EmbeddingCollection([Table(f"c{i}", n, 12, scheme) for i, n in enumerate(SIZES)], device=device)
        if len(module.paths):
            continue  # path-based tables use the lookup of QR, then torch's matrix products
        stored = module.stored.detach().clone()
        optim.apply_in_backward(module, optim.Adagrad, lr=0.1, initial_accumulator_value=1.0)
        out = module(ids)
        grad = torch.linspace(-1, 1, out.numel(), device=device).view_as(out)
        expected = lookup.lookup(batch, stored, module.layout).view_as(out)
        state = AdagradState(torch.ones_like(stored), torch.tensor(0, device=device))
        lr = torch.tensor(0.1, dtype=torch.float64, device=device)
        constants = AdagradConstants(0.0, 1e-10)
        rules.update_(grad, batch, stored, lr, state, module.layout, rule="adagrad", constants=constants)
        try:
            torch.testing.assert_close(out, expected, msg=lambda text: f"{name}, lookup: {text}")  # noqa: B023
            out.backward(grad)
            torch.testing.assert_close(module.stored.detach(), stored, msg=lambda text: f"{name}, step: {text}")  # noqa: B023
        except AssertionError as error:
            return str(error)
    return None
