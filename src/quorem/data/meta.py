"""``meta.json`` of prepared data: what it holds, and reading it with checks."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..files import atomic as files
from ..files.checked_json import build
from .columns import Columns, check_separator

META = "meta.json"
FORMAT = {"format": "quorem-prepared", "format_version": 4}
Transform = Literal["log", "signed_log", "none"]  # of dense features
SPLITS = ("train", "validation", "test")


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
        """Check ranges, and that the fields fit together."""
        if self.num_rows < 0:
            raise ValueError(f"num_rows ({self.num_rows}) must be at least 0")
        categorical = self.columns.categorical
        if not categorical or not set(self.columns.bags) <= set(categorical):
            raise ValueError("categorical must name at least one column, and bags some of categorical")
        if len(self.cardinalities) != len(categorical) or not all(1 <= n < 2**31 for n in self.cardinalities):
            raise ValueError("cardinalities must be integers in [1, 2**31), one for each of categorical")
        if set(self.transforms) != set(self.columns.dense):
            raise ValueError("transforms must be those of the dense columns")
        if not set(SPLITS) <= self.split.keys() or not all(
            0 <= start <= stop <= self.num_rows for start, stop in self.split.values()
        ):
            raise ValueError(f"split must be the rows of {', '.join(SPLITS)}")
        if not {self.first_token_id, self.unknown_id} <= {None, 0, 1, 2}:
            raise ValueError(
                f"first_token_id ({self.first_token_id}) and unknown_id ({self.unknown_id}) must be below 3"
            )
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
    try:
        return build(Meta, values)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
