"""Settings of the tests of the CPU kernels, which need Numba: ``pip install "quorem[cpu]"``."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = [] if find_spec("numba") else ["test_*.py"]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four threads for any amount of work."""
    from quorem.ops.cpu import launch

    before = torch.get_num_threads()
    monkeypatch.setattr(launch, "GRAIN", 1)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)
