"""``quorem.save`` and ``quorem.load``: every scheme comes back as it was, and what does not fit is refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hot_cold_cases import COUNTS, hot_and_cold, several_widths
from oracles import CASES, DTYPES, FEW, D, N, fill_

import quorem
from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, HotCold, Table, optim, quantize_
from quorem.files.saved_model import load, save
from quorem.models import DCN, DLRM
from quorem.modules.lookup import Tables
from quorem.paper.partitions import ExplicitPartition

IDS = torch.arange(N)


def collection(**options: object) -> EmbeddingCollection:
    groups = ExplicitPartition([i * i % 7 for i in range(N)])
    tables = [
        Table("user", N, D, QR(4)),
        Table("item.id", N, D, CASES["path-mlp"], padding_idx=3),
        Table("day", 7, D, quorem.Full()),
        Table("shop", N, D, CASES["path-mlp"]),
        Table("car", N, D, quorem.Custom((groups,), check=False)),
        Table("words", 10**12, D, quorem.GeneralizedQR(4)),
        Table("raw", 2**40, D, quorem.GeneralizedQR(4), raw_ids=True, padding_idx=2**64 - 5),
    ]
    return fill_(EmbeddingCollection(tables, **options))


def assert_same(a: Tables, b: Tables) -> None:
    assert type(a) is type(b) and a.padding_ids == b.padding_ids and a.names == b.names and a.raw_ids == b.raw_ids
    assert a.specs == tuple(replace(spec, fallback=None) for spec in b.specs)
    assert all(torch.equal(x, y) for x, y in zip(a.layout, b.layout, strict=True))
    torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("make", [hot_and_cold, several_widths])
def test_hot_and_cold_ids_and_pools(make: Callable[[int], EmbeddingCollection], bits: int, tmp_path: Path) -> None:
    module = make(bits)
    save(module, tmp_path / "tables")
    other = load(tmp_path / "tables")
    assert_same(module, other)
    assert other.features == module.features and other.bits == bits and other.dtype == torch.float32
    ids = IDS[:, None].expand(N, len(module.features)).contiguous()
    assert torch.equal(module(ids), other(ids))


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_schemes_in_every_dtype_and_bits(dtype: torch.dtype, bits: int, tmp_path: Path) -> None:
    for case in CASES if dtype == torch.float32 or not bits else FEW:
        module = fill_(Embedding(N, D, CASES[case], padding_idx=7, dtype=dtype))
        module = quantize_(module, bits) if bits else module
        save(module, tmp_path / "table")
        other = load(tmp_path / "table")
        assert_same(module, other)
        assert other.bits == bits and other.dtype == dtype and other.stored.requires_grad == (bits == 0)
        assert torch.equal(module(IDS), other(IDS)) and torch.equal(module.to_dense(), other.to_dense())


def test_bags(tmp_path: Path) -> None:
    options = {"mode": "sum", "include_last_offset": True, "on_invalid_id": "raise", "sparse": True}
    module = fill_(EmbeddingBag(N, D, QR(4), **options))
    save(module, tmp_path / "bag")
    other = load(tmp_path / "bag")
    assert_same(module, other)
    assert {name: getattr(other, name) for name in options} == options
    offsets = torch.tensor([0, 5, 5, N])
    assert torch.equal(module(IDS, offsets), other(IDS, offsets))


NETWORKS = {
    "dlrm": lambda tables: DLRM(tables, num_dense=3, bottom=(8, 4), top=(6,)),
    "dlrm-raw": lambda tables: DLRM(tables, num_dense=3, bottom=(), top=(6, 5), raw_dense=True),
    "dlrm-no-dense": lambda tables: DLRM(tables, num_dense=0, top=(6,)),
    "dcn": lambda tables: DCN(tables, num_dense=3, deep=(7, 5), num_cross=2),
    "dcn-double": lambda tables: DCN(tables.double(), num_dense=3, dtype=torch.float64),
    "one table": lambda tables: DLRM(Embedding(N, D, QR(4)), num_dense=2, top=(4,), embedding_dims=(D,) * 7),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, tmp_path: Path) -> None:
    network = NETWORKS[name](collection())
    save(network, tmp_path / "net")
    other = load(tmp_path / "net")
    assert type(other) is type(network)
    assert_same(network.embeddings, other.embeddings)
    ids, dense = torch.randint(0, 7, (5, 7)), torch.rand(5, network.num_dense, dtype=network.output.weight.dtype)
    assert torch.equal(network(dense, ids), other(dense, ids))
    other(dense, ids).sum().backward()  # it trains


def test_what_is_frozen_stays_frozen(tmp_path: Path) -> None:
    network = DLRM(collection(), num_dense=2, bottom=(4,), top=(4,))
    network.embeddings.stored.requires_grad_(False)
    network.output.bias.requires_grad_(False)
    save(network, tmp_path / "net")
    frozen = [name for name, p in load(tmp_path / "net").named_parameters() if not p.requires_grad]
    assert frozen == ["embeddings.stored", "output.bias"]


def test_a_table_that_stayed_full_comes_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(UserWarning, match="1 of 1 tables stay full"):
        module = Embedding(3, D, QR(4, operation="feature"))
    save(module, tmp_path / "table")
    recwarn.clear()
    assert load(tmp_path / "table")(torch.tensor([2])).shape == module(torch.tensor([2])).shape == (1, 1, D)
    assert not list(recwarn)


def test_parameters_are_the_mapped_file_and_private(tmp_path: Path) -> None:
    module = collection()
    save(module, tmp_path / "tables")
    before = (tmp_path / "tables").read_bytes()
    other = load(tmp_path / "tables", verify=False)
    distances = [p.data_ptr() - before.index(p.detach().numpy().tobytes()) for p in other.parameters()]
    assert len(set(distances)) == 1  # they lie in memory as in the file: it is mapped, not copied
    with torch.no_grad():
        other.stored.zero_()
    assert (tmp_path / "tables").read_bytes() == before
    assert_same(module, load(tmp_path / "tables"))


def test_what_was_loaded_is_saved_by_torch(tmp_path: Path) -> None:
    tables = [Table("a", 20_000, D), Table("b", N, D, HotCold(5, cold=QR(4), num_rest=10), frequencies=COUNTS)]
    save(quantize_(DLRM(EmbeddingCollection(tables))), tmp_path / "model")
    model = load(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "state")  # rows of bytes, lists of integers, layers of floats
    state = torch.load(tmp_path / "state", weights_only=False)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_rows_that_lag_behind_are_saved_up_to_date(tmp_path: Path) -> None:
    module = fill_(Embedding(N, D, QR(4)))
    optim.apply_in_backward(module, optim.Adam, lr=0.1)
    for i in (0, 1, 2):
        module(torch.tensor([i])).sum().backward()
    save(module, tmp_path / "table")
    assert torch.equal(load(tmp_path / "table").to_dense(), module.to_dense())
