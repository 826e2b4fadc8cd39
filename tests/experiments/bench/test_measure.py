"""What is measured: the grid of settings, the ids, the bytes, and the order of calls."""

import math
from itertools import pairwise, product

import pytest
import torch

from quorem.experiments.bench import measure
from quorem.experiments.bench.grid import MODES, PRESETS, SCHEMES, draw_ids, scheme_of

SIZES = (50, 4, 1000, 7)
CPU = torch.device("cpu")


def test_calls_take_turns():
    order = []
    calls = [measure.Call(name, lambda name=name: order.append(name)) for name in "ab"]
    measure.time_in_turns(calls, measure.Effort(sample=0.0, total=0.0, least=3, most=3))
    assert "".join(name for name, other in pairwise(order) if name != other).startswith("ababab")
    assert [len(call.seconds) for call in calls] == [3, 3]


@pytest.mark.parametrize("mode", ["forward", "step"])
def test_bytes_count_ids_distinct_rows_vectors_and_state(mode):
    ids = draw_ids("zipf", SIZES, 40, seed=0)
    specs = [SCHEMES["QR(4)"].spec(n, 8) for n in SIZES]
    rows = {
        (f, k, int(p(torch.tensor(i))))
        for f, spec in enumerate(specs)
        for i in ids[:, f].tolist()
        for k, p in enumerate(spec.partitions)
    }
    pass_ = 40 * 4 * 8 + len(rows) * 8 * 4 + 40 * 4 * 8 * 4
    expected = pass_ if mode == "forward" else 2 * pass_ + len(rows) * 8 * 4 * 3
    assert measure.bytes_to_move(specs, [ids], mode) == expected


@pytest.mark.parametrize("how", ["zipf", "uniform"])
def test_ids_follow_their_distribution(how):
    ids = draw_ids(how, (99, 3), 20_000, seed=0)
    assert ids.min() == 0 and ids.amax(0).tolist() == [98, 2]
    p = math.log(2) / math.log(100) if how == "zipf" else 1 / 99
    deviation = math.sqrt(p * (1 - p) / 20_000)
    assert abs((ids[:, 0] == 0).double().mean() - p) < 4 * deviation


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_measure_nothing_twice_and_what_the_targets_ask(preset):
    cells = [
        (mode, scheme_of(p, scheme), dim, p, how, batch)
        for grid in PRESETS[preset]
        for mode, scheme, dim, how, batch in product(grid.mode, grid.scheme, grid.dim, grid.ids, grid.batch)
        for p in grid.providers(scheme)
    ]
    assert len(cells) == len(set(cells))
    wanted = product(MODES, ["QR(4)"], [16], ["fbgemm", "fbgemm_fastest", "fused"], ["zipf"], [1, 128, 2048, 16384])
    assert set(wanted) <= set(cells)
