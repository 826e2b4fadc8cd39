"""``quorem.load``: load a saved file, or the folder of a run."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import nn

from ..files import saved_model

if TYPE_CHECKING:
    from .scorer import Scorer


def load(
    path: str | os.PathLike[str],
    *,
    unknown: Literal["error", "missing"] = "error",
    verify: bool = True,
) -> "nn.Module | Scorer":
    """The module or network that ``save`` wrote; for the folder of a run, a ``Scorer`` that scores raw rows.

    The parameters are views of the mapped file; memory is copied only where they are written to.

    Args:
        path: path of the file, or of the folder of a finished run.
        unknown: for a run, how a token that is not in the vocabulary is treated if the data have no id for unknown
            tokens: ``"error"``, or ``"missing"``, as a missing value.
        verify: compare every tensor with its checksum, which reads the file once; False maps the file and reads
            nothing.

    Raises:
        FileNotFoundError: if there is no such file, or the run is not finished.
        ValueError: if a file is cut off, damaged, or of another kind or version.

    >>> import quorem, tempfile
    >>> path = tempfile.mkdtemp() + "/items.safetensors"
    >>> quorem.save(quorem.EmbeddingBag(1000, 16, quorem.QR(4)), path)
    >>> load(path).num_parameters
    4064
    """
    if not Path(path).is_dir():
        if unknown != "error":
            raise ValueError(f"unknown ({unknown!r}) must be 'error' for a file: only a run has a vocabulary")
        return saved_model.load(path, verify=verify)
    from .scorer import Scorer

    return Scorer(path, unknown=unknown, verify=verify)
