"""``meta.json`` of prepared data: what it holds, and reading it with checks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ..files import atomic as files
from ..files.checked_json import build

META = "meta.json"
FORMAT = "quorem-prepared"
FORMAT_VERSION = 3  # 2 had no positive and missing
Transform = Literal["log", "signed_log", "none"]  # of dense features
TRANSFORMS: tuple[Transform, ...] = get_args(Transform)
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class Meta:
    """The fields of ``meta.json``. Synthetic data have losses, and nothing that tells of a file."""

    format: Literal["quorem-prepared"]
    format_version: int
    num_rows: int
    label: str
    dense: list[str]
    categorical: list[str]
    bags: list[str]  # the categorical columns with several values per row
    cardinalities: list[int]
    split: dict[str, tuple[int, int]]  # rows [start, stop)
    day_starts: list[int]
    null_id: int
    unknown_id: int | None
    first_token_id: int | None
    config: dict[str, Any]
    versions: dict[str, Any]
    checksums: dict[str, str]
    time: dict[str, Any] | None = None
    separator: str = ","
    multi_separator: str = "|"
    positive: str | None = None
    missing: list[str] | None = None
    transforms: dict[str, Transform] | None = None
    clipped: dict[str, int] | None = None  # of earlier folders
    malformed: dict[str, Any] | None = None
    source: dict[str, Any] | None = None
    bayes_log_loss: dict[str, float] | None = None
    true_log_loss: dict[str, float] | None = None

    def __post_init__(self) -> None:
        """Check ranges, and that the fields fit together."""
        if self.num_rows < 0:
            raise ValueError(f"num_rows ({self.num_rows}) must be at least 0")
        check_columns(self.dense, self.categorical, self.bags, self.cardinalities, is_raw(self.config))
        if not set(SPLITS) <= self.split.keys() or not all(
            0 <= start <= stop <= self.num_rows for start, stop in self.split.values()
        ):
            raise ValueError(f"split must be the rows of {', '.join(SPLITS)}")
        if self.first_token_id not in (None, 0, 1, 2):
            raise ValueError(f"first_token_id ({self.first_token_id}) must be in [0, 2]")


def check_columns(dense: list[str], categorical: list[str], bags: list[str], sizes: list[int], raw: bool) -> None:
    """Raise ValueError unless names and cardinalities of columns fit together."""
    if not categorical or not all([*dense, *categorical]) or not set(bags) <= set(categorical):
        raise ValueError("dense and categorical must be names, and bags names of categorical")
    limit = 2**63 if raw else 2**31
    if len(sizes) != len(categorical) or not all(1 <= size < limit for size in sizes):
        raise ValueError(f"cardinalities must be integers in [1, {limit}), one for each of categorical")


def read_meta(folder: Path) -> dict[str, Any]:
    """The contents of a folder's ``meta.json``, after checks.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, or of another version.
    """
    path = folder / META
    if not path.exists():
        raise FileNotFoundError(f"{folder} is not a folder of prepared data: {path.name} is missing (quorem prepare)")
    text = files.read(path)
    try:
        values = json.loads(text)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"it must be of format {FORMAT!r}")
        if (version := values.get("format_version", FORMAT_VERSION)) != FORMAT_VERSION:
            raise ValueError(f"format_version ({version}) must be {FORMAT_VERSION}: prepare the data again")
        meta = files.unsealed(values, required=True)
        build(Meta, meta)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return meta


def is_raw(config: dict[str, Any]) -> bool:
    """Whether the data hold raw ids: 64-bit integers without a vocabulary."""
    return config.get("ids") == "raw"
