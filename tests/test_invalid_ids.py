"""What a GPU module says about ids out of range, through the plain op, which counts on any device.

The kernel that counts is in test_ops_gpu.py, and the whole on a GPU in test_gpu.py.
"""

import warnings

import pytest
import torch

import quorem


def module(mode: str) -> quorem.EmbeddingCollection:
    tables = [quorem.Table("user", 50, 4, quorem.QR(4)), quorem.Table("day", 7, 4)]
    return quorem.EmbeddingCollection(tables, on_invalid_id=mode)


@pytest.fixture(autouse=True)
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch without CUDA cannot say that no graph is being captured."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


BAD = torch.tensor([[50, 0], [1, -1], [2, 6]])
GOOD = torch.tensor([[49, 0]])


def test_warn_counts_all_and_warns_once() -> None:
    tables = module("warn")
    tables._report_invalid(GOOD, None)
    with pytest.warns(UserWarning, match="2 ids out of range in table user, table day: each gave a vector of zeros"):
        tables._report_invalid(BAD, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            tables._report_invalid(BAD, None)
    assert int(tables.invalid_ids) == 14


def test_warn_looks_at_the_count_ever_less_often() -> None:
    tables = module("warn")
    looked = []
    tables.warn_invalid_ids = lambda: looked.append(tables._lookups) or 0  # type: ignore[method-assign,func-returns-value]
    for _ in range(20):
        tables._report_invalid(GOOD, None)
    assert looked == [1, 2, 4, 8, 16]


def test_jagged_ids_are_counted_by_their_own_table() -> None:
    tables = module("warn")
    ids, offsets = torch.tensor([49, 50, 6, 7, 8, 99]), torch.tensor([0, 2, 2, 4, 5])
    with pytest.warns(UserWarning, match="3 ids"):  # 50 of 50; 7 and 8 of 7; the last is in no bag
        tables._report_invalid(ids, offsets)


def test_raise_asserts() -> None:
    tables = module("raise")
    tables._report_invalid(GOOD, None)
    with pytest.raises(RuntimeError, match="out of range"):
        tables._report_invalid(BAD, None)


def test_trust_does_not_look() -> None:
    tables = module("trust")
    tables._report_invalid(BAD, None)
    assert int(tables.invalid_ids) == 0


def test_other_modes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"on_invalid_id \('shrug'\) must be one of"):
        module("shrug")
