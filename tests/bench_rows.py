"""A row of a benchmark with numbers made up."""

from quorem.experiments.bench import report


def row(**changes: object) -> report.Row:
    values: dict[str, object] = dict.fromkeys(report.CSV_COLUMNS, "")
    values |= {"mode": "step", "provider": "fused", "scheme": "QR(4)", "ids": "zipf"}
    values |= {"batch": 128, "dim": 16, "graph": 0, "bytes": 10, "gbps": 1.5, "floor_us": 0.5, "ratio_to_floor": 20.0}
    values |= {"median_us": 10.0, "q20_us": 9.0, "q80_us": 12.0, "samples": 5, "stored_bytes": 1000, "copy_gbps": 20.0}
    return report.Row(**values | changes)
