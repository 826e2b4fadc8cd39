"""Settings every test runs under."""

import gc
import os
import shutil
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's functions are defined: the GPU kernels run as Python

torch.set_num_threads(1)  # on several, small products are slower, far slower where other processes want the cores

collect_ignore_glob = ["integrations/torchrec_*.py"]  # they help tests, and have no examples for --doctest-modules

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NO_NETWORK = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}

# A first call may compile a kernel, so the time of one example says nothing.
hypothesis.settings.register_profile("quorem", deadline=None)
hypothesis.settings.load_profile("quorem")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: `pytest -m gpu` where there is one"))


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """What lives before a file's tests is not searched: compress_ and quantize_ look for optimizers in all objects.

    Those of pytest and of the libraries that other files import would take seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_sync() -> Iterator[None]:
    """Syncing guards against a power failure, which no test can see, and takes most of the time of a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small click log, for the tests of training.

    It is in this file because the pytest of a GPU machine did not find it in tests/training/conftest.py when it was
    given other folders as well.
    """
    from runs_of_training import small_log

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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a network; skips the test where there is none."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1300,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", NO_NETWORK)
    yield driver
    driver.quit()
