"""The table of docs/scale.md: a model of 100 tables and 10 billion rows on 8 and 64 GPUs."""

import quorem
from quorem.integrations.scale import estimate

D, BATCH, TOTAL = 64, 8192, 10**10
WORLDS = (8, 64)


def cardinalities(count: int = 100, smallest: int = 1000, total: int = TOTAL) -> list[int]:
    """Sizes in geometric progression from ``smallest`` on, which sum to ``total`` rows."""
    low, high = 1.0, 2.0
    for _ in range(100):
        ratio = (low + high) / 2
        low, high = (ratio, high) if smallest * sum(ratio**i for i in range(count)) < total else (low, ratio)
    sizes = [round(smallest * low**i) for i in range(count)]
    return [*sizes[:-1], total - sum(sizes[:-1])]


def by_scheme(scheme: quorem.schemes.Scheme | None) -> list[quorem.Table]:
    """All tables of more than 10,000 ids in one scheme; None for full tables."""
    sizes = cardinalities()
    return [
        quorem.Table(f"t{i}", n, D, scheme if scheme is not None and n > 10_000 else quorem.Full())
        for i, n in enumerate(sizes)
    ]


def by_frequency(times: int, pools: int = 8) -> list[quorem.Table]:
    """A ``times``-th of the rows: half of them for hot ids, half in pools that the cold ids of several tables share."""
    sizes = cardinalities()
    rows = TOTAL // times - sum(n for n in sizes if n <= 10_000)
    tables = []
    for i, n in enumerate(sizes):
        pool = quorem.Pool(rows // 2 // pools, name=f"pool{i % pools}")
        scheme = quorem.HotCold(n * rows // TOTAL // 2, cold=pool) if n > 10_000 else quorem.Full()
        tables.append(quorem.Table(f"t{i}", n, D, scheme))
    return tables


MODELS = {
    "full": lambda: by_scheme(None),
    "`QR(16)`, sums": lambda: by_scheme(quorem.QR(16, operation="add")),
    "`HotCold`, 8 pools, 16x": lambda: by_frequency(16),
    "`GeneralizedQR(3)`, sums": lambda: by_scheme(quorem.GeneralizedQR(3, operation="add")),
}


def cost_table() -> list[list[str]]:
    """Memory, bytes and time of each model and number of GPUs, as text."""
    rows = [["tables", "GPUs", "GB a GPU", "replicated", "MB sent", "ms: rows", "exchange"]]
    for name, make in MODELS.items():
        tables = make()
        for world in WORLDS:
            cost = estimate(tables, world, batch_size=BATCH)
            replicated = sum(traffic.replicated for traffic in cost.tables)
            memory = f"{cost.memory / 1e9:,.3g}" + ("" if cost.fits else ", does not fit")
            sent = cost.vector_bytes + cost.id_bytes + cost.reduce_bytes
            times = [f"{x * 1e3:,.3g}" for x in (cost.lookup_seconds, cost.exchange_seconds)]
            rows.append([name, str(world), memory, f"{replicated} of {len(cost.tables)}", f"{sent / 1e6:,.3g}", *times])
    return rows
