"""Dense features: the transforms from the numbers of a table to the inputs of a network."""

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from .malformed import Malformed, ParsedRows
from .meta import TRANSFORMS

LARGEST = float(np.finfo(np.float32).max)


class Dense:
    """Turns columns of numbers into an array, applying a transform to each; a missing or infinite number becomes 0.

    Args:
        names: names of the columns.
        transform: ``"log"``, the paper's ``log(max(x, 0) + 1)``, which turns numbers below 0 into 0;
            ``"signed_log"``, ``sign(x) log(|x| + 1)``, which is the same for numbers of at least 0; or ``"none"``.
        transforms: exceptions to ``transform``, by column.

    Raises:
        ValueError: if ``transforms`` names a column that is not dense.

    >>> dense = Dense(["a", "b"], "log", {"b": "signed_log"})
    >>> dense.array(pl.DataFrame({"a": [-3, None, 1], "b": [-3, None, 1]})).round(2)
    array([[ 0.  , -1.39],
           [ 0.  ,  0.  ],
           [ 0.69,  0.69]], dtype=float32)
    """

    def __init__(self, names: Sequence[str], transform: str, transforms: Mapping[str, str]) -> None:
        if strangers := sorted(set(transforms) - set(names)):
            raise ValueError(f"transforms ({', '.join(strangers)}) must be of dense columns ({', '.join(names)})")
        self.kinds = {name: transforms.get(name, transform) for name in names}

    def array(self, frame: pl.DataFrame) -> NDArray[np.float32]:
        """The dense features ``[N, F]`` of some rows."""
        if not self.kinds:
            return np.empty((frame.height, 0), np.float32)
        values = frame.select(_number(name).fill_null(0).alias(name) for name in self.kinds).to_numpy(order="c")
        kinds = np.array(list(self.kinds.values()))
        for kind in TRANSFORMS:
            values[:, kinds == kind] = transformed(values[:, kinds == kind], kind)
        return values.astype(np.float32)

    def checked(self, rows: ParsedRows, malformed: Malformed) -> ParsedRows:
        """The rows whose numbers float32 can represent; the others are added to ``malformed``."""
        for name, kind in self.kinds.items():
            if kind == "none":
                is_large = _number(name).abs() > LARGEST
                rows = malformed.filtered(rows, name, f"must be at most {LARGEST:.4g}, as float32", is_large)
        return rows


def _number(name: str) -> pl.Expr:
    """A column of numbers; those that are not finite are missing."""
    number = pl.col(name).cast(pl.Float64)
    return pl.when(number.is_finite()).then(number)


def transformed(numbers: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
    """Numbers after one of ``TRANSFORMS``."""
    if kind == "log":
        return np.log1p(np.maximum(numbers, 0))
    if kind == "signed_log":
        return np.copysign(np.log1p(np.abs(numbers)), numbers)
    return numbers
