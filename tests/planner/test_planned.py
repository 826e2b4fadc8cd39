"""A plan as a mapping, as text and as JSON."""

import json

import pytest
from allocated import SMALL

from quorem import Full, Plan, plan


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
        (lambda d: d["tables"][0].update(cost="high"), "tables.0..cost \\('high'\\) must be a number"),
        (lambda d: d["tables"][0].update(dtype="int16"), "tables.0..dtype: 'int16' must be one of"),
        (lambda d: d["tables"][0].update(name="b"), "names of tables \\('b'\\) must be unique"),
        (lambda d: d["tables"][0].update(scheme={"scheme": "None"}), "must be an object whose 'scheme' is one of"),
        (lambda d: d["tables"][0].update(more=1), "tables.0..more is not known"),
        (lambda d: d["tables"].append(3), "tables.5. \\(3\\) must be an object"),
        (lambda d: d["tables"][0].update(name=3), "tables.0..name \\(3\\) must be a string"),
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
    with pytest.raises(ValueError, match="is not a plan: it differs from its checksum"):
        Plan.from_json(damaged)
