"""A file that records how prepared data turned raw columns into numbers, so that a trained model can repeat it.

The file holds the description of the data, and the vocabulary file of each categorical column: one token per line, in
order of id. It is read as a memory map. Neither writing nor reading it needs Polars.
"""

import os
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..files.atomic import naming_damage
from ..files.checked_json import build
from ..files.tensors import FileKind, TensorFile, write_tensors
from .meta import Meta
from .prepared import Prepared

KIND = FileKind("quorem-encoding", 2)


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """The prepared data ``meta``, whose identity is ``data``, and where they were.

    ``num_seen`` has a number for each vocabulary: ids from this one on do not occur in the training rows.
    """

    data: str
    folder: str
    meta: Meta
    num_seen: list[int]

    def __post_init__(self) -> None:
        if len(self.num_seen) != len(self.vocabularies):
            raise ValueError(f"num_seen ({self.num_seen}) must be a number of ids for each vocabulary")

    @property
    def vocabularies(self) -> tuple[str, ...]:
        """The columns that have a vocabulary."""
        return self.meta.columns.categorical if self.meta.has_vocabularies else ()


def write_encoding(path: str | os.PathLike[str], prepared: Prepared, data: str) -> None:
    """Write the encoding of prepared data with the identity ``data``."""
    meta, num_seen, texts = replace(prepared.meta, checksums={}), [], {}
    if meta.first_token_id is not None:
        for name in prepared.names:
            is_seen = prepared.frequencies(name)[meta.first_token_id :] > 0  # tokens are ordered by training rows
            num_seen.append(meta.first_token_id + int(is_seen.sum()))
            texts[name] = torch.from_numpy(np.frombuffer(bytearray(prepared.vocabulary_text(name)), np.uint8))
    encoding = Encoding(data=data, folder=str(prepared.path.resolve()), meta=meta, num_seen=num_seen)
    write_tensors(path, KIND, texts, asdict(encoding))


def read_encoding(path: str | os.PathLike[str], *, verify: bool = True) -> tuple[Encoding, dict[str, Tensor]]:
    """The encoding that ``write_encoding`` wrote, and the text of each vocabulary, uint8 ``[bytes]``."""
    file = TensorFile(path, KIND, verify=verify)
    with naming_damage(file.path):
        encoding = build(Encoding, file.description)
        if file.tensors.keys() != set(encoding.vocabularies):
            raise ValueError("its vocabularies are not those of its columns")
        for name, text in file.tensors.items():
            if text.dtype != torch.uint8 or text.dim() != 1:
                raise ValueError(f"the vocabulary of {name} is {text.dtype} {list(text.shape)} and must be bytes")
    return encoding, {name: file.tensors[name] for name in encoding.vocabularies}
