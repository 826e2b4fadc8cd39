"""A file that records how prepared data turned raw columns into numbers, so that a trained model can repeat it.

The file holds the names of the columns, the transforms, and the vocabulary file of each categorical column: one token
per line, in order of id. It is read as a memory map. Neither writing nor reading it needs Polars.
"""

import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensor_file import FileKind, TensorFile, write_tensors
from .meta import TRANSFORMS, are_names, are_sizes
from .prepared import Prepared

KIND = FileKind("quorem-encoding", 1)


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Columns and transforms of prepared data.

    ``ids`` says how tokens were given ids: ``"vocabulary"`` (by their line in the vocabulary), ``"hash"``
    (``1 + crc32(token) % buckets``) or ``"raw"`` (``hash_strings`` of the token). It is ``"none"`` for synthetic data,
    whose columns hold the ids themselves.
    """

    data: str  # identity of the prepared data
    folder: str  # folder of the prepared data
    dense: list[str]
    categorical: list[str]
    bags: list[str]  # the categorical columns with several values per row
    cardinalities: list[int]
    transforms: dict[str, str]  # transform of each dense column
    ids: str
    buckets: int | None
    first_token: int  # id of the first line of a vocabulary
    unknown: int | None  # id of all tokens that are not in the vocabulary; None if there is no such id
    separator: str = ","  # separator between the fields of the CSV file that was prepared
    multi_separator: str = "|"  # separator between the values of a multi-valued field

    @classmethod
    def of(cls, prepared: Prepared, data: str) -> "Encoding":
        """The encoding of prepared data with the identity ``data``."""
        meta, config = prepared.meta, prepared.meta["config"]
        kind = config.get("ids") if config.get("ids") in ("hash", "raw") else None
        return cls(
            data=data,
            folder=str(prepared.path.resolve()),
            dense=prepared.dense_names,
            categorical=prepared.names,
            bags=meta["bags"],
            cardinalities=prepared.cardinalities,
            transforms=_transforms(prepared),
            ids=kind or ("none" if meta["first_token_id"] is None else "vocabulary"),
            buckets=config.get("buckets"),
            first_token=meta["first_token_id"] or 0,
            unknown=meta.get("unknown_id"),
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
    tensors = {}
    if encoding.ids == "vocabulary":
        texts = {name: np.frombuffer(prepared.vocabulary_text(name), np.uint8) for name in encoding.categorical}
        tensors = {name: torch.from_numpy(text.copy()) for name, text in texts.items()}
    write_tensors(path, KIND, tensors, asdict(encoding))


def read_encoding(path: str | os.PathLike[str], *, verify: bool = True) -> tuple[Encoding, dict[str, Tensor]]:
    """The encoding that ``write_encoding`` wrote, and the text of each vocabulary, uint8 ``[bytes]``.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is cut off, damaged, or of another kind.
    """
    file = TensorFile(path, KIND)
    try:
        encoding = _checked(file.description)
        names = encoding.categorical if encoding.ids == "vocabulary" else []
        if sorted(file.entries) != sorted(names):
            raise ValueError("its vocabularies are not those of its columns")
        for name, entry in file.entries.items():
            if entry.dtype != torch.uint8 or len(entry.shape) != 1:
                raise ValueError(f"the vocabulary of {name} is {entry.dtype} {list(entry.shape)} and must be bytes")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file.path} is damaged: {error}") from None
    if verify:
        file.verify()
    return encoding, {name: file.tensor(name) for name in names}


def _checked(values: dict[str, Any]) -> Encoding:
    encoding = Encoding(**values)
    if not all(map(are_names, (encoding.dense, encoding.categorical, encoding.bags))):
        raise ValueError("dense, categorical and bags must be lists of names")
    sizes, limit = encoding.cardinalities, 2**63 if encoding.ids == "raw" else 2**31
    if not are_sizes(sizes, limit):
        raise ValueError(f"cardinalities must be integers in [1, {limit})")
    if len(sizes) != len(encoding.categorical) or not set(encoding.bags) <= set(encoding.categorical):
        raise ValueError("cardinalities and bags must be those of categorical")
    if encoding.ids not in ("vocabulary", "hash", "none", "raw"):
        raise ValueError("ids must be 'vocabulary', 'hash', 'raw' or 'none'")
    kinds, known = encoding.transforms, set(TRANSFORMS)
    if not isinstance(kinds, dict) or sorted(kinds) != sorted(encoding.dense) or not set(kinds.values()) <= known:
        raise ValueError(f"transforms must be one of {', '.join(sorted(TRANSFORMS))} for each dense column")
    if (encoding.ids == "hash") != (type(encoding.buckets) is int and encoding.buckets >= 1):
        raise ValueError("buckets must be given with ids 'hash', and only then")
    small = (encoding.first_token, 0 if encoding.unknown is None else encoding.unknown)
    if not all(type(value) is int and 0 <= value <= 2 for value in small):
        raise ValueError("first_token and unknown must be in [0, 2]")
    for separator in (encoding.separator, encoding.multi_separator):
        if not isinstance(separator, str) or len(separator) != 1:
            raise ValueError("separator and multi_separator must be one character each")
    if not isinstance(encoding.data, str) or not isinstance(encoding.folder, str):
        raise ValueError("data and folder must be strings")
    return encoding


def _transforms(prepared: Prepared) -> dict[str, str]:
    """The transform of each dense column; the numbers of synthetic data are transformed already."""
    if "transforms" in prepared.meta:
        return dict(prepared.meta["transforms"])
    made_up = "synthetic" in prepared.meta["config"]
    return dict.fromkeys(
        prepared.dense_names, "log" if prepared.meta["config"].get("log_dense", not made_up) else "none"
    )
