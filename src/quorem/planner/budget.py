"""Budgets in bytes, as people write them."""

import re

import numpy as np

UNITS = {"": 1, "b": 1} | {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}


def parse_bytes(budget: int | str) -> int:
    """A number of bytes from ``512_000_000``, ``"512MB"`` (a million bytes each) or ``"512MiB"`` (2**20 each).

    >>> parse_bytes("512MB"), parse_bytes("1.5 GiB"), parse_bytes(4096)
    (512000000, 1610612736, 4096)
    """
    if isinstance(budget, bool) or not isinstance(budget, int | np.integer | str):
        raise TypeError(f"budget ({budget!r}) must be a number of bytes, or a string such as '512MB'")
    if not isinstance(budget, str):
        size = int(budget)
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", budget)
        if match is None or match[2].lower() not in UNITS:
            raise ValueError(f"budget ({budget!r}) must be a number of bytes, or with kB, MB, GB, TB, KiB, ... or TiB")
        whole, _, fraction = match[1].partition(".")
        size = int(whole + fraction) * UNITS[match[2].lower()] // 10 ** len(fraction)
    if size < 1:
        raise ValueError(f"budget ({budget!r}) must be at least 1 byte")
    return size


def show_bytes(size: int) -> str:
    """A number of bytes as readable text.

    >>> show_bytes(999), show_bytes(512_000_000), show_bytes(10**15)
    ('999 B', '512 MB', '1,000 TB')
    """
    if size < 1000:
        return f"{size} B"
    unit = 1
    while unit < 4 and round(size / 1000**unit, 2) >= 1000:
        unit += 1
    return f"{size / 1000**unit:,.4g} {'kMGT'[unit - 1]}B" if size < 10**16 else f"{size / 10**12:,.0f} TB"
