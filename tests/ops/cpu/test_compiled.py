"""Kernels on disk are compiled anew when any of their sources changes; compiling is announced."""

import os

import numba
import pytest

from quorem.ops.cpu import compiled, lookup

pytestmark = pytest.mark.kernels(device="cpu")


def test_a_kernel_is_kept_under_the_stamp_of_all_its_sources():
    names = {name for name, _, _ in compiled.source_stamp()}
    assert {"vector.py", "rows.py", "lookup.py", "rules.py", "layout.py", "state.py"} <= names
    assert lookup.lookup_kernel._cache._cache_file._source_stamp == compiled.source_stamp()


@pytest.mark.parametrize("quiet, rank, lines", [("", "0", 1), ("0", "0", 1), ("1", "0", 0), ("", "1", 0)])
def test_compiling_a_kernel_is_announced_once(quiet, rank, lines, monkeypatch, capsys):
    monkeypatch.setenv("QUOREM_QUIET", quiet)
    monkeypatch.setenv("RANK", rank)
    compilations = compiled.Compilations()
    numba.core.event.register("numba:compile", compilations)
    try:
        other, *kernels = (numba.njit(function) for function in (lambda x: x + 1, lambda x: x + 2, lambda x: x + 3))
        compilations.kernels |= set(map(id, kernels))
        assert other(1) == 2 and not capsys.readouterr().err
        assert [kernel(1) for kernel in kernels] == [3, 4]
    finally:
        numba.core.event.unregister("numba:compile", compilations)
    assert capsys.readouterr().err.splitlines() == [compiled.TEXT] * lines
    assert os.environ["QUOREM_QUIET"] == ("1" if lines else quiet)  # child processes do not repeat it
