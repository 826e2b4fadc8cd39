"""How many distinct rows a batch reads, counted on a random batch with the id frequencies of the tables."""

from collections.abc import Mapping, Sequence
from math import log

import torch
from torch import Tensor

from ..modules.collection import Table
from ..paper.schemes.frequency import Ranks
from .features import Feature


def drawn_ids(table: Table, count: int) -> Tensor:
    """Draw ``count`` ids by the table's frequencies, or by Zipf's law: rank i has a share of about ``log(1 + 1 / i)``.

    >>> drawn_ids(Table("user", 10, 16, frequencies=torch.tensor([0] * 9 + [5])), 3)
    tensor([9, 9, 9])
    """
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    n, counts = table.num_embeddings, table.frequencies
    if isinstance(counts, Tensor) and float(counts.sum()) > 0:
        sums = counts.double().cumsum(0)
        return torch.searchsorted(sums, uniform * sums[-1], right=True).clamp_(max=n - 1)
    ids = (uniform * log(1 + n)).exp().long().sub_(1).clamp_(0, n - 1)
    if isinstance(counts, Ranks):
        listed = torch.cat([counts.hot.cpu(), counts.cold.cpu()]).long()
        is_listed = ids < len(listed)
        ids[is_listed] = listed[ids[is_listed]]
    return ids


def distinct_rows(
    features: Sequence[Feature],
    id_lists: Tensor,
    tables: Sequence[Table],
    batch_size: int,
    ids_per_sample: Mapping[str, float],
) -> dict[str, int]:
    """How many distinct rows of each part a batch reads, by name of the part; at least one of each.

    Args:
        features: the features that read the tables.
        id_lists: the lists of hot and cold ids.
        tables: the tables, whose frequencies are used.
        batch_size: number of samples.
        ids_per_sample: mean number of ids by feature; 1 where absent.
    """
    by_name = {table.name: table for table in tables}
    rows: dict[str, list[Tensor]] = {}
    for f in features:
        ids = drawn_ids(by_name[f.table], max(1, round(batch_size * ids_per_sample.get(f.name, 1)))).unique()
        reads = f.reads(ids, id_lists.cpu())
        for j, (part, row) in enumerate(zip(f.parts, reads.rows, strict=True)):
            rows.setdefault(part.name, []).append(row if reads.used is None else row[reads.used[:, j]])
    return {name: max(1, len(torch.cat(of_part).unique())) for name, of_part in rows.items()}
