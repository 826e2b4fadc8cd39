"""The columns of a table that are used, and for what."""

from collections import Counter
from dataclasses import dataclass

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
        """Check names and separator."""
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
