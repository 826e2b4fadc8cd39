"""What a GPU module says about ids out of range, through the plain op, which counts on any device.

The kernels that count are tested in ops/gpu, and the whole on a GPU in test_gpu.py.
"""

import warnings

import pytest
import torch

import quorem
from quorem.ops import cpu


def module(mode: str) -> quorem.EmbeddingCollection:
    """Tables on the CPU that count as on a GPU."""
    tables = [quorem.Table("user", 50, 4, quorem.QR(4, operation="feature")), quorem.Table("day", 7, 4)]
    made = quorem.EmbeddingCollection(tables, on_invalid_id=mode)
    made._counts_invalid = lambda ids: mode != "trust"  # type: ignore[method-assign]
    return made


@pytest.fixture(autouse=True)
def plain_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's kernels raise instead of counting; and torch without CUDA cannot say that no graph is captured."""
    monkeypatch.setattr(cpu, "kernels", dict)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


BAD = torch.tensor([[50, 0], [1, -1], [2, 6]])
GOOD = torch.tensor([[49, 0]])


def test_warn_counts_all_and_warns_once() -> None:
    tables = module("warn")
    tables(GOOD)
    with pytest.warns(UserWarning, match="2 ids out of range in table user, table day: each gave a vector of zeros"):
        tables(BAD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            tables(BAD)
    assert int(tables.invalid_ids) == 14


def test_jagged_ids_are_counted_by_their_own_table() -> None:
    tables = module("warn")
    ids, offsets = torch.tensor([49, 50, 6, 7, 8, 99]), torch.tensor([0, 2, 2, 4, 5])
    with pytest.warns(UserWarning, match="3 ids"):  # 50 of 50; 7 and 8 of 7; the last is in no bag
        torch.ops.quorem.count_invalid_(ids, offsets, None, tables.invalid_ids, *tables.layout, mean=False)
        tables._report_invalid()


def test_raise_asserts() -> None:
    tables = module("raise")
    tables(GOOD)
    with pytest.raises(RuntimeError, match="out of range"):
        tables(BAD)


def test_counting_gives_the_vectors_of_valid_ids_and_zeros() -> None:
    tables = module("warn")
    with pytest.warns(UserWarning, match="2 ids"):
        out = tables(BAD)
    assert not out[0, :2].any() and not out[1, 2].any()
    torch.testing.assert_close(out[1:, :2], tables.to_dense()["user"][torch.tensor([1, 2])])
    out.sum().backward()
    valid = module("trust")
    valid.load_state_dict(tables.state_dict())
    valid(torch.tensor([[1, 0], [2, 6]])).sum().backward()  # users 1 and 2, days 0 and 6
    torch.testing.assert_close(tables.stored.grad, valid.stored.grad)


def test_an_id_on_the_cpu_raises_whatever_the_mode() -> None:
    for mode in ("warn", "raise", "trust"):
        tables = module(mode)
        del tables._counts_invalid
        with pytest.raises(IndexError, match="id 50 is outside"):
            tables(BAD)
        assert int(tables.invalid_ids) == 0
