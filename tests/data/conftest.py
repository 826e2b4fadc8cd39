"""Syncing guards against a power failure, which no test can see, and takes most of the time of a small run."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
