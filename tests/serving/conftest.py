"""What the tests of serving share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with a column of lists, and a run on it (``runs_to_serve``)."""
    from runs_to_serve import train_on_table

    path = tmp_path_factory.mktemp("serve")
    train_on_table(path)
    return path
