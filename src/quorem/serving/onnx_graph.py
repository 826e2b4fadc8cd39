"""An ONNX graph under construction: nodes of plain operators, constants, and weights, perhaps in a separate file.

All operators are of the default operator set, so any runtime that supports opset 18 can run it.
"""

import glob
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..files import replacing
from ..tensor_file import ALIGNMENT, byte_blocks
from ..version import __version__

try:
    import onnx
    import onnx.numpy_helper
    from onnx import helper
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('ONNX graphs need onnx: pip install "quorem[export]"', name=error.name) from None

OPSET = 18  # the first in which ScatterND and ScatterElements can reduce by maximum
IR_VERSION = 8  # IR version of the release that introduced this opset
EXTERNAL_BYTES = 2**31 - 2**20  # a protobuf message is limited to 2 GiB; larger weights go to a separate file
ONNX_DTYPES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.int64: onnx.TensorProto.INT64,
    torch.uint64: onnx.TensorProto.UINT64,
    torch.int32: onnx.TensorProto.INT32,
    torch.uint8: onnx.TensorProto.UINT8,
}


def _operator(kind: str) -> Any:
    """The method of ``Value`` that adds a node of this kind."""
    return lambda value, other: value.graph.op(kind, value, other)


class Value:
    """A value of a graph: an input, a constant, a weight or the output of a node. Python's operators add nodes.

    Args:
        graph: the graph.
        name: name of the value in it.
    """

    __hash__ = None  # type: ignore[assignment]
    __add__, __sub__, __mul__, __truediv__ = (_operator(kind) for kind in ("Add", "Sub", "Mul", "Div"))
    __floordiv__, __mod__, __xor__ = (_operator(kind) for kind in ("Div", "Mod", "BitwiseXor"))
    __lt__, __le__, __gt__ = (_operator(kind) for kind in ("Less", "LessOrEqual", "Greater"))
    __ge__, __eq__ = (_operator(kind) for kind in ("GreaterOrEqual", "Equal"))

    def __init__(self, graph: "Graph", name: str) -> None:
        self.graph, self.name = graph, name

    def __and__(self, other: "Operand") -> "Value":
        return self.graph.op("BitwiseAnd" if isinstance(other, int) else "And", self, other)


Operand = Value | int | float | Sequence[int]  # numbers become constants


class Graph:
    """Nodes and weights; every method that adds one returns its value.

    Args:
        compute: dtype of the computation and of the outputs, float32 or float64.
    """

    def __init__(self, compute: torch.dtype) -> None:
        self.compute = compute
        self.nodes: list[Any] = []
        self.weights: dict[str, list[Tensor]] = {}  # the parts of each weight, to be concatenated
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Any] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def input(self, name: str, dtype: torch.dtype, shape: Sequence[int | str]) -> Value:
        """Add an input of the graph. A string in ``shape`` names a dynamic size."""
        self._inputs.append(helper.make_tensor_value_info(name, ONNX_DTYPES[dtype], shape))
        return Value(self, name)

    def output(self, name: str, value: Value, shape: Sequence[int | str]) -> None:
        """Make a value an output of the graph, under a name."""
        self.nodes.append(helper.make_node("Identity", [value.name], [name]))
        self._outputs.append(helper.make_tensor_value_info(name, ONNX_DTYPES[self.compute], shape))

    def op(self, kind: str, *inputs: Operand, **attributes: Any) -> Value:
        """Add a node; integers and floats among its inputs become constants."""
        names = [(value if isinstance(value, Value) else self.constant(value)).name for value in inputs]
        output = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, names, [output], **attributes))
        return Value(self, output)

    def split(self, value: Value, parts: int, axis: int) -> list[Value]:
        """Split a value into equal parts along an axis."""
        names = [f"split_{len(self.nodes)}_{i}" for i in range(parts)]
        self.nodes.append(helper.make_node("Split", [value.name], names, axis=axis, num_outputs=parts))
        return [Value(self, name) for name in names]

    def constant(self, values: float | Sequence[int], dtype: Any = np.int64) -> Value:
        """Add a small constant: integers of the dtype, or a float; equal constants are stored once."""
        if isinstance(values, float):
            dtype = np.float64 if self.compute == torch.float64 else np.float32
        array: NDArray[Any] = np.asarray(values, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = onnx.numpy_helper.from_array(array, f"constant_{len(self._constants)}")
        return Value(self, self._constants[key].name)

    def weight(self, name: str, rows: Sequence[Tensor]) -> Value:
        """Add a weight, given as tensors that are concatenated along their first axis when they are written.

        If there is a weight of that name already, it is assumed to be the same.
        """
        self.weights.setdefault(name, list(rows))
        return Value(self, name)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Convert a value to another dtype."""
        return self.op("Cast", value, to=ONNX_DTYPES[dtype])

    def write(self, path: str | os.PathLike[str], *, metadata: dict[str, str], external_bytes: int) -> None:
        """Write the model; if all weights have at least ``external_bytes``, they go to ``NAME.CHECKSUM.data``.

        Both files are written atomically. The data file is written first and has its checksum in its name, so that an
        existing model keeps its own data file until the model itself is replaced.

        Raises:
            OSError: if the disk is full; an existing model is kept.
        """
        path = Path(path)
        sizes = {name: sum(row.nbytes for row in rows) for name, rows in self.weights.items()}
        data = self._write_data(path, sizes) if sum(sizes.values()) >= external_bytes else None
        offset, initializers = 0, list(self._constants.values())  # constants stay in the graph, for shape inference
        for name, rows in self.weights.items():
            shape = (sum(len(row) for row in rows), *rows[0].shape[1:])
            tensor = onnx.TensorProto(name=name, data_type=ONNX_DTYPES[rows[0].dtype], dims=shape)
            if data is not None:
                tensor.data_location = onnx.TensorProto.EXTERNAL
                for key, value in (("location", data.name), ("offset", offset), ("length", sizes[name])):
                    tensor.external_data.add(key=key, value=str(value))
                offset += _padded(sizes[name])
            else:
                tensor.raw_data = b"".join(_blocks(rows))
            initializers.append(tensor)
        graph = helper.make_graph(self.nodes, "quorem", self._inputs, self._outputs, initializers)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="quorem",
            producer_version=__version__,
        )
        helper.set_model_props(model, metadata)
        text = model.SerializeToString()
        with replacing(path, num_bytes=len(text)) as file:
            file.write(text)
        for old in data_files(path):
            if data is None or old.name != data.name:
                old.unlink()

    def _write_data(self, path: Path, sizes: Mapping[str, int]) -> Path:
        """Write all weights to the data file, aligned; returns its path."""
        checksum = 0
        for rows in self.weights.values():
            for block in _blocks(rows):
                checksum = zlib.crc32(block, checksum)
        data = path.with_name(f"{path.name}.{checksum:08x}.data")
        with replacing(data, num_bytes=sum(sizes.values())) as file:
            for name, rows in self.weights.items():
                file.writelines(_blocks(rows))
                file.write(bytes(_padded(sizes[name]) - sizes[name]))
        return data


def data_files(path: Path) -> list[Path]:
    """The data files beside a model: those of its name and a checksum."""
    return list(path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}.data"))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _blocks(rows: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of several tensors, a part at a time."""
    for row in rows:
        yield from byte_blocks(row)
