"""Export a module or a network as a ``torch.export`` program that runs without quorem."""

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import torch
import torch.fx.experimental._config
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ..bags import EmbeddingBag
from ..files import replacing
from ..store.model_file import tables_in
from .plain import PlainModel
from .signature import UnknownVector, inputs_of

BATCH = 3  # batch size of the example that is traced: torch treats sizes 0 and 1 as constants


def export_program(
    model: nn.Module, *, unknown: UnknownVector = "nan", jagged: bool = False, sample_weights: bool = False
) -> ExportedProgram:
    """A model as an exported program of torch's own operators, for any batch size.

    Inputs and outputs are those of ``export_onnx``; inputs are positional, outputs are a dict.

    Args:
        model: a module or network that ``save`` accepts.
        unknown: the vector of an id outside its table: ``"nan"``, or ``"zeros"``, with which the id is left out of a
            bag.
        jagged: bags of any length, given by offsets.
        sample_weights: add ``per_sample_weights`` as an input.

    Raises:
        TypeError: if ``save`` does not accept the class of the model.
        ValueError: if an option does not fit the model.

    >>> import quorem
    >>> program = export_program(quorem.Embedding(1000, 16, quorem.QR(4)))
    >>> program.module()(torch.tensor([0, 999, 7]))["vectors"].shape
    torch.Size([3, 16])
    """
    examples, sizes = _example(model, unknown, jagged, sample_weights)
    plain = PlainModel(model, unknown=unknown, jagged=jagged).eval()
    # Without backed_size_oblivious, a batch size derived from the length of the offsets could not be 1.
    with torch.no_grad(), torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        return torch.export.export(plain, tuple(examples), dynamic_shapes=(tuple(sizes),))


def write_program(program: ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Write an exported program for ``torch.export.load``, atomically.

    Args:
        program: what ``export_program`` returned.
        path: path of the file; an existing file is replaced.

    Raises:
        OSError: if the disk is full; an existing file is kept.

    >>> import quorem, tempfile
    >>> path = tempfile.mkdtemp() + "/users.pt2"
    >>> write_program(export_program(quorem.Embedding(1000, 16, quorem.QR(4))), path)
    >>> torch.export.load(path).module()(torch.tensor([7, 999]))["vectors"].shape
    torch.Size([2, 16])
    """
    with _archive(path) as file:
        torch.export.save(program, file)


def compile_program(program: ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Compile an exported program to machine code with AOTInductor, for ``torch._inductor.aoti_load_package``.

    The package holds a shared library for machines like this one. Loading a package runs its code, so load only those
    that you trust. The file is written atomically.

    Args:
        program: what ``export_program`` returned.
        path: path of the file, which must end in ``.pt2``; an existing file is replaced.

    Raises:
        ValueError: if the name does not end in ``.pt2``, which the loader requires.
        RuntimeError: if there is no C++ compiler.
        OSError: if the disk is full; an existing file is kept.

    >>> import quorem, tempfile
    >>> path = tempfile.mkdtemp() + "/users.pt2"
    >>> program = export_program(quorem.Embedding(1000, 16, quorem.QR(4)))
    >>> compile_program(program, path)  # doctest: +SKIP
    >>> torch._inductor.aoti_load_package(path)(torch.tensor([7, 999]))["vectors"].shape  # doctest: +SKIP
    torch.Size([2, 16])
    """
    if not os.fspath(path).endswith(".pt2"):
        raise ValueError(f"path ({os.fspath(path)}) must end in .pt2 for AOTInductor")
    from torch._inductor import aoti_compile_and_package

    with _archive(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`isinstance\\(treespec, LeafSpec\\)", category=FutureWarning)
        aoti_compile_and_package(program, package_path=file)


@contextmanager
def _archive(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that torch writes an archive to; it replaces ``path`` only if every write succeeded."""
    with replacing(path) as file:
        archive = _Archive(file)
        yield cast(BinaryIO, archive)
        if archive.error is not None:
            raise archive.error


class _Archive(io.RawIOBase):
    """A file for torch's writer of archives, which ends the process if a write fails: the error is kept instead."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Nothing: torch goes back to the beginning after its last write."""
        return offset

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        return len(data)


def _example(
    model: nn.Module, unknown: str, jagged: bool, sample_weights: bool
) -> tuple[list[Tensor], list[dict[int, Dim]]]:
    """Example inputs for tracing, and their dynamic sizes."""
    tables, batch = tables_in(model), Dim("batch")
    features = len(tables.features)
    extra = int(not isinstance(tables, EmbeddingBag) or tables.include_last_offset)
    count = features * BATCH + extra
    sizes = {"batch": BATCH, "length": BATCH + 1, "values": 2 * count, "offsets": count}
    offsets = batch if (features, extra) == (1, 0) else features * batch + extra
    dims = {"batch": batch, "length": Dim("length"), "values": Dim("values"), "offsets": offsets}
    examples, dynamic = [], []
    for _, dtype, shape in inputs_of(model, unknown, jagged, sample_weights):
        example = [sizes[size] if isinstance(size, str) else size for size in shape]
        examples.append(torch.zeros(example, dtype=dtype, device=tables.live_stored.device))
        dynamic.append({axis: dims[size] for axis, size in enumerate(shape) if isinstance(size, str)})
    return examples, dynamic
