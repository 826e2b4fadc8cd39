"""Budgets as people write them."""

import numpy as np
import pytest
import torch

from quorem.planner.budget import parse_bytes, show_bytes

SIZES = {"512MB": 512 * 10**6, "2GiB": 2**31, "1.5 kB": 1500, "7": 7, "7B": 7, "0.1TB": 10**11, " 3mb ": 3 * 10**6}


@pytest.mark.parametrize(("text", "size"), [*SIZES.items(), (np.int64(7), 7)])
def test_budgets(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1e3", "1 XB", "1,000", "1.MB", "nan"])
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"budget \(.*\) must be a number with B, kB, MB"):
        parse_bytes(text)


def test_budgets_of_the_wrong_kind() -> None:
    for wrong in (1.5, torch.tensor(1.5), True, None):
        with pytest.raises(TypeError, match=r"budget \(.*\) must be a number of bytes, or a string such as '512MB'"):
            parse_bytes(wrong)
    for wrong in (0, -5, "0MB"):
        with pytest.raises(ValueError, match=r"must be at least 1 byte"):
            parse_bytes(wrong)


def test_sizes_for_people() -> None:
    shown = {0: "0 B", 999: "999 B", 1000: "1 kB", 999_999: "1 MB", 1_500_000: "1.5 MB", 10**12: "1 TB"}
    assert {size: show_bytes(size) for size in shown} == shown
