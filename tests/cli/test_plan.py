"""``quorem plan``, and ``quorem train --plan``."""

import json
import re
from pathlib import Path

import pytest
import torch
from commands import invoke

import quorem
from quorem import Full, HotCold, Plan
from quorem.data.prepared import Prepared
from quorem.experiments.planning import options_of
from quorem.ops.declare import word_bytes
from quorem.training.config import RunConfig
from quorem.training.model import build_model, data_identity


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "log"
    invoke("synthesize", path, "--rows", 3000, "--scale", 0.0001)
    return path


def test_a_plan_for_data_is_printed_saved_and_trained(log: Path, tmp_path: Path) -> None:
    file, run = tmp_path / "plan.json", tmp_path / "run"
    done = invoke("plan", log, "--budget", "60kB", "--dim", 4, "--optimizer", "amsgrad", code=1)
    assert "budget ('60kB') must be at least" in done.output  # AMSGrad remembers its steps
    output = invoke("plan", log, "--budget", "30kB", "--out", file, "--dim", 4).output
    assert output.splitlines()[0].split()[:3] == ["table", "ids", "hot"] and "of 30 kB" in output
    planned = Plan.from_json(file.read_text())
    assert list(planned) == Prepared(log).names and planned.bytes <= 30_000 and planned.optimizer == "adagrad"
    assert {type(scheme) for scheme in planned.values()} == {Full, HotCold}
    train = ("train", "--data", log, "--plan", file, "--out", run, "--dim", 4, "--device", "cpu")
    assert f"plan of {len(planned)} tables" in invoke(*train).output
    config = RunConfig.from_json((run / "run.json").read_text())
    assert dict(config.plan) == dict(planned)
    model = build_model(config, Prepared(log), "meta")
    tensors = (*model.embeddings.parameters(), *model.embeddings.buffers())
    assert planned.bytes - planned.state_bytes - planned.index_bytes == sum(tensor.nbytes for tensor in tensors)


def test_a_budget_trains_the_plan_that_plan_would_make(log: Path, tmp_path: Path) -> None:
    file, run, options = tmp_path / "plan.json", tmp_path / "run", ("--dim", 4, "--optimizer", "rowwise_adagrad")
    invoke("plan", log, "--budget", "30kB", "--out", file, *options)
    train = ("train", "--data", log, "--budget", "30kB", "--out", run, *options, "--device", "cpu")
    assert "of 30 kB" in invoke(*train, "--hidden", "16,8", "--bottom", "12").output
    config, planned = RunConfig.from_json((run / "run.json").read_text()), Plan.from_json(file.read_text())
    assert dict(config.plan) == dict(planned) and config.row_dtype == options_of(planned)["row_dtype"]
    assert (config.optimizer, config.hidden, config.bottom) == ("rowwise_adagrad", (16, 8), (12,))
    assert quorem.load(run / "model.safetensors").top[2].out_features == 8
    assert "--budget makes a plan: leave out --plan" in invoke(*train, "--plan", file, code=1).output
    refused = invoke(*train, "--collisions", 8, code=1).output
    assert "says how tables are stored: leave out --scheme, --collisions" in refused


def test_a_plan_for_serving_is_trained_and_then_stored_in_few_bits(log: Path, tmp_path: Path) -> None:
    file, run = tmp_path / "plan.json", tmp_path / "run"
    output = invoke("plan", log, "--budget", "8kB", "--serving", "--dim", 4, "--out", file).output
    assert "once rows are stored in 4 bits" in output
    planned = Plan.from_json(file.read_text())
    assert planned.state_bytes == 0 and planned.bits == 4 and 7_500 < planned.bytes <= 8_000
    invoke("train", "--data", log, "--plan", file, "--out", run, "--dim", 4, "--device", "cpu")
    tables = quorem.load(run).model.embeddings
    result = json.loads((run / "result.json").read_text())
    assert f"{result['test']['log_loss']:.5f}" in invoke("evaluate", run).output  # of the rows as they are stored
    lists = tables.ranks.nbytes + word_bytes(tables.layout)
    assert tables.bits == 4 and result["embedding_bytes"] == sum(p.nbytes for p in tables.parameters()) + lists
    assert planned.bytes - planned.index_bytes == sum(t.nbytes for t in (*tables.parameters(), *tables.buffers()))


def test_a_search_trains_plans_with_other_widths(log: Path, tmp_path: Path) -> None:
    """The written plan is the one with the lowest loss."""
    file = tmp_path / "plan.json"
    output = invoke("plan", log, "--budget", "26kB", "--dim", 8, "--search", "--out", file).output
    tried = re.findall(r"narrowest rows of (\d) numbers: validation log loss ([\d.]+)", output)
    assert f"Training {len(tried)} plans on {len(Prepared(log).split('train')):,} rows each" in output
    assert {int(width) for width, _ in tried} == {8, 4, 2}
    best = min(tried, key=lambda pair: float(pair[1]))
    assert min(scheme.width or 8 for scheme in Plan.from_json(file.read_text()).values()) == int(best[0])


def test_a_log_of_one_column_is_searched_too(tmp_path: Path) -> None:
    """By DCN: DLRM needs two vectors."""
    pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')
    log, data = tmp_path / "log.csv", tmp_path / "data"
    log.write_text("y,user\n" + "".join(f"{i % 3 % 2},u{i * i % 301}\n" for i in range(1000)))
    invoke("prepare", "table", log, data, "--label", "y")
    output = invoke("plan", data, "--budget", "4kB", "--search").output
    assert "validation log loss" in output and "of 4 kB" in output


def test_where_float32_pays_for_too_few_rows_they_are_bfloat16(log: Path, tmp_path: Path) -> None:
    file, run, plans = tmp_path / "plan.json", tmp_path / "run", []
    for options in (("--row-dtype", "float32"), ()):
        invoke("plan", log, "--budget", "26kB", "--dim", 4, *options, "--out", file)
        plans.append(Plan.from_json(file.read_text()))
    assert [{table.dtype for table in planned.tables} for planned in plans] == [{torch.float32}, {torch.bfloat16}]
    assert plans[0].traffic[0] < plans[1].traffic[0] < 1  # of ids with rows of their own
    invoke("train", "--data", log, "--plan", file, "--out", run, "--dim", 4, "--device", "cpu")
    model = quorem.load(run / "model.safetensors")
    assert model.embeddings.stored.dtype == torch.bfloat16
    assert model(torch.zeros(3, 13), torch.zeros(3, len(plans[1]), dtype=torch.long)).dtype == torch.float32


def test_ids_in_any_order_are_ranked_by_their_counts(tmp_path: Path) -> None:
    """Prepared in order of appearance: the run's tables list their hot and cold ids, as planned."""
    pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')
    log, data, file = tmp_path / "raw.txt", tmp_path / "data", tmp_path / "plan.json"
    invoke("synthesize", log, "--raw", "--rows", 3000, "--scale", 0.0001)
    invoke("prepare", "criteo", log, data, "--ids", "appearance")
    invoke("plan", data, "--budget", "24kB", "--dim", 4, "--out", file)
    planned, prepared = Plan.from_json(file.read_text()), Prepared(data)
    config = RunConfig(data=data_identity(prepared), embedding_dim=4, **options_of(planned))
    tables = build_model(config, prepared, "cpu").embeddings
    ranked = next(i for i, table in enumerate(planned.tables) if table.ranked)
    counts = torch.from_numpy(prepared.frequencies(prepared.names[ranked]))
    hot = tables.ranks_of[ranked].hot
    assert counts[hot].min() >= counts.topk(len(hot)).values.min()


def test_refusals(log: Path, tmp_path: Path) -> None:
    refused = invoke("plan", log, "--budget", "much", code=1).output
    assert "budget ('much') must be a number of bytes, or with kB, MB" in refused
    file, full = tmp_path / "plan.json", {name: {"scheme": "Full"} for name in Prepared(log).names}
    invoke("plan", log, "--budget", "1MB", "--out", file)
    for arguments, message in [
        ((json.dumps({"C1": {"scheme": "Full"}}),), "plan must name every feature of the data"),
        ((json.dumps(full | {"other": {"scheme": "Full"}}),), "plan names other, which the data do not have"),
        (('{"C1": 3}',), "must be what quorem plan wrote, or JSON of names and schemes"),
        ((json.dumps(full), "--scheme", "hash"), "says how tables are stored: leave out --scheme"),
        ((file, "--dim", 8), "of width 8"),
    ]:
        train = ("train", "--data", log, "--out", tmp_path / "run", "--device", "cpu", "--plan")
        refused = invoke(*train, *arguments, code=1).output
        assert message in refused
    assert "of width 16 for" in refused
