"""Functions that only kernels call: with and without machine code of their own, kernels compute the same."""

import numba
import numpy as np
import pytest

from quorem.ops.cpu import compiled, inlining

pytestmark = pytest.mark.kernels(device="cpu")


def sums(inner):
    """A kernel with two levels of inner functions."""

    def scaled(values, i, factor):
        return values[i] * factor / (values[0] + 3)

    def sum_of(values, factor):
        total = 0.0
        for i in range(len(values)):
            total += inner_scaled(values, i, factor)
        return total

    inner_scaled = inner(scaled)
    inner_sum = inner(sum_of)
    return numba.njit(lambda values: (inner_sum(values, 2), inner_sum(values, 0.5)))


def test_kernels_compute_the_same_either_way():
    assert inlining.enabled(), "the installed version of Numba is not in TESTED: try it, then add it"
    values = np.random.default_rng(0).random(100)
    usual = sums(lambda function: numba.njit(function, **compiled._INNER))
    assert sums(compiled.inner)(values) == usual(values)


@pytest.mark.parametrize(
    "version, switch, used", [("0.68.9", "1", True), ("0.68.9", "0", False), ("0.99.0", "1", False)]
)
def test_it_is_used_only_where_it_was_tested_and_not_switched_off(version, switch, used, monkeypatch):
    monkeypatch.setattr(numba, "__version__", version)
    monkeypatch.setenv("QUOREM_FAST_COMPILE", switch)
    assert inlining.enabled() == used
