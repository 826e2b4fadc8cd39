"""``quorem.export``: a model as an ONNX graph, a ``torch.export`` program, or a package of AOTInductor.

While torch traces, quorem's modules run plain torch operators (``modules.plain``), so that none of these needs quorem.
``export_named`` is what ``quorem export`` writes: named inputs and outputs, for any batch size.
"""

import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.fx.experimental._config
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.utils._pytree import tree_leaves

from ..checks import check_choice
from ..files.atomic import replacing
from ..models.networks import Network
from ..modules.bag import EmbeddingBag
from ..modules.collection import EmbeddingCollection
from ..modules.lookup import Tables

Format = Literal["onnx", "torch-export", "aot-inductor"]
UnknownVector = Literal["nan", "zeros"]  # the vector of an id outside its table
SUFFIXES: dict[str, Format] = {".onnx": "onnx", ".pt2": "torch-export"}
EXTERNAL_BYTES = 2**31 - 2**20  # a protobuf message is limited to 2 GiB; larger weights go to a separate file
ROWS = 3  # rows of the example that is traced


def export(
    model: nn.Module,
    example_inputs: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    format: Format | None = None,
    dynamic_shapes: Any = None,
    unknown: UnknownVector = "nan",
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> None:
    """Write any model with quorem's tables so that it runs without quorem.

    The model is traced in evaluation mode, without gradients. Weights of 2 GiB or more of an ONNX graph go to
    ``PATH.data``.

    Args:
        model: the model, such as one after ``compress_``.
        example_inputs: arguments of ``forward``, with at least two rows.
        path: path of the file; an existing file is replaced.
        format: ``"onnx"``; ``"torch-export"``, for ``torch.export.load``; or ``"aot-inductor"``, machine code for
            ``torch._inductor.aoti_load_package``, which needs a C++ compiler. None takes the first for a path that ends
            in ``.onnx``, the second for ``.pt2``.
        dynamic_shapes: which sizes may change, as in ``torch.export.export``. None: the first size of every tensor.
        unknown: the vector of an id outside its table, since a graph cannot raise: ``"nan"``, so that the error shows;
            or ``"zeros"``, with which the id is left out of a bag, as on a GPU.
        input_names: names of the inputs of an ONNX graph; None takes those of ``forward``.
        output_names: names of its outputs.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if ``format`` or ``unknown`` has another value, the path does not tell the format, or an example has
            fewer than two rows, whose number torch would take for a constant.
        OSError: if the disk is full; an existing file is kept.

    >>> import quorem, tempfile
    >>> model = nn.Sequential(quorem.Embedding(1000, 16, quorem.QR(4)), nn.Linear(16, 1))
    >>> path = tempfile.mkdtemp() + "/model.pt2"
    >>> quorem.export(model, (torch.tensor([1, 2]),), path)
    >>> torch.export.load(path).module()(torch.tensor([7, 999, 3])).shape
    torch.Size([3, 1])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model ({type(model).__name__}) must be an nn.Module")
    path = Path(path)
    kind = _format_of(path, format)
    check_choice("unknown", unknown, UnknownVector)
    if dynamic_shapes is None:
        dynamic_shapes = _first_sizes(example_inputs)
    # Without backed_size_oblivious, a batch size that is computed from the length of offsets could not be 1.
    with _prepared(model, unknown), torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        program = torch.export.export(model, tuple(example_inputs), dynamic_shapes=dynamic_shapes)
    buffer = io.BytesIO()  # torch's writer ends the process if the disk is full
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`isinstance\\(treespec, LeafSpec\\)", category=FutureWarning)
        if kind == "onnx":
            _write_onnx(program, path, input_names, output_names)
            return
        if kind == "torch-export":
            torch.export.save(program, buffer)
        else:
            from torch._inductor import aoti_compile_and_package

            aoti_compile_and_package(program, package_path=buffer)
    with replacing(path, num_bytes=buffer.getbuffer().nbytes) as file:
        file.write(buffer.getbuffer())


def _format_of(path: Path, format: str | None) -> str:
    if format is None:
        if path.suffix not in SUFFIXES:
            raise ValueError(f"path ({path}) must end in .onnx, .pt2 (command: .safetensors), or format must be given")
        return SUFFIXES[path.suffix]
    check_choice("format", format, Format)
    if format == "aot-inductor" and path.suffix != ".pt2":
        raise ValueError(f"path ({path}) must end in .pt2 for AOTInductor, whose loader requires it")
    return format


def _first_sizes(example_inputs: Sequence[Any]) -> ShapesCollection:
    shapes = ShapesCollection()
    for tensor in tree_leaves(tuple(example_inputs)):
        if isinstance(tensor, Tensor) and tensor.dim():
            if tensor.shape[0] < 2:
                rule = "must have 2 rows or more: torch takes a size of 0 or 1 for a constant"
                raise ValueError(f"example_inputs has a tensor of shape {tuple(tensor.shape)} but {rule}")
            shapes[tensor] = {0: Dim.DYNAMIC}
    return shapes


@contextmanager
def _prepared(model: nn.Module, unknown: UnknownVector) -> Iterator[None]:
    """The model in evaluation mode, without gradients, with rows that are up to date; as it was afterwards."""
    tables = [module for module in model.modules() if isinstance(module, Tables)]
    training = [module for module in model.modules() if module.training]
    before = [module.exported_unknown for module in tables]
    try:
        model.eval()
        for module in tables:
            module.layout  # noqa: B018 - a module that was filled after it was built takes its integers
            module.updates.flush_()  # before the trace, by the compiled kernels
            module.exported_unknown = unknown
        with torch.no_grad():
            yield
    finally:
        for each in training:
            each.training = True
        for module, value in zip(tables, before, strict=True):
            module.exported_unknown = value


def _write_onnx(
    program: ExportedProgram, path: Path, input_names: Sequence[str] | None, output_names: Sequence[str] | None
) -> None:
    try:
        import onnxscript  # noqa: F401 - torch.onnx needs it
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'ONNX graphs need {error.name}: pip install "quorem[export]"') from None
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of packages that are not installed
    try:
        graph = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=input_names, output_names=output_names
        )
    finally:
        logger.setLevel(level)
    assert graph is not None
    if sum(tensor.nbytes for tensor in [*program.state_dict.values(), *program.constants.values()]) < EXTERNAL_BYTES:
        text = graph.model_proto.SerializeToString()
        with replacing(path, num_bytes=len(text)) as file:
            file.write(text)
        return
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        graph.save(Path(folder, path.name), external_data=True)
        for file_name in sorted(os.listdir(folder), key=lambda name: name == path.name):  # the graph last
            os.replace(Path(folder, file_name), path.parent / file_name)


class Named(nn.Module):
    """A module whose output is ``vectors``, or a network that gives ``logits`` and ``probabilities``."""

    def __init__(self, model: nn.Module, is_network: bool) -> None:
        super().__init__()
        self.model, self.is_network = model, is_network

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Outputs by name."""
        output = self.model(*inputs)
        return {"logits": output, "probabilities": output.sigmoid()} if self.is_network else {"vectors": output}


def export_named(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    num_dense: int | None = None,
    format: Format | None = None,
    unknown: UnknownVector = "nan",
    jagged: bool = False,
) -> None:
    """Write a module or a network with named inputs and outputs (``docs/serve.md`` lists them).

    The model is an ``Embedding``, ``EmbeddingBag``, ``EmbeddingCollection``, or a network that takes dense features and
    then the inputs of its only module of tables; ``num_dense`` is given for a network of your own. With ``jagged``,
    bags have any length, given by offsets. Other arguments and errors are those of ``export``.
    """
    found = [module for module in model.modules() if isinstance(module, Tables)]
    if len(found) != 1:
        raise ValueError(f"model ({type(model).__name__}) has {len(found)} modules of tables but must have one")
    tables, features = found[0], len(found[0].features)
    num_dense = model.num_dense if isinstance(model, Network) else num_dense
    is_network = num_dense is not None
    if jagged and not isinstance(tables, EmbeddingBag | EmbeddingCollection):
        raise ValueError(f"jagged ({jagged}) must be False for {type(tables).__name__}, which does not pool")
    batch, dtype, device = Dim("batch"), torch.promote_types(tables.dtype, torch.float32), tables.live_stored.device
    shape, sizes = [ROWS], {0: batch}  # of the ids: those of the example, and which may change
    if jagged:
        shape, sizes = [2 * ROWS], {0: Dim("values")}
    elif isinstance(tables, EmbeddingBag):
        shape, sizes = [ROWS, ROWS + 1], {0: batch, 1: Dim("length")}
    elif isinstance(model, Network) and not isinstance(tables, EmbeddingCollection):  # one table looks up all columns
        shape = [ROWS, len(model.embedding_dims)]
    elif is_network or isinstance(tables, EmbeddingCollection):
        shape = [ROWS, features]
    inputs: dict[str, tuple[Tensor, dict[int, Any]]] = {}
    if num_dense is not None:
        inputs["dense"] = torch.zeros(ROWS, num_dense, dtype=dtype, device=device), {0: batch}
    inputs[tables.ids_argument] = torch.zeros(shape, dtype=torch.int64, device=device), sizes
    if jagged:
        last = int(not isinstance(tables, EmbeddingBag) or tables.include_last_offset)
        length: Any = Dim("offsets")
        if is_network:  # else a size of its own: AOTInductor rounds when it computes the batch size from a derived one
            length = batch if (features, last) == (1, 0) else features * batch + last
        inputs["offsets"] = torch.zeros(features * ROWS + last, dtype=torch.int64, device=device), {0: length}
    export(
        Named(model, is_network),
        [tensor for tensor, _ in inputs.values()],
        path,
        format=format,
        dynamic_shapes=(tuple(each for _, each in inputs.values()),),
        unknown=unknown,
        input_names=list(inputs),
        output_names=["logits", "probabilities"] if is_network else ["vectors"],
    )
