"""Settings every test runs under."""

import os

import hypothesis
import pytest
import torch

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
