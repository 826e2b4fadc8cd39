"""Settings every test runs under."""

import os
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's functions are defined: the GPU kernels run as Python

# A first call may compile a kernel, so the time of one example says nothing.
hypothesis.settings.register_profile("quorem", deadline=None)
hypothesis.settings.load_profile("quorem")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small click log, for the tests of training.

    It is in this file because the pytest of a GPU machine did not find it in tests/training/conftest.py when it was
    given other folders as well.
    """
    from runs_of_training import small_log  # needs what the extra ``train`` brings

    return small_log(tmp_path_factory.mktemp("log") / "log")


@pytest.fixture
def nan_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN, so that an element no kernel wrote shows."""
    empty_like, new_empty = torch.empty_like, Tensor.new_empty

    def filled(make):  # type: ignore[no-untyped-def]
        def made(*args, **options):  # type: ignore[no-untyped-def]
            fresh = make(*args, **options)
            return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh

        return made

    monkeypatch.setattr(torch, "empty_like", filled(empty_like))
    monkeypatch.setattr(Tensor, "new_empty", filled(new_empty))
