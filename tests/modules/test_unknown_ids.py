"""Ids outside a table under each ``unknown``, at every entrance and exit, against the table written out."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hot_cold_cases import COUNTS, hot_and_cold
from oracles import D, N, fill_
from serving.test_onnx import UNKNOWN, exported, run
from serving.test_torch_export import Plain
from torch import Tensor, nn

import quorem
from quorem import QR, ChineseRemainder, Embedding, EmbeddingBag, EmbeddingCollection, Full, HotCold, Pool, Table
from quorem.convert import decompress_
from quorem.paper.hashing import mixed_ids
from quorem.paper.schemes import RawCounts
from quorem.paper.schemes.frequency import places

IDS = torch.tensor([*UNKNOWN, 0, 1, 2, N // 2, N - 1])
EXPORTED = ("rest", "ranked pool", "full", "crt")  # of graphs, in which each table takes seconds


def with_policy(policy: str, bits: int = 0, names: tuple[str, ...] = ()) -> EmbeddingCollection:
    """Hot and cold tables of every kind whose unknown ids have one policy where they can, and plain ones."""
    template = hot_and_cold()
    tables = []
    for t, (name, spec) in enumerate(zip(template.names, template.specs, strict=True)):
        able = spec.num_rest if policy == "rest" else spec.num_composed
        counts = COUNTS if template.ranks_of[t] is not None else None
        policy_here = policy if able else "hash" if spec.num_composed else "rest"
        tables.append(Table(name, N, D, spec.scheme, frequencies=counts, unknown=policy_here))
    chinese = Table("crt", N, D, ChineseRemainder(2), unknown="hash", features=("from", "to"))
    tables += [Table("full", N, D, unknown="hash"), chinese]
    module = fill_(EmbeddingCollection([table for table in tables if not names or table.name in names]))
    return quorem.quantize_(module, bits) if bits else module


def by_hand(module: EmbeddingCollection, ids: Tensor) -> Tensor:
    """``[N, F, D]``, one table and one id at a time."""
    columns = []
    for t in module.table_of:
        spec, dense = module.specs[t], module.dense(t).detach()
        place = places(spec, module.ranks_of[t]).tolist()
        vectors = []
        for i in ids.tolist():
            if not 0 <= i < N and module.unknown[t] == "rest":
                i = place.index(spec.num_hot)
            elif not 0 <= i < N:
                i = place.index(spec.num_own + int(mixed_ids(torch.tensor(i), spec.num_composed)))
            vectors.append(dense[i])
        columns.append(torch.stack(vectors))
    return torch.stack(columns, 1)


def single_and_bags(module: EmbeddingCollection) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """What is expected, and the inputs: of single ids, and of bags of two."""
    features = len(module.features)
    ids = IDS[:, None].expand(-1, features).contiguous()
    expected = by_hand(module, IDS)
    bags = {"ids": ids.T.reshape(-1), "offsets": torch.arange(0, ids.numel() + 1, 2)}
    return [(expected, {"ids": ids}), (expected.view(len(IDS) // 2, 2, features, D).mean(1), bags)]


def check_graph(module: EmbeddingCollection, expected: Tensor, path: Path, **inputs: Tensor) -> None:
    """ONNX Runtime gives what is expected."""
    vectors = run(exported(module, path, jagged="offsets" in inputs), **inputs)["vectors"]
    torch.testing.assert_close(vectors.view_as(expected), expected)


@pytest.mark.parametrize("policy", ["rest", "hash"])
def test_lookups_and_files(policy: str, tmp_path: Path) -> None:
    module = with_policy(policy)
    for expected, inputs in single_and_bags(module):
        for read in (module, lambda *inputs: Plain(module)(*inputs)["vectors"]):  # the second as exports trace it
            torch.testing.assert_close(read(*inputs.values()).detach(), expected)
    ids = IDS[:, None].expand(-1, len(module.features)).contiguous()

    quorem.save(module, tmp_path / "tables.quorem")
    loaded = quorem.load(tmp_path / "tables.quorem")
    assert loaded.unknown == module.unknown and torch.equal(loaded(ids), module(ids))
    assert torch.equal(copy.deepcopy(module)(ids), module(ids))


@pytest.mark.parametrize("policy", ["rest", "hash"])
def test_graphs(policy: str, tmp_path: Path) -> None:
    module = with_policy(policy, names=EXPORTED)
    for expected, inputs in single_and_bags(module):
        check_graph(module, expected, tmp_path / "tables.onnx", **inputs)


def test_quantized_rows(tmp_path: Path) -> None:
    module = with_policy("hash", bits=8)
    (expected, inputs), _ = single_and_bags(module)
    torch.testing.assert_close(module(**inputs), expected)
    torch.testing.assert_close(Plain(module)(*inputs.values())["vectors"], expected)
    few = with_policy("hash", bits=8, names=EXPORTED)
    (expected, inputs), _ = single_and_bags(few)
    check_graph(few, expected, tmp_path / "t.onnx", **inputs)


def test_training_moves_the_rows_of_the_ids_that_stand_in() -> None:
    scheme = HotCold(5, cold=Pool(40), num_rest=10, force=True)
    for policy, row in (("rest", 5), ("hash", None)):
        module = fill_(Embedding(N, D, scheme, unknown=policy))
        module(torch.tensor([-7, N])).sum().backward()
        touched = module.stored.grad.abs().sum(1).nonzero().flatten().tolist()
        assert touched == [row] if row is not None else (min(touched) > 5 and 2 <= len(touched) <= 4)


def test_bags_and_padding() -> None:
    module = fill_(EmbeddingBag(N, D, QR(4), mode="sum", padding_idx=3, unknown="hash"))
    stands_in = mixed_ids(torch.tensor([-1, N]), N)
    expected = module(torch.stack([stands_in, torch.tensor([3, 4])]))
    assert torch.equal(module(torch.tensor([[-1, N], [3, 4]])), expected)
    assert (module(torch.tensor([[3, 3]], dtype=torch.int32)) == 0).all()


@pytest.mark.parametrize("by_count", [False, True])
@pytest.mark.parametrize("pad", [0, 6, 50, N - 1])
def test_no_unknown_id_stands_for_padding(pad: int, by_count: bool, tmp_path: Path) -> None:
    scheme, counts = HotCold(5, cold=QR(4), num_rest=12, force=True), COUNTS if by_count else None
    options: dict[str, Any] = {"frequencies": counts, "padding_idx": pad}
    tables = [Table(policy, N, D, scheme, unknown=policy, **options) for policy in ("rest", "hash")]
    hashed: dict[str, Any] = {"padding_idx": pad, "unknown": "hash"}
    some = HotCold(5, cold=QR(4), force=True)
    tables += [Table("qr", N, D, QR(4), **hashed), Table("cold", N, D, some, frequencies=counts, **hashed)]
    module = fill_(EmbeddingCollection(tables))
    ids = torch.cat([torch.arange(-200, 0), torch.arange(N, 200), torch.tensor([pad])])[:, None].expand(-1, 4)
    vectors = module(ids.contiguous()).detach()
    assert (vectors[:-1] != 0).any(-1).all() and (vectors[-1] == 0).all()
    assert len(vectors[:, 0].unique(dim=0)) == 2
    torch.testing.assert_close(Plain(module)(ids.contiguous())["vectors"].detach(), vectors)
    if pad == 50:  # the operators that are exported are those above
        check_graph(module, vectors, tmp_path / "t.onnx", ids=ids.contiguous())


def test_unknown_ids_of_a_table_without_a_policy_raise() -> None:
    module = fill_(EmbeddingCollection([Table("a", N, D, QR(4), unknown="hash"), Table("b", N, D, QR(4))]))
    with pytest.raises(IndexError, match=r"id -1 is outside \[0, 60\) of table b"):
        module(torch.tensor([[-1, -1]]))


def test_a_module_with_a_policy_is_not_decompressed() -> None:
    model = nn.Sequential(Embedding(N, D, QR(4), unknown="hash"))
    assert decompress_(model).swapped == [] and isinstance(model[0], Embedding)


def test_a_fitted_table_keeps_the_policy_of_the_one_it_is_fitted_to() -> None:
    table = fill_(Embedding(N, D, QR(4), unknown="hash"))
    for cls in (Embedding, EmbeddingBag):
        assert cls.from_pretrained(table, QR(2)).unknown == ("hash",)
        assert cls.from_pretrained(table, unknown="error").unknown == ("error",)
        assert cls.from_pretrained(table.to_dense()).unknown == ("error",)
    same = Embedding.from_pretrained(table)  # the full table, so that unknown ids are hashed to any id of it
    torch.testing.assert_close(same(torch.tensor([-1, 2**40])), table(torch.tensor([-1, 2**40])))
    with pytest.raises(ValueError, match=r"unknown \('rest'\) must be 'error' or 'hash'"):
        Embedding.from_pretrained(table, QR(2), unknown="rest")


def test_hot_and_cold_by_counts_of_raw_ids() -> None:
    n, draw = 2**40, torch.Generator().manual_seed(0)
    raw = torch.randint(-(2**62), 2**62, (300,), generator=draw)
    counts = torch.randperm(300, generator=draw)
    twice = RawCounts(torch.cat([raw, raw[:50]]), torch.cat([counts, torch.full((50,), 1000)]))
    order = raw[torch.argsort(torch.cat([counts[:50] + 1000, counts[50:]]), descending=True)]
    some = HotCold(20, cold=QR(5, operation="add"), num_rest=n - 120)
    module = fill_(Embedding(n, D, some, raw_ids=True, frequencies=twice))
    own = module.tables()[0]
    vectors = module(order)
    assert sorted(map(tuple, vectors[:20].tolist())) == sorted(map(tuple, own[:20].tolist()))
    assert len(vectors[20:120].unique(dim=0)) == 100 and torch.equal(vectors[120:], own[20].expand(180, D))
    everyone = HotCold(20, cold=ChineseRemainder(4, operation="add"))
    module = fill_(Embedding(n, D, everyone, raw_ids=True, frequencies=twice))
    assert len(module(torch.cat([order, torch.arange(1000)])).unique(dim=0)) == 1300
    with pytest.raises(ValueError, match="lists 300 ids but must list at least 320, those ranked"):
        Embedding(n, D, HotCold(20, cold=QR(5), num_rest=n - 320), raw_ids=True, frequencies=twice)
    with pytest.raises(ValueError, match="counts raw ids: raw_ids must be True"):
        Embedding(n, D, everyone, frequencies=twice)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"unknown \('zeros'\) must be one of 'error', 'rest', 'hash'"):
        Embedding(N, D, QR(4), unknown="zeros")
    with pytest.raises(ValueError, match=r"unknown \('rest'\) of table 'a' must be 'error' or 'hash'.*has no rest"):
        EmbeddingCollection([Table("a", N, D, QR(4), unknown="rest")])
    with pytest.raises(ValueError, match=r"unknown \('hash'\) must be 'error' or 'rest': no id .* is composed"):
        Embedding(N, D, HotCold(20, cold=Full(), num_rest=40, force=True), unknown="hash")
    with pytest.raises(ValueError, match=r"must be 'error': the only rest of HotCold.* is padding"):
        Embedding(N, D, HotCold(9, cold=QR(4), num_rest=1, force=True), padding_idx=-1, unknown="rest")
    with pytest.raises(ValueError, match=r"must be 'error': the only composed id of HotCold.* is padding"):
        Embedding(N, D, HotCold(20, cold=Full(), num_rest=N - 21, force=True), padding_idx=20, unknown="hash")
    with pytest.raises(ValueError, match=r"unknown \('hash'\) must be 'error' with raw_ids"):
        Embedding(N, D, QR(4), raw_ids=True, unknown="hash")
