"""The calculator of many GPUs: by hand, and against TorchRec's own planner; torchrec_exchange.py measures its bytes."""

import json
from pathlib import Path

import pytest
import torch

import quorem
from quorem.integrations import scale

ROOT = Path(__file__).parents[2]


def test_one_table_by_hand() -> None:
    cost = scale.estimate([quorem.Table("user", 1_000_000, 32)], 4, batch_size=100)
    assert cost.memory == 1_000_000 * (32 + 1) * 4 / 4
    assert cost.id_bytes == 3 / 4 * 100 * (4 + 4)
    assert cost.vector_bytes == 2 * 3 / 4 * 100 * 32 * 4
    assert cost.reduce_bytes == 0
    assert cost.sent_bytes == cost.id_bytes + cost.vector_bytes
    assert cost.seconds == cost.lookup_seconds + cost.exchange_seconds


def test_small_tables_are_replicated_and_send_no_vectors() -> None:
    tables = [quorem.Table("user", 10**8, 32, quorem.GeneralizedQR(4, operation="add"))]  # 400 rows
    cost = scale.estimate(tables, 8, batch_size=800)
    assert [placed.replicated for placed in cost.tables] == [True]
    assert cost.id_bytes == cost.vector_bytes == 0
    assert cost.reduce_bytes == 2 * 7 / 8 * 400 * 32 * 4
    assert cost.memory == 400 * 33 * 4
    sharded = scale.estimate(tables, 8, batch_size=799)
    assert not sharded.tables[0].replicated and sharded.memory == 400 * 33 * 4 / 8
    assert cost.sent_bytes < sharded.sent_bytes / 2


def test_one_gpu_sends_nothing() -> None:
    cost = scale.estimate([quorem.Table("day", 7, 16), quorem.Table("user", 10**6, 16)], 1, batch_size=100)
    assert cost.sent_bytes == 0 and cost.exchange_seconds == 0


@pytest.mark.parametrize(
    ("operation", "reads", "vectors"), [("add", 2, 1), ("concat", 2, 1), ("mult", 2, 2)]
)  # concat: two vectors of half the width
def test_rows_and_vectors_of_operations(operation: str, reads: int, vectors: int) -> None:
    tables = [quorem.Table("user", 10**6, 32, quorem.QR(4, operation=operation))]
    cost = scale.estimate(tables, 2, batch_size=64, replicate=False)
    assert sum(sum(placed.reads) for placed in cost.tables) == reads
    assert cost.vector_bytes == 2 * 1 / 2 * 64 * vectors * 32 * 4


def test_a_network_is_slower_than_a_node() -> None:
    tables = [quorem.Table("user", 10**6, 32)]
    costs = {world: scale.estimate(tables, world, batch_size=4096) for world in (8, 16, 512)}
    assert costs[8].exchange_seconds < costs[16].exchange_seconds < costs[512].exchange_seconds
    full = scale.Machine(network_bandwidth=450e9)
    assert scale.estimate(tables, 512, batch_size=4096, machine=full).exchange_seconds < costs[512].exchange_seconds


def test_what_does_not_fit_is_said() -> None:
    tables = [quorem.Table("user", 10**10, 64)]
    assert not scale.estimate(tables, 8, batch_size=64).fits
    assert scale.estimate(tables, 64, batch_size=64).fits


def test_two_ranks_sent_what_is_calculated() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "torchrec_step.json").read_text(encoding="utf-8"))
    for model in measured["models"].values():
        if model["calculated"] is not None:
            assert model["bytes"] == pytest.approx(model["calculated"], rel=0.1)
    full, plan = (measured["models"][name] for name in ("full, TorchRec's own", "plan at 16x, rows sent once"))
    assert plan["ms"] < full["ms"] and plan["bytes"] < full["bytes"] * 0.4, "docs/scale.md says so"


def test_more_ids_a_sample_and_smaller_numbers_by_hand() -> None:
    tables = [quorem.Table("user", 100_000, 64), quorem.Table("item", 100_000, 64, quorem.QR(4, operation="mult"))]
    one, several = (
        scale.estimate(tables, 8, batch_size=64, ids_per_sample=ids, replicate=False) for ids in (None, {"item": 5})
    )
    (user, large, small), (_, *products) = one.tables, several.tables
    assert [placed.reads for placed in one.tables] == [(1,), (1,), (1,)]
    assert [placed.vectors for placed in products] == [5 * large.vectors, 5 * small.vectors]  # pooled after the lookup
    assert several.vector_bytes == one.vector_bytes * (user.vectors + 10) / (user.vectors + 2)
    half = scale.estimate(tables, 8, batch_size=64, bytes_per_number=2, replicate=False)
    assert (2 * half.memory, 2 * half.vector_bytes, half.id_bytes) == (one.memory, one.vector_bytes, one.id_bytes)


def test_the_planner_is_told_how_many_ids_a_sample_has() -> None:
    pytest.importorskip("torchrec", reason="needs TorchRec: `make install`, or the line in docs/torchrec.md")
    from quorem.integrations import torchrec as integration

    bags = integration.EmbeddingBagCollection([quorem.Table("user", 100_000, 16, quorem.QR(4, operation="add"))])
    limits = integration.constraints(bags, batch_size=64, ids_per_sample={"user": 3})
    assert limits["user"].pooling_factors == [6.0]  # two rows for each id
    with pytest.raises(ValueError, match="ids_per_sample names 'usr' but must name features of the model"):
        integration.constraints(bags, batch_size=64, ids_per_sample={"usr": 3})


def test_rows_that_are_sent_once_by_hand() -> None:
    tables = [quorem.Table("a", 100, 8, frequencies=torch.ones(100)), quorem.Table("b", 3, 8), quorem.Table("c", 2, 8)]
    cost = scale.estimate(tables, 4, batch_size=100_000, num_shards=2)  # every row is read: 100, and 3 + 2
    assert cost.id_bytes == pytest.approx(3 / 4 * (105 * 4 + 2 * 100 * 4))
    assert cost.vector_bytes == pytest.approx(2 * 3 / 4 * 2 * 100 * 8 * 4)
    assert cost.memory == 105 * 9 * 4 / 4 and cost.reduce_bytes == 0


def test_wrong_arguments_are_named() -> None:
    tables = [quorem.Table("user", 100, 4)]
    with pytest.raises(ValueError, match=r"world_size \(0\) must be"):
        scale.estimate(tables, 0, batch_size=1)
    with pytest.raises(ValueError, match=r"batch_size \(0\) must be"):
        scale.estimate(tables, 1, batch_size=0)
    with pytest.raises(ValueError, match=r"optimizer \('lion'\) must be"):
        scale.estimate(tables, 1, batch_size=1, optimizer="lion")  # type: ignore[arg-type]


def test_memory_and_vectors_are_those_of_torchrecs_planner() -> None:
    pytest.importorskip("torchrec", reason="needs TorchRec: `make install`, or the line in docs/torchrec.md")
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    from quorem.integrations import torchrec as integration

    world, batch = 8, 4096
    tables = [
        quorem.Table("full", 2_000_000, 64),
        quorem.Table("sums", 50_000_000, 64, quorem.QR(16, operation="add")),
        quorem.Table("ends", 50_000_000, 64, quorem.ChineseRemainder(2, operation="concat", num_rows=200_000)),
        quorem.Table("hot", 50_000_000, 64, quorem.HotCold(10**6, cold=quorem.Pool(10**6))),
    ]
    module = integration.EmbeddingBagCollection(tables, device="meta")
    apply_optimizer_in_backward(RowWiseAdagrad, module.bags.parameters(), {"lr": 0.1})
    bandwidth = 100e6  # bytes a millisecond, over every link
    topology = Topology(
        world_size=world,
        local_world_size=world,
        compute_device="cuda",
        hbm_cap=10**12,
        intra_host_bw=bandwidth,
        inter_host_bw=bandwidth,
    )
    constraints = integration.constraints(module, batch_size=batch, device="cuda")
    enumerator = EmbeddingEnumerator(topology=topology, batch_size=batch, constraints=constraints)
    options = enumerator.enumerate(module, [EmbeddingBagCollectionSharder()])
    chosen = {o.name: o for o in options if (o.sharding_type, o.compute_kernel) == ("table_wise", "fused")}
    cost = scale.estimate(tables, world, batch_size=batch)
    assert not any(placed.replicated for placed in cost.tables)
    memory = vectors = 0.0
    for table, reads, _, num_vectors, _ in cost.tables:
        (shard,) = chosen[table.name].shards
        # Besides rows and state, TorchRec counts the buffers of ids, of 8 bytes there, and of vectors.
        buffers = world * batch * (sum(reads) * 8 + num_vectors * table.width * 4)
        rows = table.num_rows * (table.width + 1) * 4
        assert shard.storage.hbm == pytest.approx(rows + buffers, rel=0.02), table.name
        memory += shard.storage.hbm - buffers
        vectors += (shard.perf.fwd_comms + shard.perf.bwd_comms) * bandwidth
    assert cost.memory == pytest.approx(memory / world, rel=0.02)
    assert cost.vector_bytes == pytest.approx(vectors / world * (world - 1) / world, rel=0.02)
