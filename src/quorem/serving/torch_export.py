"""Export a module or a network as a ``torch.export`` program that runs without quorem."""

import io
import os
import warnings
from typing import Any, BinaryIO, cast

import torch
import torch.fx.experimental._config
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ..bags import EmbeddingBag
from ..collection import EmbeddingCollection
from ..files import replacing
from ..models.network import Network
from ..store.model_file import tables_in
from .groups import UnknownVector, check_options
from .plain import PlainModel

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
    """
    check_options(model, unknown, jagged, sample_weights)
    plain = PlainModel(model, unknown=unknown, jagged=jagged).eval()
    inputs, sizes = _example(model, plain, jagged, sample_weights)
    # Without backed_size_oblivious, a batch size derived from the length of the offsets could not be 1.
    with torch.no_grad(), torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        return torch.export.export(plain, tuple(inputs), dynamic_shapes=(tuple(sizes),))


def write_program(program: ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Write an exported program for ``torch.export.load``, atomically.

    Raises:
        OSError: if the disk is full; an existing file is kept.
    """
    with replacing(path) as file:
        archive = _Archive(file)
        torch.export.save(program, cast(BinaryIO, archive))
        archive.check()


def compile_program(program: ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Compile an exported program to machine code with AOTInductor, for ``torch._inductor.aoti_load_package``.

    The package holds a shared library for machines like this one. Loading a package runs its code, so load only those
    that you trust. The file is written atomically.

    Raises:
        ValueError: if the name does not end in ``.pt2``, which the loader requires.
        RuntimeError: if there is no C++ compiler.
        OSError: if the disk is full; an existing file is kept.
    """
    if not os.fspath(path).endswith(".pt2"):
        raise ValueError(f"path ({os.fspath(path)}) must end in .pt2 for AOTInductor")
    from torch._inductor import aoti_compile_and_package

    with replacing(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`isinstance\\(treespec, LeafSpec\\)", category=FutureWarning)
        archive = _Archive(file)
        aoti_compile_and_package(program, package_path=cast(BinaryIO, archive))
        archive.check()


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

    def check(self) -> None:
        """Raise the error of the first write that failed."""
        if self.error is not None:
            raise self.error


def _example(
    model: nn.Module, plain: PlainModel, jagged: bool, sample_weights: bool
) -> tuple[list[Tensor], list[dict[int, Dim]]]:
    """Example inputs for tracing, and their dynamic sizes."""
    tables, batch = tables_in(model), Dim("batch")
    inputs: list[Tensor] = []
    sizes: list[dict[int, Dim]] = []
    if isinstance(model, Network):
        inputs.append(torch.zeros(BATCH, model.num_dense, dtype=plain.tables.compute))
        sizes.append({0: batch})
    if not jagged:
        if isinstance(tables, EmbeddingCollection):
            shape = [BATCH, len(tables.features)]
        elif isinstance(tables, EmbeddingBag):
            shape = [BATCH, BATCH + 1]
        else:
            shape = [BATCH, len(model.embedding_dims)] if isinstance(model, Network) else [BATCH]
        inputs.append(torch.zeros(shape, dtype=torch.int64))
        sizes.append({0: batch, 1: Dim("length")} if isinstance(tables, EmbeddingBag) else {0: batch})
    else:
        features = len(tables.features)
        count = features * BATCH + (not isinstance(tables, EmbeddingBag) or tables.include_last_offset)
        inputs += [torch.zeros(2 * count, dtype=torch.int64), torch.arange(count)]
        extra = count - features * BATCH
        sizes += [{0: Dim("values")}, {0: features * batch + extra if (features, extra) != (1, 0) else batch}]
    if sample_weights:
        inputs.append(torch.ones(inputs[-1 - jagged].shape, dtype=plain.tables.compute))
        sizes.append(sizes[-1 - jagged])
    return inputs, sizes
