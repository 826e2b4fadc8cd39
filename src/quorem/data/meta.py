"""``meta.json`` of prepared data: its columns and what else it holds, and reading it with checks."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..files import atomic as files
from ..files.checked_json import build

META = "meta.json"
FORMAT = {"format": "quorem-prepared", "format_version": 4}
Transform = Literal["log", "signed_log", "none"]  # of dense features
SPLITS = ("train", "validation", "test")
MISSING = ("NA", "N/A", "n/a", "<NA>", "NaN", "nan", "NULL", "null", "None", "inf", "-inf", "Inf", "-Inf")


@dataclass(frozen=True)
class Columns:
    """The columns that are read, and what each is used for.

    ``label`` is None if only features are read. ``bags`` are the categorical columns with several values per row,
    separated by ``multi_separator``. ``positive`` says which values of the label are a click (``values.clicks``).
    Fields and values that are one of ``missing`` are missing, as empty ones. Rows are sorted by ``time``.
    """

    label: str | None
    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    bags: tuple[str, ...] = ()
    multi_separator: str = "|"
    positive: str | None = None
    missing: tuple[str, ...] = MISSING
    time: str | None = None

    def __post_init__(self) -> None:
        check_separator("multi_separator", self.multi_separator)
        counts = Counter(self.all)
        if wrong := sorted(name for name, count in counts.items() if not name or "\n" in name or count > 1):
            names = ", ".join(map(repr, wrong))
            raise ValueError(f"names of columns ({names}) must be unique, not empty, and of one line")

    @property
    def all(self) -> tuple[str, ...]:
        """Every column that is read."""
        return tuple(n for n in (self.label, *self.dense, *self.categorical, self.time) if n is not None)

    @property
    def single(self) -> tuple[str, ...]:
        """The categorical columns with one value per row."""
        return tuple(name for name in self.categorical if name not in self.bags)


def check_separator(name: str, value: str) -> None:
    """Raise ValueError unless ``value`` can separate fields or values."""
    if len(value) != 1 or not value.isascii() or value in '"\r\n\0':
        raise ValueError(f"{name} ({value!r}) must be one ASCII character, and no quote or line end")


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What is known about prepared data. Data that were made up have a best loss, and nothing of a file."""

    num_rows: int
    columns: Columns
    cardinalities: list[int]
    split: dict[str, tuple[int, int]]  # rows [start, stop)
    transforms: dict[str, Transform]  # of each dense column
    separator: str = ","  # between the fields of the CSV file that was prepared
    first_token_id: int | None = None  # the id of the first line of a vocabulary; None if the ids are made up
    unknown_id: int | None = None  # the id of all tokens that are not in the vocabulary; None if there is no such id
    config: dict[str, Any]
    versions: dict[str, Any]
    malformed: dict[str, Any] = field(default_factory=lambda: {"count": 0, "first": []})
    source: dict[str, Any] | None = None
    time: str | None = None  # the column by which rows are sorted
    steps_back: int = 0  # rows of the file that are earlier than the row before them
    bayes_log_loss: dict[str, float] | None = None
    checksums: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_rows < 0:
            raise ValueError(f"num_rows ({self.num_rows}) must be at least 0")
        categorical = self.columns.categorical
        if not categorical or not set(self.columns.bags) <= set(categorical):
            raise ValueError("categorical must name at least one column, and bags some of categorical")
        if len(self.cardinalities) != len(categorical) or not all(1 <= n < 2**31 for n in self.cardinalities):
            raise ValueError("cardinalities must be integers in [1, 2**31), one for each of categorical")
        if set(self.transforms) != set(self.columns.dense):
            raise ValueError("transforms must be those of the dense columns")
        in_range = all(0 <= start <= stop <= self.num_rows for start, stop in self.split.values())
        if not in_range or not set(SPLITS) <= self.split.keys():
            raise ValueError(f"split must be the rows of {', '.join(SPLITS)}")
        if not {self.first_token_id, self.unknown_id} <= {None, 0, 1, 2}:
            raise ValueError(f"first_token_id ({self.first_token_id}) and unknown_id ({self.unknown_id}) must be < 3")
        check_separator("separator", self.separator)

    @property
    def rows(self) -> dict[str, int]:
        """The number of rows of each split."""
        return {name: stop - start for name, (start, stop) in self.split.items()}

    @property
    def has_vocabularies(self) -> bool:
        """Whether ids stand for tokens; those of made-up data stand for nothing."""
        return self.first_token_id is not None


def read_meta(folder: Path) -> Meta:
    """The contents of a folder's ``meta.json``, after checks."""
    path = folder / META
    if not path.exists():
        raise FileNotFoundError(f"{folder} is not a folder of prepared data: {path.name} is missing (quorem prepare)")
    values = files.read_json(path)
    if {name: values.pop(name, None) for name in FORMAT} != FORMAT:
        raise ValueError(f"{path} must hold {FORMAT}: prepare the data again")
    with files.naming_damage(path):
        return build(Meta, values)
