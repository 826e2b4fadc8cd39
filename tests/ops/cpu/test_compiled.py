"""Kernels on disk are compiled anew when any of their sources changes; compiling is announced."""

import os

import numba
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


@pytest.mark.parametrize("quiet, rank, lines", [("", "0", 1), ("0", "0", 1), ("1", "0", 0), ("", "1", 0)])
def test_compiling_is_announced_once_and_timed(quiet, rank, lines, monkeypatch, capsys):
    monkeypatch.setenv("QUOREM_QUIET", quiet)
    monkeypatch.setenv("RANK", rank)
    compilations = compiled.Compilations()
    numba.core.event.register("numba:compile", compilations)
    try:
        functions = (lambda x: x + 1, lambda x: x + 2, lambda x: x + 3)
        dispatchers = [numba.njit(function) for function in functions]  # all alive, so that no id is used twice
        for function, dispatcher in zip(functions, dispatchers, strict=True):
            if function(0) < 3:  # the third is not a kernel
                compilations.kernels.add(id(dispatcher))
            before = compilations.seconds
            assert dispatcher(1) == function(1)
            assert (compilations.seconds > before) == (function(0) < 3)
    finally:
        numba.core.event.unregister("numba:compile", compilations)
    assert capsys.readouterr().err.splitlines() == [compiled.TEXT] * lines
    assert os.environ["QUOREM_QUIET"] == ("1" if lines else quiet)  # child processes do not repeat it
