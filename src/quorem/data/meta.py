"""``meta.json`` of prepared data: reading it, checking its contents, and which versions are supported."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from .. import files

FORMAT = "quorem-prepared"
FORMAT_VERSION = 2  # 1 had no checksums
Transform = Literal["log", "signed_log", "none"]  # of dense features
TRANSFORMS: tuple[Transform, ...] = get_args(Transform)
SPLITS = ("train", "validation", "test")


def read_meta(folder: Path) -> dict[str, Any]:
    """The contents of a folder's ``meta.json``, after checks.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, or of an unsupported version.
    """
    path = folder / "meta.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} is not a folder of prepared data: {path.name} is missing")
    text = files.read(path)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"{path} must be of format {FORMAT!r}")
    version = values.get("format_version")
    if version not in (1, FORMAT_VERSION):
        raise ValueError(
            f"{path} has format version {version} but this quorem reads {FORMAT_VERSION}: prepare it again"
        )
    try:
        meta = files.unsealed(values, required=version == FORMAT_VERSION)
        for rule, holds in RULES.items():
            if not holds(meta):
                raise ValueError(rule)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is damaged: {reason}") from None
    if version == 1:
        warnings.warn(
            f"{folder} was prepared by an earlier version and has no checksums: damage to it goes unnoticed;"
            " prepare it again",
            stacklevel=3,
        )
    return meta


def are_names(values: Any) -> bool:
    """Whether a JSON value is a list of names."""
    return isinstance(values, list) and all(isinstance(name, str) and name for name in values)


def is_raw(config: Any) -> bool:
    """Whether the data hold raw ids: 64-bit integers without a vocabulary."""
    return isinstance(config, dict) and config.get("ids") == "raw"


def are_sizes(values: Any, limit: int) -> bool:
    """Whether a JSON value is a list of integers in ``[1, limit)``."""
    return isinstance(values, list) and all(type(value) is int and 1 <= value < limit for value in values)


def _are_bounds(split: Any, num_rows: int) -> bool:
    if not isinstance(split, dict) or not all(name in split for name in SPLITS):
        return False
    pairs = list(split.values())
    if not all(isinstance(pair, list) and len(pair) == 2 and all(type(row) is int for row in pair) for pair in pairs):
        return False
    return all(0 <= start <= stop <= num_rows for start, stop in pairs)


RULES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "num_rows must be an integer of at least 0": lambda m: type(m["num_rows"]) is int and m["num_rows"] >= 0,
    "dense must be a list of names": lambda m: are_names(m["dense"]),
    "categorical must be a list of names": lambda m: are_names(m["categorical"]) and bool(m["categorical"]),
    "bags must be names of categorical": lambda m: are_names(m["bags"]) and set(m["bags"]) <= set(m["categorical"]),
    "cardinalities must be a number of ids for each of categorical": lambda m: (
        are_sizes(m["cardinalities"], 2**63 if is_raw(m["config"]) else 2**31)
        and len(m["cardinalities"]) == len(m["categorical"])
    ),
    f"split must be the rows of {', '.join(SPLITS)}": lambda m: _are_bounds(m["split"], m["num_rows"]),
    "config must be an object": lambda m: isinstance(m["config"], dict),
    "first_token_id must be an integer or null": lambda m: (
        m["first_token_id"] is None or (type(m["first_token_id"]) is int and 0 <= m["first_token_id"] <= 2)
    ),
    "checksums must be an object of text": lambda m: (
        m["format_version"] == 1
        or (isinstance(m["checksums"], dict) and all(isinstance(text, str) for text in m["checksums"].values()))
    ),
}
