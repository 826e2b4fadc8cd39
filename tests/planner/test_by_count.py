"""Plans by counts: predicted bytes, one threshold over all tables, a pool without two ids alike, refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from allocated import OPTIMIZERS, built, least_of, size_of, state_size, tensors_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quorem import Embedding, EmbeddingCollection, Full, HotCold, Plan, Table, optim, plan, quantize_
from quorem.paper.schemes.frequency import comes_by_frequency, places
from quorem.planner import FEW, by_count, plan_modules
from quorem.planner.by_count import CountedTables, Tally, divide
from quorem.planner.counted import plan_counted, tally
from quorem.planner.footprint import Form, StoredModules, modules_of


def zipf(n: int, visits: int, *, shuffled: int | None = None) -> torch.Tensor:
    """Falling counts, about half of them 0 or 1; in a random order, if asked for."""
    counts = (visits / (1 + torch.arange(n))).long()
    counts[n * 2 // 3 :] = 0
    if shuffled is None:
        return counts
    return counts[torch.randperm(n, generator=torch.Generator().manual_seed(shuffled))]


TABLES = [
    Table("user", 3000, 16, frequencies=zipf(3000, 5000)),
    Table("item", 900, 16, frequencies=zipf(900, 4000, shuffled=1), features=("seen", "bought")),
    Table("day", 7, 16, frequencies=torch.full((7,), 700)),
    Table("narrow", 2000, 8, frequencies=zipf(2000, 5000, shuffled=2)),
    Table("never", 50, 8, frequencies=torch.zeros(50)),
]


def state_of(module: EmbeddingCollection, optimizer: str, state_dtype: str = "float32") -> int:
    """Bytes of the state after one step on rows and matrices."""
    options = {} if state_dtype == "float32" else {"state_dtype": state_dtype}
    rows = optim.apply_in_backward(module, OPTIMIZERS[optimizer], **options)
    matrices = OPTIMIZERS[optimizer](module.projections) if len(module.projections) else None
    module(torch.zeros(2, len(module.features), dtype=torch.long)).float().sum().backward()
    if matrices is not None:
        matrices.step()
    return state_size(rows) + (0 if matrices is None else state_size(matrices))


def check_bytes(planned: Plan, tables: list[Table], optimizer: str | None = "adagrad") -> None:
    """What a plan says is what the tables take, and the optimizer after a step; saved and loaded it is the same."""
    module = built(planned, tables, planned.tables[0].dtype)
    if optimizer is not None:
        assert planned.state_bytes == state_of(module, optimizer, planned.state_dtype)
    elif planned.bits:
        quantize_(module, planned.bits)
    assert planned.bytes - planned.state_bytes - planned.index_bytes == size_of(tensors_of(module))
    assert planned.bytes <= planned.budget and Plan.from_json(planned.to_json()) == planned


def plan_with(tables: list[Table], budget: int, *, times_narrower: int, optimizer: str | None = "adagrad") -> Plan:
    """A plan whose rows are so many times narrower than vectors, in 4 bits without an optimizer."""
    form, least = Form(4, bits=0 if optimizer else 4), []
    for few in (FEW, 0):
        stored = StoredModules(modules_of(tables), optimizer, form, (torch.float32,), times_narrower, few)
        candidate = plan_counted(stored, [tally(table) for table in stored.tables], budget)
        if candidate.plan is not None:
            return candidate.plan
        least.append(candidate.least)
    raise ValueError(f"budget must be at least {min(least)} bytes")


@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS])
@pytest.mark.parametrize("share", [1.0, 0.4, 0.1, 0.03, 0.0])
def test_predicted_bytes_are_those_allocated(optimizer: str | None, share: float) -> None:
    """Two widths, two pools, lists of ids, a table that two features read, one without traffic; then in fewer bits."""
    least = least_of(TABLES, optimizer=optimizer)
    whole = plan(TABLES, "1GB", optimizer=optimizer, bits=())
    assert {type(scheme) for scheme in whole.values()} == {Full}
    budget = least + int(share * (whole.bytes - least))
    planned = plan(TABLES, budget, optimizer=optimizer)
    check_bytes(planned, TABLES, optimizer)
    if share == 0:
        with pytest.raises(ValueError, match=rf"budget \({least - 1}\) must be at least {least} bytes"):
            plan(TABLES, least - 1, optimizer=optimizer)


drawn_counts = st.lists(st.integers(0, 30), min_size=1, max_size=60)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(drawn_counts, st.sampled_from([4, 8]), st.booleans()), min_size=1, max_size=5),
    st.integers(0, 6000),
    st.sampled_from([None, "adagrad", "rowwise_adagrad", "adam"]),
    st.sampled_from([(), (8,), (4,), (8, 4)]),
)
@example([([0, 2], 4, False)], 0, None, (8,))  # a block of 16 rows in 8 bits takes more bytes than two in float32
def test_any_counts_are_planned_exactly(drawn: list, more: int, optimizer: str | None, bits: tuple[int, ...]) -> None:
    """Ties, zeros, single ids; in order or not; from the smallest budget on."""
    counts = [torch.tensor(sorted(c, reverse=True) if ordered else c) for c, _, ordered in drawn]
    tables = [Table(f"t{i}", len(c), drawn[i][1], frequencies=c) for i, c in enumerate(counts)]
    options = {"optimizer": optimizer, "bits": bits if optimizer is None else None}
    planned = plan(tables, least_of(tables, **options) + more, **options)
    check_bytes(planned, tables, optimizer)


@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS])
@pytest.mark.parametrize("times_narrower", [2, 4])
@pytest.mark.parametrize("share", [0.5, 0.05, 0.0])
def test_bytes_of_narrow_rows_are_those_allocated(optimizer: str | None, times_narrower: int, share: float) -> None:
    """Matrices count, and what an optimizer keeps for them; a table that would grow keeps the width of its vectors."""
    options = {"times_narrower": times_narrower, "optimizer": optimizer}
    least = least_of(TABLES, plan_with, **options)
    whole = plan(TABLES, "1GB", optimizer=optimizer, bits=())
    planned = plan_with(TABLES, least + int(share * (whole.bytes - least)), **options)
    widths = {name: scheme.width for name, scheme in planned.items()}
    assert (widths["user"], widths["narrow"]) == (16 // times_narrower, 8 // times_narrower)
    assert widths["day"] in (None, 16 // times_narrower)  # narrow only if the integers for wide rows cost too much
    check_bytes(planned, TABLES, optimizer)


@pytest.mark.parametrize("state_dtype", ["auto", "bfloat16", "log8"])
@pytest.mark.parametrize("share", [0.9, 0.3, 0.05])
def test_a_state_of_fewer_bytes_is_that_allocated(state_dtype: str, share: float) -> None:
    """``auto`` is one byte a number where rows in bfloat16 are too few, with the matrices and rows really stepped."""
    options = {"dtypes": (torch.float32, torch.bfloat16), "state_dtype": state_dtype}
    budget = int(share * plan(TABLES, "1GB").bytes)
    planned = plan(TABLES, budget, **options)
    assert planned.state_dtype == {"auto": "float32" if share == 0.9 else "log8"}.get(state_dtype, state_dtype)
    check_bytes(planned, TABLES)


def test_rows_become_narrower_before_much_traffic_shares_rows() -> None:
    """The widest that leave at most 16% to the pool; where all ids are seen often, all have rows of their own."""
    often = [Table(name, 1000, 16, frequencies=torch.full((1000,), 50)) for name in ("user", "item")]
    full = 2 * 2000 * 64
    schemes = [plan(often, int(full / times))["user"] for times in (0.9, 1.5, 3, 5)]
    assert schemes == [Full(), Full(width=8), Full(width=4), Full(width=2)]
    assert plan(often, full // 16)["user"].width == 2  # never fewer numbers than two, and then a pool
    for multiple, width in ((4, 4), (16, None)):  # TorchRec's kernels need a multiple of 4
        module = replace(modules_of(often)[0], row_multiple=multiple)
        assert plan_modules([module], full // 3, "adagrad", {})["user"].width == width


@pytest.mark.parametrize(("visits", "width"), [(10, 8), (11, None)])
def test_rows_have_half_the_numbers_beside_a_table_of_ids_seen_seldom(visits: int, width: int | None) -> None:
    """In training, where all ids that occur then have rows, unless the budget pays for all rows of D in float32."""
    seldom = torch.full((4000,), visits)
    tables = [Table("seldom", 4000, 16, frequencies=seldom), Table("often", 1000, 16, frequencies=seldom[:1000] * 5)]
    dtypes, full = (torch.float32, torch.bfloat16), 5000 * 64
    planned = plan(tables, int(0.8 * 2 * full), dtypes=dtypes)
    assert dict(planned) == {"seldom": Full(width=width), "often": Full(width=width)}
    assert planned.state_dtype == ("log8" if width else "float32")
    check_bytes(planned, tables)
    assert {*plan(tables, int(2.1 * full)).values(), *plan(tables, full // 2, optimizer=None).values()} == {Full()}


@pytest.mark.parametrize("optimizer", ["adagrad", None])
@pytest.mark.parametrize("times_narrower", [1, 4])
def test_one_threshold_goes_over_all_tables(optimizer: str | None, times_narrower: int) -> None:
    """No hot id is rarer than a cold one, no cold one than one of the rest, whatever their tables."""
    tables = [table for table in TABLES if table.embedding_dim == 16 and (table.name != "day" or times_narrower == 1)]
    # From 2,900 bytes on, "item" in 4 bits and 4 numbers is smaller in full than with lists: its rare ids are hot then.
    budget = (40_000 if optimizer else 5_000) if times_narrower == 1 else (15_000 if optimizer else 2_600)
    planned = plan_with(tables, budget, times_narrower=times_narrower, optimizer=optimizer)
    assert len(planned.pools) == 1 and (planned.bits == 4) == (optimizer is None)
    hot, cold, rest = [], [], []
    for table, spec, ranks in zip(tables, *_specs(built(planned, tables)), strict=True):
        place = places(spec, ranks)
        hot += table.frequencies[place < spec.num_hot].tolist()
        cold += table.frequencies[place >= spec.num_own].tolist()
        rest += table.frequencies[(place == spec.num_hot) & (place < spec.num_own)].tolist() if spec.num_rest else []
    assert min(hot) >= max(cold) >= min(cold) > max(rest)
    assert planned.pools[0].num_ids == len(cold)
    shares = torch.tensor([sum(hot), sum(cold), sum(rest)]) / (sum(hot) + sum(cold) + sum(rest))
    assert planned.traffic == pytest.approx(shares.tolist())


def _specs(module: EmbeddingCollection) -> tuple[list, list]:
    """Of each table, what it is and its lists; a full table has a hot id in each place."""
    specs = []
    for spec in module.specs:
        n = spec.num_embeddings
        specs.append(HotCold(n, cold=Full(), force=True).spec(n, 16) if spec.scheme == Full() else spec)
    return specs, module.ranks_of


def test_no_two_cold_ids_of_any_table_share_both_rows() -> None:
    """By brute force over the union of the tables; with hot ids, no two ids but the rest have the same rows."""
    tables = [table for table in TABLES if table.embedding_dim == 16]
    planned = plan_with(tables, 30_000, times_narrower=1)
    module = built(planned, tables)
    rows = []
    for f, feature in enumerate(module.features):
        table = tables[module.table_of[f]]
        if feature == "bought":  # reads the table that "seen" reads
            continue
        ids = torch.zeros(table.num_embeddings, len(module.features), dtype=torch.long)
        ids[:, f] = torch.arange(table.num_embeddings)
        rows += [tuple(r) for r in module.row_numbers(ids)[:, f].tolist()]
    num_rest = sum(spec.num_rest for spec in module.specs)
    rest_rows = sum(spec.num_rest > 0 for spec in module.specs)
    assert planned.pools[0].num_ids > planned.pools[0].num_rows
    assert len(rows) - len(set(rows)) == num_rest - rest_rows


def test_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case by case, in rows of one byte: all kept ids hot; a pool of 0.6; fewer where fewer ids are without a row."""
    monkeypatch.setattr(by_count, "KEPT_PER_ROW", 4)
    monkeypatch.setattr(by_count, "RARELY", 1)
    counts = np.repeat([100, 10, 2, 1, 0], [50, 150, 800, 2000, 1000])
    one, none = np.array([1]), np.array([0])
    tables = CountedTables([Tally.of(counts, in_order=True)], one, none, none, lambda division: 0)

    def of(budget: int) -> tuple[int, int, int, int]:
        division = divide(tables, budget)
        return tuple(int(x[0]) for x in (division.hot, division.cold, division.rest, division.pools))

    assert of(4000) == (4000, 0, 0, 0)
    assert of(3999) == (3000, 0, 1000, 0)  # ids that were never seen share a row, whatever is left
    assert of(1500) == (1499, 0, 2501, 0)  # all seen twice, and some seen once
    assert of(1001) == (1000, 0, 3000, 0)
    assert of(800) == (800 - 1 - 200, 401, 3000, 200)  # as many rows as ids that have none
    assert of(400) == (400 - 1 - 240, 841, 3000, 240)  # 0.6 of 400
    assert of(240) == (240 - 1, 0, 3761, 0)  # above four ids a row those seen twice are the rest, and the others fit
    assert of(1) == (0, 0, 4000, 0) and divide(tables, 0) is None
    monkeypatch.undo()
    rare = divide(tables, 400)
    assert int(rare.hot[0]) == 399 and not rare.pools.any()


def test_ids_that_come_by_frequency_need_no_lists() -> None:
    """Nor does an id 0 or 1 that occurs rarely: prepared data keep these for missing and unknown values."""
    falling = zipf(3000, 5000)
    late_null = torch.cat([torch.tensor([3, 0]), falling[:2998]])
    assert comes_by_frequency(falling) and comes_by_frequency(late_null)
    assert not comes_by_frequency(torch.tensor([0, 2, 5, 9])) and comes_by_frequency(torch.tensor([7]))
    for counts, ranked in ((falling, False), (late_null, False), (zipf(3000, 5000, shuffled=0), True)):
        table = Table("t", 3000, 16, frequencies=counts)
        planned = plan([table], 30_000)
        assert planned.tables[0].ranked == ranked and (built(planned, [table]).ranks.numel() > 0) == ranked
    assert planned.applied_to([Table("t", 3000, 16)])[0].frequencies == "loaded"
    with pytest.raises(ValueError, match=r"plan must have table 't' with 9 ids of width 16"):
        planned.applied_to([Table("t", 9, 16)])


def test_bits_are_the_widest_that_share_no_row_or_else_the_fewest() -> None:
    counts = torch.cat([torch.full((1000,), 5), torch.ones(3000), torch.zeros(6000)]).long()
    tables = [Table("t", 10_000, 16, frequencies=counts)]
    bits = {budget: plan(tables, budget, optimizer=None).bits for budget in (70_000, 25_000, 14_000, 9_000)}
    assert bits == {70_000: None, 25_000: 8, 14_000: 4, 9_000: 4}
    assert plan(tables, 25_000, optimizer=None, bits=()).bits is None
    assert plan(tables, 25_000).bits is None  # training
    half = plan(tables, 110_000, dtypes=(torch.float32, torch.bfloat16))
    assert half.tables[0].dtype == torch.bfloat16 and not half.pools


def test_modules_have_pools_of_their_own() -> None:
    """As ``compress_`` makes them: a module a table."""
    model = torch.nn.ModuleDict({"user": torch.nn.Embedding(3000, 16), "item": torch.nn.Embedding(3000, 16)})
    counts = {"user": zipf(3000, 5000), "item": zipf(3000, 9000, shuffled=1)}
    planned = plan(model, 120_000, frequencies=counts)
    assert [pool.name for pool in planned.pools] == ["pool1", "pool2"]
    modules = [Embedding(3000, 16, planned["user"]), Embedding(3000, 16, planned["item"], frequencies=counts["item"])]
    tensors = [t for module in modules for t in tensors_of(module)]
    assert planned.bytes - planned.state_bytes - planned.index_bytes == size_of(tensors)


@pytest.mark.parametrize(("twice", "bits"), [(0, None), (2000, 8)])
def test_rows_are_served_in_fewer_bits_where_ids_seen_once_come_back(twice: int, bits: int | None) -> None:
    """Which the number of ids seen twice says; the budget pays for a float32 row for all seen more than once."""
    counts = torch.tensor([50] * 1000 + [2] * twice + [1] * 5000)
    table = Table("user", len(counts), 16, frequencies=counts)
    planned = plan([table], (1100 + twice) * 64, optimizer=None)
    assert planned.bits == bits and isinstance(planned["user"], Full if bits else HotCold)
    assert plan([table], (1100 + twice) * 128).tables[0].dtype == torch.float32  # in training as before


def test_the_text_of_a_plan_says_what_is_in_which_number():
    counts = 10**7 // torch.arange(1, 10_001)
    tables = [Table("user", 10_000, 16, frequencies=counts), Table("item", 1000, 16, frequencies=counts[:1000])]
    lines = str(plan(tables, "500kB")).splitlines()
    assert lines[0].endswith("  stored as") and lines[2].endswith("kB  rows of 4 numbers")
    assert lines[-1].endswith("together 353.2 kB of 500 kB")
    assert str(plan(tables, "9MB")).endswith("of 9 MB, every table is full")
