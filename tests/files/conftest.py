"""Settings of the tests of files."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of small files: whether they outlast a power failure is of no interest here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
