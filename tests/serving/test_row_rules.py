"""An exported model is whole: by the JSON beside it, plain Python makes the inputs that ``quorem predict`` makes."""

import csv
import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import numpy as np
import onnxruntime
import polars as pl
import torch
from commands import invoke

import quorem
from quorem.data import ClickLog, synthesize
from quorem.data.batches import Batch
from quorem.data.config import PrepareConfig
from quorem.data.prepared import Prepared
from quorem.data.table import prepare_table
from quorem.paper.hashing import hash_strings
from quorem.serving.predict import predict
from quorem.serving.scorer import Scorer, write_row_rules
from quorem.training.config import RunConfig
from quorem.training.loop import train
from quorem.training.model import data_identity

EXAMPLE = Path(__file__).parents[2] / "examples" / "encode_row.py"
spec = importlib.util.spec_from_file_location("encode_row", EXAMPLE)
encode_row = importlib.util.module_from_spec(spec)
spec.loader.exec_module(encode_row)

CITIES = ["Springfield, IL", "São Paulo", 'The "Hub"', "NA", "007", "7", " Paris ", "back\\slash", "", "x" * 70]
TAGS = ["sport", "art & craft", "C++", "", "NA"]


def write_visits(path: Path, num_rows: int, new: str = "") -> None:
    draw = random.Random(7)
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["subscribed", "age", "income", "score", "city", "member", "tags"])
        for _ in range(num_rows):
            age = draw.choice(["NA", "", "-3", "41", "17.0", "1e3", "inf"])
            income = draw.choice(["nan", f"{draw.gauss(0, 3e4):.2f}"])
            tags = "|".join(draw.sample(TAGS, draw.randrange(5)))
            label = draw.choice(["yes", "no"])
            city = draw.choice(CITIES)
            member = draw.choice([f"m{draw.randrange(90)}", new])
            rows.writerow([label, age, income, f"{draw.random():.17g}", city, member, tags])


def visits_run(folder: Path, config: PrepareConfig, bags: bool = True) -> Path:
    write_visits(folder / "visits.csv", 500)
    categorical = ["city", "member", *(["tags"] if bags else [])]
    columns = {"label": "subscribed", "positive": "yes", "dense": ["age", "income", "score"]}
    multi = ["tags"] if bags else []
    data = prepare_table(
        folder / "visits.csv", folder / "data", categorical=categorical, multi=multi, config=config, **columns
    )
    return small_run(data, folder)


def small_run(data: Prepared, folder: Path, **options: Any) -> Path:
    config = RunConfig(data=data_identity(data), embedding_dim=4, hidden=(8,), bottom=(8,), **options)
    train(config, data, folder / "run")
    return folder / "run"


def inputs_of_predict(run: Path, file: Path, unknown: str) -> dict[str, np.ndarray]:
    """The inputs of the network in ``predict``."""
    scorer, batches = Scorer(run, unknown=unknown), list[Batch]()
    logits_of_rows = scorer.logits_of_rows
    scorer.logits_of_rows = lambda batch: batches.append(batch) or logits_of_rows(batch)
    predict(scorer, file, run / "scores.csv")
    names = ("dense", "ids", "offsets")
    tensors = (batches[0].dense, *batches[0].embedding_inputs(scorer.encoding.meta.columns.categorical))
    return {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=False)}


def rows_of(file: Path) -> list[dict[str, str]]:
    with open(file, newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def assert_same_inputs(run: Path, file: Path, unknown: str = "error") -> None:
    scorer = Scorer(run)
    write_row_rules(run / "rules.json", scorer, jagged=bool(scorer.encoding.meta.columns.bags))
    inputs = encode_row.encode(encode_row.read_rules(run / "rules.json"), rows_of(file), unknown)
    expected = inputs_of_predict(run, file, unknown)
    assert inputs.keys() == expected.keys()
    assert inputs["dense"].dtype == np.float32 and inputs["ids"].dtype == np.int64
    inputs["dense"], expected["dense"] = inputs["dense"].view(np.int32), expected["dense"].view(np.int32)  # every bit
    for name, array in expected.items():
        np.testing.assert_array_equal(inputs[name], array, name)


@pytest.mark.parametrize("bags", [True, False])
@pytest.mark.parametrize(
    ("config", "unknown"), [(PrepareConfig(vocabulary="train"), "error"), (PrepareConfig(transform="log"), "missing")]
)
def test_plain_python_makes_inputs_of_predict(config: PrepareConfig, unknown: str, bags: bool, tmp_path: Path) -> None:
    run = visits_run(tmp_path, config, bags)
    write_visits(tmp_path / "new.csv", 200, new="nobody before")
    assert_same_inputs(run, tmp_path / "new.csv", unknown)


def test_made_up_data_hold_the_ids_themselves(tmp_path: Path) -> None:
    run = small_run(synthesize(ClickLog(cardinalities=(10, 1000), num_dense=1), 300, tmp_path / "log"), tmp_path)
    (tmp_path / "rows.csv").write_text("I1,C1,C2\n0.5,3,999\n,9,\n")
    assert_same_inputs(run, tmp_path / "rows.csv")


def test_exported_scores_are_those_of_predict(tmp_path: Path) -> None:
    run = visits_run(tmp_path, PrepareConfig(vocabulary="train"))
    done = invoke("export", run, "--format", "onnx", "--out", tmp_path / "model.onnx")
    assert "model.json: how a row" in done.output
    invoke("predict", run, tmp_path / "visits.csv", "--out", tmp_path / "s.csv")
    inputs = encode_row.encode(encode_row.read_rules(tmp_path / "model.json"), rows_of(tmp_path / "visits.csv"))
    (scores,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(["probabilities"], inputs)
    expected = pl.read_csv(tmp_path / "s.csv")["probability"].to_numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-5)  # two implementations of float32 matrix products
    refused = invoke("export", run, "--format", "onnx", "--out", tmp_path / "model.json", code=1)
    assert "must not end in .json" in refused.output


def test_rows_of_json_are_those_of_text(tmp_path: Path) -> None:
    write_row_rules(tmp_path / "rules.json", Scorer(visits_run(tmp_path, PrepareConfig())), jagged=True)
    rules = encode_row.read_rules(tmp_path / "rules.json")
    text = {"age": "41", "income": "", "score": "0.5", "city": "7", "member": "NA", "tags": "sport|C++"}
    values = {"age": 41, "income": None, "score": 0.5, "city": 7.0, "member": float("nan"), "tags": ["sport", "C++"]}
    expected = encode_row.encode(rules, [text])
    for name, array in encode_row.encode(rules, [values]).items():
        np.testing.assert_array_equal(array, expected[name])
    with pytest.raises(ValueError, match=r"city \(\['7'\]\) must be one value"):  # test_serve_example has others
        encode_row.encode(rules, [text | {"city": ["7"]}])


def test_unknown_values_follow_the_policy_of_their_table(tmp_path: Path) -> None:
    write_visits(tmp_path / "visits.csv", 500)
    columns = {"label": "subscribed", "positive": "yes", "dense": ["score"], "categorical": ["city", "member"]}
    data = prepare_table(tmp_path / "visits.csv", tmp_path / "data", **columns)
    write_visits(tmp_path / "new.csv", 200, new="nobody before")
    rest = quorem.HotCold(2, cold=quorem.QR(2), num_rest=2, force=True)
    for policy, scheme in {"rest": rest, "hash": quorem.QR(4)}.items():
        (tmp_path / policy).mkdir()
        run = small_run(data, tmp_path / policy, scheme=scheme, unknown=policy)
        assert Scorer(run).policies["member"] == policy
        assert_same_inputs(run, tmp_path / "new.csv")


def test_strings_hash_as_in_quorem() -> None:
    strings = ["é" * length for length in range(70)]
    hashes = [encode_row.signed(encode_row.xxh64(string.encode())) for string in strings]
    assert torch.equal(torch.tensor(hashes), hash_strings(strings))
