"""Allocations against the best of all combinations."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quorem.planner.allocate import allocate, hulls


@given(st.data())
def test_allocations_are_near_the_best(data: st.DataObject) -> None:
    """Against every combination: never over the budget, and behind the best by less than one step's saving."""
    choice = st.tuples(st.integers(1, 50), st.integers(0, 30))
    drawn = data.draw(st.lists(st.lists(choice, min_size=1, max_size=4), min_size=1, max_size=3))
    table = np.repeat(np.arange(len(drawn)), [len(choices) for choices in drawn])
    size, cost = np.array([pair for choices in drawn for pair in choices]).T
    corners = hulls(table, size, cost.astype(float))
    table, size, cost = table[corners], size[corners], cost[corners].astype(float)
    sizes, costs = ([each[table == t].tolist() for t in range(len(drawn))] for each in (size, cost))
    assert all(a < b for one in sizes for a, b in itertools.pairwise(one))
    assert all(a > b for one in costs for a, b in itertools.pairwise(one))
    for choices, on_sizes, on_costs in zip(drawn, sizes, costs, strict=True):
        assert on_sizes[0] == min(s for s, _ in choices) and on_costs[-1] == min(c for _, c in choices)
        at = np.interp([s for s, _ in choices], on_sizes, on_costs)  # nothing lies below the hull
        assert all(at <= np.array([c for _, c in choices]) + 1e-9)
    budget = sum(size[0] for size in sizes) + data.draw(st.integers(0, 100))
    taken = allocate(table, size, cost, budget) - np.searchsorted(table, np.arange(len(drawn)))
    assert sum(size[i] for size, i in zip(sizes, taken, strict=True)) <= budget
    cost = sum(c[i] for c, i in zip(costs, taken, strict=True))
    best = min(
        sum(c[i] for c, i in zip(costs, combination, strict=True))
        for combination in itertools.product(*(range(len(size)) for size in sizes))
        if sum(size[i] for size, i in zip(sizes, combination, strict=True)) <= budget
    )
    largest_step = max((a - b for c in costs for a, b in itertools.pairwise(c)), default=0)
    assert best <= cost <= best + largest_step
