"""Modules with hot and cold ids, pools, quantized rows and tables of several features, for the tests of exports."""

import torch
from oracles import CASES, D, N, fill_

from quorem import QR, ChineseRemainder, Custom, EmbeddingCollection, GeneralizedQR, HotCold, Pool, Table, quantize_
from quorem.paper.partitions import ExplicitPartition

COUNTS = torch.randperm(N, generator=torch.Generator().manual_seed(0))
FEATURES = 18


def hot_and_cold(bits: int = 0, **options: object) -> EmbeddingCollection:
    """Every way in which ids may be hot, cold or of the rest, with and without lists of them."""
    groups = Custom((ExplicitPartition([i % 7 for i in range(45)]),), check=False)
    schemes = {
        "qr": HotCold(5, cold=QR(4), force=True),
        "rest": HotCold(4, cold=QR(4, operation="concat"), num_rest=11, force=True),
        "path": HotCold(5, cold=CASES["path-mlp"], num_rest=10, force=True),
        "map": HotCold(5, cold=groups, num_rest=10, force=True),
        "no cold": HotCold(20, cold=QR(4), num_rest=40, force=True),
        "no hot": HotCold(0, cold=GeneralizedQR(2), num_rest=10, force=True),
        "all cold": HotCold(0, cold=QR(4)),
        "pool": HotCold(5, cold=Pool(40), num_rest=10, force=True),
    }
    tables = [Table(name, N, D, scheme) for name, scheme in schemes.items()]
    ranked = [Table(f"ranked {name}", N, D, scheme, frequencies=COUNTS) for name, scheme in schemes.items()]
    both = Table("both", N, D, HotCold(3, cold=Pool(40)), features=("clicked", "seen"), padding_idx=2)
    module = fill_(EmbeddingCollection([*tables, both, *ranked], **options))
    return quantize_(module, bits) if bits else module


def several_widths(bits: int = 0) -> EmbeddingCollection:
    """Rows in pieces of three numbers, so that their codes are padded."""
    tables = [
        Table("user", N, 12, QR(4)),
        Table("item", N, 9, ChineseRemainder(2, operation="add"), features=("from", "to")),
        Table("shop", N, 6, HotCold(3, cold=Pool(40))),
        Table("path", N, 12, CASES["path-mlp"]),
    ]
    module = fill_(EmbeddingCollection(tables))
    return quantize_(module, bits) if bits else module
