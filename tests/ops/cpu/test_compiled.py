"""Kernels on disk are compiled anew when any of their sources changes."""

import pytest

from quorem.ops.cpu import compiled, lookup

pytestmark = pytest.mark.kernels(device="cpu")


def test_a_kernel_is_kept_under_the_stamp_of_all_its_sources():
    names = {name for name, _, _ in compiled.source_stamp()}
    assert {
        "vector.py",
        "rows.py",
        "lookup.py",
        "gradients.py",
        "rules.py",
        "replay.py",
        "layout.py",
        "state.py",
    } <= names
    assert lookup.lookup._cache._cache_file._source_stamp == compiled.source_stamp()
