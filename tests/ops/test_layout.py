"""Where tables and pools of several widths lie in ``stored``."""

import torch

from quorem import QR, EmbeddingCollection, Full, HotCold, Pool, Table
from quorem.ops.layout import extents_of
from quorem.optim.row_optimizer import table_extents


def test_extents_follow_from_a_layout():
    tables = EmbeddingCollection(
        [
            Table("one", 1, 4, Full()),
            Table("user", 100, 8, QR(4)),
            Table("item", 90, 8, QR(4, operation="concat")),
            Table("shop", 80, 12, HotCold(3, cold=Pool(40))),
            Table("city", 70, 12, HotCold(3, cold=Pool(40))),
        ]
    )
    extents = [[e.base, e.pitch] for group in (*tables.extents, *tables.pools.values()) for e in group]
    assert {pitch for _, pitch in extents} == {1, 2, 3}
    assert extents_of(tables.layout).tolist() == extents == table_extents(tables.stored).tolist()
    assert table_extents(torch.nn.Parameter(torch.ones(3, 2))).tolist() == [[0, 1]]
