"""Section 4.1: path networks in sorted_blocks, without a loop over networks and without a matrix per id."""

import pytest
import torch
from oracles import D, assert_near, dense_by_hand, fill_
from torch.utils._python_dispatch import TorchDispatchMode

from quorem import Embedding, EmbeddingCollection, Path, Table


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
@pytest.mark.parametrize("hidden", [(), (5,), (3, 9), (1,)])
@pytest.mark.parametrize(("collisions", "levels"), [(4, 1), (12, 2), (30, 3), (1, 1)])
def test_every_id_takes_its_own_path(collisions: int, levels: int, hidden: tuple[int, ...], activation: str) -> None:
    scheme = Path(collisions, hidden, num_partitions=levels + 1, activation=activation, force=True)
    table = fill_(Embedding(61, 6, scheme, dtype=torch.float64))
    assert len(table.paths[0].counts) == levels
    assert_near(table(torch.arange(61)), dense_by_hand(table), torch.float64)
    assert table.num_duplicates() == 0 or (activation == "relu" and hidden)  # units that are off tell nothing apart


def test_features_of_one_shape_share_a_group() -> None:
    tables = [Table(f"t{f}", 50 + f, D, Path(4, (5,), force=True)) for f in range(6)]
    module = EmbeddingCollection([*tables, Table("linear", 50, D, Path(4, (), force=True))])
    assert [group.members for group in module.paths] == [(0, 1, 2, 3, 4, 5), (6,)]
    assert module.paths[0].weights[0].shape == (6 * 4, D, 5)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor any operator gave."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return out


def test_no_copy_of_a_matrix_for_each_id() -> None:
    """65,536 ids through networks of 16 x 64: a matrix for each would be 67M numbers."""
    samples, d, hidden = 65536, 16, 64
    table = Embedding(100_000, d, Path(4, (hidden,)))
    with LargestTensor() as seen:
        table(torch.arange(samples)).sum().backward()
    assert seen.largest <= 2 * samples * hidden + 8 * 4 * hidden < samples * d * hidden / 7
