"""Plans: what they predict is what is allocated, what they lose falls with the budget, and nothing grows."""

import json
import math

import numpy as np
import pytest
import torch
from allocated import OPTIMIZERS, SMALL, built, least_of, size_of, state_size, tensors_of
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import quorem
from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, Full, GeneralizedQR, Plan, Table, optim, plan
from quorem.convert.follow import optimizer_name
from quorem.paper.sizes import balanced_sizes
from quorem.planner.budget import parse_bytes

CRITEO = [1460, 583, 10131226, 2202607, 305, 23, 12517, 633, 3, 93145, 5683, 8351592, 3194, 27, 14992, 5461305, 10]
CRITEO += [5652, 2172, 3, 7046546, 17, 15, 286180, 104, 142571]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS])
@pytest.mark.parametrize("share", [1.0, 0.3, 0.02, 0.0])
def test_a_collection_takes_what_was_predicted(optimizer: str | None, share: float, dtype: torch.dtype) -> None:
    """From full tables down to the smallest budget; several widths, and a table that two features read."""
    tables = [*SMALL, Table("f", 900, 16, features=("f1", "f2"))]
    options = {"optimizer": optimizer, "dtypes": (dtype,)}
    least = least_of(tables, **options)
    everything = plan(tables, "1GB", **options)
    assert {type(scheme) for scheme in everything.values()} == {Full}
    planned = plan(tables, max(least, int(share * everything.bytes)), **options)
    module = built(planned, tables, dtype)
    taken = size_of(tensors_of(module))
    state = 0
    if optimizer is not None:
        rows = {} if planned.state_dtype == "float32" else {"state_dtype": planned.state_dtype}
        used = optim.apply_in_backward(module, OPTIMIZERS[optimizer], **rows)
        state = state_size(used)
        assert optimizer_name(used) == optimizer
    is_small = optimizer == "adagrad" and dtype.itemsize == 2 and share < 1
    assert planned.state_dtype == ("log8" if is_small else "float32")
    assert planned.bytes - planned.state_bytes == taken
    assert planned.state_bytes == state
    if share == 0:
        assert planned.bytes == least
        with pytest.raises(ValueError, match=rf"budget \({least - 1}\) must be at least {least} bytes"):
            plan(tables, least - 1, **options)


class Model(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.user = nn.Embedding(5000, 16, sparse=sparse)
        self.bags = nn.ModuleDict({"item": nn.EmbeddingBag(3000, 4, mode="sum", sparse=sparse)})
        self.day = nn.Embedding(7, 16, sparse=sparse)
        self.again = self.user
        self.tied = nn.Embedding(5000, 16, sparse=sparse)
        self.tied.weight = self.user.weight
        self.top = nn.Linear(16, 1)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS])
@pytest.mark.parametrize("sparse", [False, True])
def test_modules_take_what_was_predicted(optimizer: str, sparse: bool) -> None:
    """A module a table, as ``compress_`` makes them; dense gradients are torch's business."""
    model = Model(sparse)
    whole = plan(model, "1GB", optimizer=optimizer)
    assert list(whole) == ["user", "bags.item", "day"]
    fixed = whole.shared_state_bytes
    planned = plan(model, int((whole.bytes - fixed) * 0.2) + fixed, optimizer=optimizer)
    assert planned["day"] == Full() and not isinstance(planned["user"], Full)
    modules = [
        Embedding(5000, 16, planned["user"], sparse=sparse),
        EmbeddingBag(3000, 4, planned["bags.item"], mode="sum", sparse=sparse),
        Embedding(7, 16, planned["day"], sparse=sparse),
    ]
    tied = size_of(list(modules[0].buffers()))  # the tied module has a layout of its own
    assert planned.bytes - planned.state_bytes == size_of([t for m in modules for t in tensors_of(m)]) + tied
    parameters = [p for module in modules for p in module.parameters()]
    if sparse:
        used: torch.optim.Optimizer = OPTIMIZERS[optimizer](parameters)
    else:
        dense = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        dense |= dict.fromkeys(("adagrad", "rowwise_adagrad"), torch.optim.Adagrad)
        options = {"amsgrad": True} if optimizer == "amsgrad" else {}
        used = dense.get(optimizer, torch.optim.Adam)(parameters, **options)
    for module in modules:
        module(torch.tensor([[1, 2]])).sum().backward()
    used.step()
    assert planned.state_bytes == state_size(used)


tables_drawn = st.lists(st.tuples(st.integers(1, 10**9), st.sampled_from([1, 2, 3, 16, 64])), min_size=1, max_size=6)


@given(tables_drawn, st.lists(st.integers(1, 10**12), min_size=2, max_size=5), st.sampled_from([None, *OPTIMIZERS]))
def test_more_bytes_never_cost_more(sizes: list[tuple[int, int]], budgets: list[int], optimizer: str | None) -> None:
    """And no plan exceeds its budget, or stores more than the full table."""
    tables = [Table(f"t{i}", n, d) for i, (n, d) in enumerate(sizes)]
    costs = []
    for budget in sorted(budgets):
        try:
            planned = plan(tables, budget, optimizer=optimizer)
        except ValueError:
            assert not costs  # whatever fits fits a larger budget too
            continue
        costs.append(planned.cost)
        assert planned.bytes <= budget
        for table in planned.tables:
            spec = table.scheme.spec(table.num_embeddings, table.embedding_dim)
            assert spec.fallback is None and table.bytes == 4 * spec.num_parameters <= table.bytes_before
    assert costs == sorted(costs, reverse=True)


def test_the_scheme_follows_from_the_budget() -> None:
    """All tables that shrink have the same collisions, and with one fewer they would not fit."""
    tables = [Table(f"C{i + 1}", n, 16) for i, n in enumerate(CRITEO)]
    for budget, worst in (("1GB", QR), ("36MB", QR), ("2MB", GeneralizedQR), ("500kB", GeneralizedQR)):
        planned = plan(tables, budget)
        assert type(planned["C3"]) is worst and planned.bytes <= parse_bytes(budget)
        kept = [table.num_embeddings for table in planned.tables if table.scheme == Full()]
        compressed = [table.num_embeddings for table in planned.tables if table.scheme != Full()]
        assert max(kept) < min(compressed)  # a threshold, as the paper has
        collisions = {s.num_collisions for s in planned.values() if isinstance(s, QR)}
        roots = {math.isqrt(n) for n in CRITEO}  # the most that QR has
        assert len(collisions - roots) <= 1
        if budget == "1GB":
            fewer = [QR(c - 1) if c > 2 else Full() for c in collisions for _ in tables]
            rows = [sum(rows for rows, _ in fewer[i].spec(n, 16).shapes) for i, n in enumerate(CRITEO) if n > 1000]
            assert sum(rows) * 16 * 8 > parse_bytes(budget)


def test_the_fewest_rows() -> None:
    """At the smallest budget every table has the fewest rows of any number of partitions up to four."""
    sizes = [1460, 93145, 10131226]
    tables = [Table(f"t{n}", n, 16) for n in sizes]
    planned = plan(tables, least_of(tables))
    for n, scheme in zip(sizes, planned.values(), strict=True):
        rows = sum(rows for rows, _ in scheme.spec(n, 16).shapes)
        assert rows == min(sum(balanced_sizes(n, k)) for k in (2, 3, 4))


def test_tables_too_small_to_shrink_stay_full() -> None:
    """QR(2) of 5 ids stores 3 + 2 rows; of 4 ids nothing stores fewer, D = 1 or not."""
    tables = [Table(f"{n}x{d}", n, d) for n in range(1, 9) for d in (1, 16)]
    tables += [Table("large", 100_000, 16)]  # without it, the layout of two stored tables an id is not worth its bytes
    least = plan(tables, least_of(tables, optimizer=None), optimizer=None)
    kept = {name for name, scheme in least.items() if scheme == Full()}
    assert kept == {f"{n}x{d}" for n in range(1, 6) for d in (1, 16)}
    assert all(table.bytes < table.bytes_before for table in least.tables if table.scheme != Full())


@pytest.mark.parametrize("sizes", [[(20, 2)], [(2, 1), (7, 1)], [(20, 2), (19, 2)]])
def test_tiny_tables_fit_though_layouts_take_most_of_the_bytes(sizes: list[tuple[int, int]]) -> None:
    tables = [Table(f"t{i}", *size) for i, size in enumerate(sizes)]
    whole, least = plan(tables, "1MB").bytes, least_of(tables)
    assert least <= whole
    for budget in {*range(max(least, whole - 200), whole, 8), least, whole}:
        assert plan(tables, budget).bytes <= budget
    assert plan(tables, whole).bytes == whole


def test_frequencies_say_which_rows_are_worth_keeping() -> None:
    """Two tables of one size: traffic on few ids needs few rows; and a table that is hardly read gets the fewest."""
    n = 10_000
    even, steep = torch.ones(n), torch.zeros(n)
    steep[:100] = n / 100
    tables = [Table("even", n, 16), Table("steep", n, 16)]
    planned = plan(tables, 900_000, frequencies={"even": even, "steep": steep})
    assert planned.tables[0].bytes > 3 * planned.tables[1].bytes
    assert planned.tables[1].cost == 0 and planned["steep"] != Full()
    given_to_tables = [Table("even", n, 16, frequencies=even), Table("steep", n, 16, frequencies=steep)]
    assert plan(given_to_tables, 900_000) == planned
    rare = plan(tables, 90_000, frequencies={"even": even, "steep": even / 1000})
    assert rare.tables[0].bytes > 2 * rare.tables[1].bytes


def test_counts_of_some_tables_do_not_matter_and_a_warning_says_so() -> None:
    tables = [Table("t", 1000, 16), Table("not counted", 3, 16)]
    with pytest.warns(UserWarning, match="frequencies has no counts of not counted: all tables are planned as if"):
        planned = plan(tables, 20_000, frequencies={"t": torch.arange(1000)})
    assert planned == plan(tables, 20_000) and planned.tables[0].cost == round(1 - 1 / planned["t"].num_collisions, 3)


def test_narrower_rows_come_before_fewer() -> None:
    tables = [Table("t", 100_000, 16)]
    budget = 100_000 * 16 * 2 + 10_000
    both = plan(tables, budget, optimizer=None, dtypes=(torch.float32, torch.bfloat16))
    assert both["t"] == Full() and both.tables[0].dtype == torch.bfloat16
    wide = plan(tables, 10 * budget, optimizer=None, dtypes=(torch.float32, torch.bfloat16))
    assert wide.tables[0].dtype == torch.float32
    half = nn.Embedding(1000, 4, dtype=torch.float16)
    assert plan(half, "1MB").tables[0].dtype == torch.float16  # its own


def test_quorem_modules() -> None:
    model = nn.Module()
    model.tables = EmbeddingCollection([Table("user", 5000, 16), Table("day", 7, 16)])
    model.item = Embedding(3000, 8, Full())
    model.compressed = Embedding(3000, 8, QR(4))
    planned = plan(model, "100kB", optimizer=None)
    assert list(planned) == ["tables.user", "tables.day", "item"]
    meta = nn.Embedding(10**9, 64, device="meta")
    assert plan(meta, "1GB").bytes <= 10**9
    unknown = Embedding(300, 8, Full(), unknown="hash")
    assert plan(unknown, "100kB", optimizer=None).bytes == size_of(tensors_of(unknown))
    with pytest.raises(ValueError, match=r"model_or_tables \(Embedding\) must hold an embedding table"):
        plan(quorem.quantize_(unknown), "100kB")


ONE = [Table("t", 3, 16)]


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        (SMALL, {"optimizer": "lion"}, r"optimizer \('lion'\) must be None or one of 'sgd', 'adagrad'"),
        (nn.Linear(2, 2), {}, r"model_or_tables \(Linear\) must hold an embedding table"),
        ({"a": (9, 4)}, {}, r"model_or_tables \(dict\) must be an nn.Module or a list of quorem.Table"),
        (ONE, {"frequencies": {"z": torch.ones(3)}}, r"frequencies has no table to go with 'z'"),
        (ONE, {"frequencies": {"t": torch.ones(2)}}, r"frequencies\['t'\] has shape \(2,\) but must be .* \(3\)"),
        (ONE, {"frequencies": {"t": torch.tensor([1.0, math.nan, 2.0])}}, r"frequencies\['t'\]\[1\] \(nan\) must be"),
        (ONE, {"frequencies": {"t": torch.tensor([1, 2, -3])}}, r"frequencies\['t'\]\[2\] \(-3\) must be at least 0"),
        (ONE, {"frequencies": torch.ones(3)}, r"frequencies \(Tensor\) must be a mapping from names of tables"),
        (ONE, {"dtypes": (torch.int16,)}, r"dtypes \(\(torch.int16,\)\) must be one or more of"),
        (ONE, {"dtypes": torch.float32}, r"dtypes \(torch.float32\) must be a sequence, such as \(torch.float32,\)"),
        (ONE, {"bits": 8}, r"bits \(8\) must be a sequence, such as \(8,\)"),
        (ONE, {"bits": (8,)}, r"bits \(\(8,\)\) must go with frequencies of every table and optimizer=None"),
        (ONE, {"bits": (2,), "optimizer": None, "frequencies": {"t": torch.ones(3)}}, r"bits \(2\) must be 8 or 4"),
        (ONE, {"optimizer": "adam", "state_dtype": "log8"}, r"state_dtype .*log8.* must be .*'float32' for adam"),
        (ONE, {"state_dtype": "int4"}, r"state_dtype \('int4'\) must be one of"),
        (ONE, {"optimizer": None, "state_dtype": "log8"}, r"state_dtype \('log8'\) must go with an optimizer"),
    ],
)
def test_refusals(tables: object, options: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        plan(tables, "1MB", **options)


def test_a_plan_is_a_mapping_that_prints_and_saves() -> None:
    planned = plan(SMALL, "5MB", optimizer="adam")
    assert list(planned) == ["a", "b", "c", "d", "e"] and len(planned) == 5 and planned["d"] == Full()
    lines = str(planned).splitlines()
    assert lines[0].split() == ["table", "ids", "D", "before", "after", "state", "scheme"]
    assert lines[1].startswith("a ") and lines[-1].startswith("total") and "of 5 MB" in lines[-1]
    assert repr(planned).startswith("Plan(5 tables,")
    assert Plan.from_json(planned.to_json()) == planned
    with pytest.raises(KeyError):
        planned["z"]
    with pytest.raises(AttributeError):
        planned.budget = 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="other"), "must be an object of format 'quorem-plan', version 1"),
        (lambda d: d.pop("tables"), "tables is missing"),
        (lambda d: d.update(optimizer="lion"), "optimizer \\('lion'\\) must be one of"),
        (lambda d: d.update(bits=5), "bits \\(5\\) must be one of 8, 4"),
        (lambda d: d["tables"][0].update(num_embeddings=0), "num_embeddings \\(0\\) must be"),
        (lambda d: d["tables"][0].update(dtype="int16"), "tables.0..dtype: 'int16' must be one of"),
        (lambda d: d["tables"][0].update(name="b"), "names of tables \\('b'\\) must be unique"),
        (lambda d: d["tables"][0].update(scheme={"scheme": "None"}), "must be an object whose 'scheme' is one of"),
    ],
)
def test_a_damaged_plan_is_refused(change, message: str) -> None:
    values = json.loads(plan(SMALL, "300kB").to_json())
    del values["checksum"]
    change(values)
    with pytest.raises(ValueError, match=message):
        Plan.from_json(json.dumps(values))
    with pytest.raises(ValueError, match="is not a plan"):
        Plan.from_json("{")


def test_a_plan_has_a_checksum() -> None:
    text = plan(SMALL, "300kB").to_json()
    damaged = text.replace('"budget": 300000', '"budget": 300001')
    assert damaged != text
    with pytest.raises(ValueError, match="is not a plan: it differs from its checksum; if you edited it, remove"):
        Plan.from_json(damaged)


SIZES = {"512MB": 512 * 10**6, "2GiB": 2**31, "1.5 kB": 1500, "7": 7, "7B": 7, "0.1TB": 10**11, " 3mb ": 3 * 10**6}


@pytest.mark.parametrize(("text", "size"), [*SIZES.items(), (np.int64(7), 7)])
def test_budgets(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1e3", "1 XB", "1,000", "1.MB", "nan"])
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"budget \(.*\) must be a number of bytes, or with kB, MB"):
        parse_bytes(text)


def test_budgets_of_the_wrong_kind() -> None:
    for wrong in (1.5, torch.tensor(1.5), True, None):
        with pytest.raises(TypeError, match=r"budget \(.*\) must be a number of bytes, or a string such as '512MB'"):
            parse_bytes(wrong)
    for wrong in (0, -5, "0MB"):
        with pytest.raises(ValueError, match=r"must be at least 1 byte"):
            parse_bytes(wrong)
