"""A file that records how prepared data turned raw columns into numbers, so that a trained model can repeat it.

The file holds the names of the columns, the transforms, and the vocabulary file of each categorical column: one token
per line, in order of id. It is read as a memory map. Neither writing nor reading it needs Polars.
"""

import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..files.checked_json import build
from ..files.tensors import FileKind, TensorFile, write_tensors
from .meta import Transform, check_columns
from .prepared import Prepared

KIND = FileKind("quorem-encoding", 1)


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Columns and transforms of prepared data.

    ``ids`` says how tokens were given ids: ``"vocabulary"`` (by their line in the vocabulary) or ``"raw"``
    (``hash_strings`` of the token). It is ``"none"`` for synthetic data, whose columns hold the ids themselves.
    """

    data: str  # identity of the prepared data
    folder: str  # folder of the prepared data
    dense: list[str]
    categorical: list[str]
    bags: list[str]  # the categorical columns with several values per row
    cardinalities: list[int]
    transforms: dict[str, Transform]  # transform of each dense column
    ids: Literal["vocabulary", "raw", "none"]
    first_token: int  # id of the first line of a vocabulary
    unknown: int | None  # id of all tokens that are not in the vocabulary; None if there is no such id
    num_seen: list[int]  # of each vocabulary: ids from this one on do not occur in the training rows
    positive: str | None  # which labels are a click
    missing: list[str]  # texts that stand for a missing value
    separator: str  # separator between the fields of the CSV file that was prepared
    multi_separator: str  # separator between the values of a multi-valued field

    def __post_init__(self) -> None:
        """Check ranges, and that the fields fit together."""
        check_columns(self.dense, self.categorical, self.bags, self.cardinalities, self.ids == "raw")
        if sorted(self.transforms) != sorted(self.dense):
            raise ValueError("transforms must be those of the dense columns")
        if self.first_token not in (0, 1, 2) or self.unknown not in (None, 0, 1, 2):
            raise ValueError(f"first_token ({self.first_token}) and unknown ({self.unknown}) must be in [0, 2]")
        if len(self.num_seen) != len(self.cardinalities) * (self.ids == "vocabulary"):
            raise ValueError(f"num_seen ({self.num_seen}) must be a number of ids for each vocabulary")
        if len(self.separator) != 1 or len(self.multi_separator) != 1:
            raise ValueError("separator and multi_separator must be one character each")

    @classmethod
    def of(cls, prepared: Prepared, data: str) -> "Encoding":
        """The encoding of prepared data with the identity ``data``."""
        meta, config = prepared.meta, prepared.meta["config"]
        kind: Any = "none" if "synthetic" in config else "raw" if prepared.has_raw_ids else "vocabulary"
        first = meta["first_token_id"] or 0
        names = prepared.names if kind == "vocabulary" else []  # whose tokens are ordered by training rows
        return cls(
            data=data,
            folder=str(prepared.path.resolve()),
            dense=prepared.dense_names,
            categorical=prepared.names,
            bags=meta["bags"],
            cardinalities=prepared.cardinalities,
            # The numbers of synthetic data are transformed already.
            transforms=dict(meta.get("transforms", dict.fromkeys(prepared.dense_names, "none"))),
            ids=kind,
            first_token=first,
            unknown=meta.get("unknown_id"),
            num_seen=[first + int((prepared.frequencies(name)[first:] > 0).sum()) for name in names],
            positive=meta.get("positive"),
            missing=meta.get("missing", []),
            separator=meta.get("separator", ","),
            multi_separator=meta.get("multi_separator", "|"),
        )


def write_encoding(path: str | os.PathLike[str], prepared: Prepared, data: str) -> None:
    """Write the encoding of prepared data with the identity ``data``.

    Raises:
        ValueError: if the data are damaged.
        OSError: if the disk is full; an existing file is kept.
    """
    encoding = Encoding.of(prepared, data)
    names = encoding.categorical if encoding.ids == "vocabulary" else []
    texts = {name: np.frombuffer(bytearray(prepared.vocabulary_text(name)), np.uint8) for name in names}
    write_tensors(path, KIND, {name: torch.from_numpy(text) for name, text in texts.items()}, asdict(encoding))


def read_encoding(path: str | os.PathLike[str], *, verify: bool = True) -> tuple[Encoding, dict[str, Tensor]]:
    """The encoding that ``write_encoding`` wrote, and the text of each vocabulary, uint8 ``[bytes]``.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is cut off, damaged, or of another kind.
    """
    file = TensorFile(path, KIND)
    try:
        fields = {name: value for name, value in file.description.items() if name != "buckets"}  # of earlier files
        encoding = build(Encoding, fields)
        names = encoding.categorical if encoding.ids == "vocabulary" else []
        if sorted(file.tensors) != sorted(names):
            raise ValueError("its vocabularies are not those of its columns")
        for name, text in file.tensors.items():
            if text.dtype != torch.uint8 or text.dim() != 1:
                raise ValueError(f"the vocabulary of {name} is {text.dtype} {list(text.shape)} and must be bytes")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file.path} is damaged: {error}") from None
    if verify:
        file.verify()
    return encoding, {name: file.tensors[name] for name in names}
