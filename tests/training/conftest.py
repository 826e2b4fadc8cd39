"""Settings of the tests of training."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Products this small are slower on several threads, far slower where other processes want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
