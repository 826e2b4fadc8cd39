"""Tables that take any 64-bit id: against the same table read by mixed ids, at every entrance."""

import copy

import pytest
import torch
from oracles import CASES, FEW, D, N, fill_
from refusals import refused

import quorem
from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, GeneralizedQR, HotCold, Table, optim
from quorem.paper.hashing import mixed_ids
from quorem.paper.schemes import RawCounts

RAW = torch.tensor([0, 1, -1, 2**40, -(2**63), 2**63 - 1, 7, 2**20, -(2**20)])


def rows_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What is stored, without what it means."""
    return dict(module.named_parameters())


def pair(case: str, **options: object) -> tuple[Embedding, Embedding]:
    """A table of raw ids, and one of ordinary ids with the same rows."""
    raw, plain = Embedding(N, D, CASES[case], raw_ids=True, **options), Embedding(N, D, CASES[case])
    fill_(raw)
    plain.load_state_dict(rows_of(raw), strict=False)
    return raw, plain


@pytest.mark.parametrize("case", FEW)
def test_lookups_are_those_of_mixed_ids(case: str) -> None:
    raw, plain = pair(case)
    assert torch.equal(raw(RAW.view(3, 3)), plain(mixed_ids(RAW, N).view(3, 3)))
    assert torch.equal(raw.to_dense(), plain.to_dense())
    unsigned = RAW.view(torch.uint64)
    assert torch.equal(raw(unsigned), raw(RAW))
    assert torch.equal(raw(RAW[[0, 1, 6]].int()), raw(RAW[[0, 1, 6]]))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_and_padding(mode: str) -> None:
    options = {"mode": mode, "include_last_offset": True}
    raw = fill_(EmbeddingBag(N, D, QR(4), raw_ids=True, padding_idx=-1, **options))
    plain = EmbeddingBag(N, D, QR(4), padding_idx=int(mixed_ids(torch.tensor([-1]), N)), **options)
    plain.load_state_dict(rows_of(raw), strict=False)
    offsets = torch.tensor([0, 4, 4, len(RAW)])
    assert torch.equal(raw(RAW, offsets), plain(mixed_ids(RAW, N), offsets))
    unsigned = EmbeddingBag(N, D, QR(4), raw_ids=True, padding_idx=2**64 - 1, **options)
    unsigned.load_state_dict(raw.state_dict())
    assert torch.equal(unsigned(RAW, offsets), raw(RAW, offsets))
    assert raw.padding_idx == -1 and torch.equal(raw(RAW.view(torch.uint64), offsets), raw(RAW, offsets))


def collection() -> EmbeddingCollection:
    tables = [
        Table("user", 2**62, D, quorem.ChineseRemainder(4), raw_ids=True, padding_idx=2**64 - 5),
        Table("day", 7, D),
        Table("item", 2**40, D, GeneralizedQR(4, operation="add"), raw_ids=True, features=("seen", "clicked")),
        Table("path", N, D, CASES["path-mlp"], raw_ids=True),
    ]
    return fill_(EmbeddingCollection(tables))


def plain_twin(module: EmbeddingCollection) -> EmbeddingCollection:
    tables = [
        Table(name, spec.num_embeddings, D, spec.scheme, padding_idx=pad)
        for name, spec, pad in zip(module.names, module.specs, module.padding, strict=True)
    ]
    tables[2] = Table("item", 2**40, D, module.specs[2].scheme, features=("seen", "clicked"))
    twin = EmbeddingCollection(tables)
    twin.load_state_dict(rows_of(module), strict=False)
    return twin


def test_collections_mix_the_ids_of_raw_tables_only() -> None:
    module = collection()
    twin = plain_twin(module)
    ids = torch.stack([RAW, RAW.remainder(7), RAW, RAW.flip(0), RAW], 1)
    ids[3, 0] = -5
    known = ids.clone()
    for f, n in ((0, 2**62), (2, 2**40), (3, 2**40), (4, N)):
        known[:, f] = mixed_ids(ids[:, f], n)
    assert torch.equal(module(ids), twin(known)) and not module(ids)[3, 0].any()
    offsets = torch.arange(0, ids.numel() + 1, 3)
    assert torch.equal(module(ids.T.flatten(), offsets), twin(known.T.flatten(), offsets))
    assert torch.equal(module(ids.view(torch.uint64)), module(ids))
    with pytest.raises(IndexError, match=r"id 7 is outside \[0, 7\) of table day"):
        module(torch.full((1, 5), 7))


def test_training_moves_the_rows_of_mixed_ids() -> None:
    raw, plain = pair("qr-mult")
    for module, ids in ((raw, RAW), (plain, mixed_ids(RAW, N))):
        optim.apply_in_backward(module, optim.Adam, lr=0.1)
        for _ in range(3):
            module(ids).square().sum().backward()
    assert torch.equal(raw.to_dense(), plain.to_dense())


def test_the_start_does_not_depend_on_the_size_of_the_id_space() -> None:
    torch.manual_seed(0)
    hot = HotCold(8, quorem.Pool(2**18, 4), 2**39)
    for scheme in (quorem.ChineseRemainder(4), GeneralizedQR(4, operation="add"), hot):
        for n in (2**40, 2**42):
            module = Embedding(n, 16, scheme, raw_ids=True)
            vectors = module(torch.arange(20_000)).detach()
            assert float(vectors.std()) == pytest.approx((3 * 2**20) ** -0.5, rel=0.1)
    wide = Embedding(2**40, 16, GeneralizedQR(4), raw_ids=True, init_std=0.5)
    assert float(wide(torch.arange(20_000)).detach().std()) == pytest.approx(0.5, rel=0.1)


def test_checkpoints_and_copies_know() -> None:
    raw, plain = pair("qr-mult")
    with pytest.raises(RuntimeError, match=r"for raw ids in the checkpoint and .* for ids here"):
        plain.load_state_dict(raw.state_dict())
    assert torch.equal(copy.deepcopy(raw)(RAW), raw(RAW))


test_errors = refused(
    (lambda: Embedding(N, D, QR(4), raw_ids=1), TypeError, r"raw_ids \(1\) must be a bool"),
    (
        lambda: Embedding(N, D, QR(4), raw_ids=True, padding_idx=2**64),
        ValueError,
        r"padding_idx \(18446744073709551616\) must be in \[-9223372036854775808, ",
    ),
    (lambda: Embedding(N, D, QR(4), raw_ids=True, padding_idx="a"), TypeError, r"padding_idx \('a'\) must be an int"),
    (lambda: Embedding(N, D, QR(4), raw_ids=True).score(torch.ones(2, D)), ValueError, "raw_ids .* must be False"),
    (lambda: Embedding(N, D, QR(4))(RAW.view(torch.uint64)), TypeError, r"input dtype \(torch.uint64\) must be"),
)


def test_a_fitted_table_takes_raw_ids_too() -> None:
    raw = fill_(Embedding(N, D, CASES["qr-mult"], raw_ids=True, padding_idx=-7))
    for cls in (Embedding, EmbeddingBag):
        assert torch.equal(cls.from_pretrained(raw)(RAW[:, None]).view(-1, D), raw(RAW))


def test_counts_of_raw_ids_stay_where_they_are() -> None:
    counts = RawCounts(torch.tensor([5, 6, 7]), torch.tensor([1, 9, 3]))
    with torch.device("meta"):
        module = Embedding(N, D, HotCold(1, cold=QR(4), force=True), raw_ids=True, frequencies=counts)
    assert module.stored.is_meta and module.ranks_of[0].hot.tolist() == mixed_ids(torch.tensor([6]), N).tolist()
