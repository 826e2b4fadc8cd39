"""Tables to fit: made by a scheme, or of noise; and the vectors that fitted tables compose."""

import torch
from oracles import CASES
from torch import Tensor

from quorem.fit import fit_
from quorem.paper.operations import OPERATIONS
from quorem.paper.schemes import TableSpec

FITTED = {name: scheme for name, scheme in CASES.items() if not name.startswith(("path", "hot", "pool"))}


def compose(tables: list[Tensor], spec: TableSpec) -> Tensor:
    """The full table, from the stored ones."""
    buckets = buckets_of(spec)
    return OPERATIONS[spec.operation](*(table[bucket] for table, bucket in zip(tables, buckets, strict=True)))


def buckets_of(spec: TableSpec) -> list[Tensor]:
    ids = torch.arange(spec.num_embeddings)
    return [part(ids) for part in spec.partitions]


def fitted(spec: TableSpec, dense: Tensor, frequencies: Tensor | None = None, **options: int) -> list[Tensor]:
    tables = [torch.full(shape, torch.nan, dtype=dense.dtype) for shape in spec.shapes]
    fit_(tables, spec, dense, frequencies, **options)
    return tables


def made_by(spec: TableSpec, seed: int = 0) -> Tensor:
    """A table that the scheme can hold, with entries of both signs."""
    draw = torch.Generator().manual_seed(seed)
    return compose([torch.randn(shape, generator=draw, dtype=torch.float64) for shape in spec.shapes], spec)


def noise(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uneven(n: int, seed: int = 0) -> Tensor:
    """Frequencies over many orders of magnitude, a third of them zero."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(n, generator=draw).pow(6) * (torch.rand(n, generator=draw) > 1 / 3)
