"""``quorem inspect`` of runs, files and data, against what is on disk and in memory."""

import json
from pathlib import Path

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

from commands import invoke
from hot_cold_cases import hot_and_cold
from runs_to_serve import ROWS

import quorem
from quorem.data.prepared import Prepared
from quorem.paper.partitions import ExplicitPartition
from quorem.serving.inspection import inspect
from quorem.training.model import data_identity


def test_a_run(folder: Path) -> None:
    facts = json.loads(invoke("inspect", folder / "run", "--json", "--verify").output)
    assert facts["kind"] == "run" and facts["verified"] and facts["data"] == data_identity(Prepared(folder / "log"))
    user, _, tags = facts["tables"]
    model, n = quorem.load(folder / "run").model, len(Prepared(folder / "log").frequencies("user"))
    assert (user["ids"], tags["scheme"]) == (n, "Full()")
    stored = sum(t["bytes_in_memory"] for t in facts["tables"])
    assert stored == model.embeddings.stored.nbytes
    assert user["compression"] == n * 4 * 4 / user["bytes_in_memory"]
    assert facts["bytes_on_disk"] == sum(p.stat().st_size for p in (folder / "run").rglob("*") if p.is_file())
    text = invoke("inspect", folder / "run").output
    assert "HotCold(num_hot=5" in text and "log loss" in text


@pytest.mark.parametrize("bits", [0, 8])
def test_a_file_with_lists_maps_pools_and_networks(bits: int, tmp_path: Path) -> None:
    module = hot_and_cold(bits)
    quorem.save(module, tmp_path / "tables.quorem")
    facts = inspect(tmp_path / "tables.quorem", verify=True)
    rows = sum(t["rows"] for t in facts["tables"]) + sum(p["rows"] for p in facts["pools"])
    assert rows == sum(len(t) for _, t in module.named_tables())
    networks = sum(p.nbytes for name, p in module.named_parameters() if name != "stored")
    lists = sum(ids.nbytes for ranks in module.ranks_of if ranks is not None for ids in ranks)
    memory = sum(t["bytes_in_memory"] for t in [*facts["tables"], *facts["pools"]])
    maps = sum(p.index.nbytes for spec in module.specs for p in spec.partitions if isinstance(p, ExplicitPartition))
    assert memory == module.stored.nbytes + networks + lists + maps and maps > 0
    by_name = {t["name"]: t for t in facts["tables"]}
    assert by_name["both"]["features"] == ["clicked", "seen"]
    assert {t["bits"] for t in facts["tables"]} == {bits or 32}
    assert "pool pool: " in invoke("inspect", tmp_path / "tables.quorem").output


@pytest.mark.parametrize("bits", [0, 4])
def test_matrices_of_narrow_rows_count(bits: int, tmp_path: Path) -> None:
    schemes = [quorem.QR(4, width=4), quorem.Path(4, (5,), width=8, force=True)]
    module = quorem.EmbeddingCollection([quorem.Table(str(scheme), 600, 16, scheme) for scheme in schemes])
    quorem.save(quorem.quantize_(module, bits) if bits else module, tmp_path / "tables")
    memory = sum(table["bytes_in_memory"] for table in inspect(tmp_path / "tables")["tables"])
    assert memory == sum(p.nbytes for p in module.parameters())


def test_data(folder: Path) -> None:
    facts = json.loads(invoke("inspect", folder / "log", "--json", "--verify").output)
    assert (facts["kind"], facts["rows"], [f["ids"] for f in facts["features"]]) == ("data", ROWS, [98, 17, 4])


def test_damage_and_strangers_are_named(folder: Path, tmp_path: Path) -> None:
    quorem.save(quorem.load(folder / "run").model, tmp_path / "model.quorem")
    data = bytearray((tmp_path / "model.quorem").read_bytes())
    data[-5] ^= 1
    (tmp_path / "model.quorem").write_bytes(data)
    assert inspect(tmp_path / "model.quorem")["verified"] is False
    with pytest.raises(ValueError, match="differ from their checksums"):
        inspect(tmp_path / "model.quorem", verify=True)
    with pytest.raises(ValueError, match="is neither a run nor prepared data"):
        inspect(tmp_path)
    with pytest.raises(FileNotFoundError, match="nothing"):
        inspect(tmp_path / "nothing")
