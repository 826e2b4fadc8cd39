"""Compiles every GPU kernel for Hopper (sm_90), on any machine: ``python tests/compile_kernels.py``.

The interpreter does not see what the compiler refuses, such as a variable whose type changes between branches. All of
Triton runs but its driver, in whose place ``Hopper`` notes what it is to launch: every call is made twice, and the
second time, when compiled kernels are launched again, it must be the same. Prints the name of each kernel that
compiled. ``TRITON_INTERPRET`` must not be set.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from gpu_cases import batch, collection, gradient, jagged, row_rule
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import quorem
from quorem.ops.gpu import gradients, lookup, path, projection, replay, rules
from quorem.ops.layout import Layout
from quorem.ops.rows import IdBatch
from quorem.ops.state import RowRule

MOST_ARGUMENTS = 20  # of a kernel, constants among them; what belongs together is one tuple
NEW_EACH_TIME = {"out", "kept", "sums", "lists", "dense", "dx", "gradients"}  # arguments that hold memory of one call
compiled: set[str] = set()
launched: list[tuple[Any, ...]] = []


class Launcher:
    """What Triton calls to launch a compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.names = source.fn.arg_names
        assert len(self.names) <= MOST_ARGUMENTS, self.names
        compiled.add(source.fn.__name__)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        arguments = dict(zip(self.names, rest[4:], strict=True))  # after metadata and hooks
        launched.append((function, (x, y, z), stream, arguments))


class Hopper:
    """Stands for Triton's driver of a GPU, and for its ``utils``."""

    launcher_cls = Launcher
    num_loaded = 0

    @property
    def utils(self) -> "Hopper":
        return self

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, *binary: Any) -> tuple[int, int, int, int, int]:
        self.num_loaded += 1
        return 0, self.num_loaded, 32, 0, 1024  # module, function, registers, spills, most threads


def numbers(argument: Any) -> Iterator[Any]:
    """Addresses in place of tensors, and the members of tuples."""
    if isinstance(argument, tuple):
        for member in argument:
            yield from numbers(member)
    else:
        yield argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def twice(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """``function(*arguments, **options)``, after a check that a second call launches the same."""
    launched.clear()
    function(*arguments, **options)
    first = launched.copy()
    launched.clear()
    result = function(*arguments, **options)
    assert first
    for one, other in zip(first, launched, strict=True):
        assert one[:3] == other[:3]
        for name, argument in one[3].items():
            same = [a == b for a, b in zip(numbers(argument), numbers(other[3][name]), strict=True)]
            assert all(same) or name in NEW_EACH_TIME, (function, name, argument, other[3][name])
    return result


def step(rule: RowRule, stored: torch.Tensor, layout: Layout, *batches: IdBatch) -> None:
    """A step of a rule on the rows of each batch; what Adam needs before it."""
    grad = torch.randn(9, len(layout.slots), stored.shape[1]).to(stored.dtype)
    for ids in batches:
        twice(rules.update_, grad, ids, stored, layout, rule)
        if rule.entry.lags:
            twice(replay.catch_up_, ids, stored, layout, rule)


def compile_tables() -> None:
    module = collection(4, names="qr pad cat")  # rows of several widths, so that W = 2
    layout, stored = module.layout, module.stored.detach()
    ids, grad, count = IdBatch(batch(module, 9)), gradient(module, 9), torch.tensor(0)
    bags = jagged(module, 9, weighted=True, mean=True)
    twice(lookup.lookup, ids, stored, layout, count)
    twice(lookup.count_invalid_, ids, count, layout)
    twice(lookup.lookup, bags, stored, layout)
    twice(gradients.backward, grad, ids, stored, layout)
    twice(gradients.sample_weights_backward, grad, bags, stored, layout)
    step(row_rule("adagrad", stored), stored, layout, ids, bags)
    step(row_rule("amsgrad", stored), stored, layout, ids)


def compile_frequency() -> None:
    """Rows of ids' own, lists of them, a pool, rows of fewer bits, rows and sums rounded at random."""
    tables = [
        quorem.Table("ranked", 300, 4, quorem.HotCold(9, quorem.Pool(70), 9), frequencies=torch.arange(300)),
        quorem.Table("mult", 300, 4, quorem.HotCold(9, cold=quorem.QR(4)), features=("a", "b")),
    ]
    module = quorem.EmbeddingCollection(tables, dtype=torch.bfloat16)
    layout, stored = module.layout, module.stored.detach()
    ids = IdBatch(torch.zeros(9, 3, dtype=torch.int64))
    bags = IdBatch(ids.ids.flatten(), torch.arange(28), mean=True)
    twice(lookup.lookup, ids, stored, layout, torch.tensor(0))
    twice(gradients.backward, gradient(module, 9), bags, stored, layout)
    for rule in ("adagrad", "rowwise_adagrad", "amsgrad"):
        step(row_rule(rule, stored.float(), seed=5), stored, layout, ids)
    replay.MANY_READS = 1
    step(row_rule("amsgrad", stored.float(), seed=5), stored, layout, ids, bags)
    for dtype in (torch.uint8, torch.bfloat16):
        rounded = row_rule("adagrad", stored.float(), seed=5)
        rounded.state = rounded.state._replace(sum=rounded.state.sum.to(dtype))
        step(rounded, stored, layout, ids)
    for bits in (8, 4):
        fewer = quorem.quantize_(quorem.EmbeddingCollection(tables), bits)
        for read in (ids, bags):
            twice(lookup.lookup, read, fewer.stored, fewer.layout, width=4, bits=bits, dtype=torch.float32)


def compile_paths() -> None:
    table = quorem.Table("t", 60, 12, quorem.Path(4, (5,), force=True))
    networks = quorem.EmbeddingCollection([table]).paths[0]
    layers = [tensor for pair in zip(networks.weights, networks.biases, strict=True) for tensor in pair]
    vectors, ids = torch.randn(9, 1, 12), torch.zeros(9, 1, dtype=torch.int64)
    grad = torch.randn(9, 1, 12)

    def transform() -> None:
        args = (layers, networks.network_slots, networks.network_parts, networks.most[0], "relu")
        out = path.transformed(vectors, ids, *args)
        torch.autograd.grad(out, layers, grad)

    twice(transform)


def compile_narrow() -> None:
    tables = [quorem.Table("a", 99, 8, quorem.QR(4, width=4)), quorem.Table("b", 99, 8, quorem.Full())]
    module = quorem.EmbeddingCollection(tables)
    pieces, matrices = module.pieces, module.matrices()
    composed = torch.randn(9, 12)
    twice(projection.project, composed, pieces, matrices)
    twice(projection.project_backward, torch.randn(9, 16), composed, pieces, matrices)
    for dim in (16, 40):  # products without and with tensor cores
        tables = [quorem.Table("a", 99, dim, quorem.QR(4, width=dim // 2)), quorem.Table("b", 99, dim)]
        module = quorem.EmbeddingCollection(tables)
        read = (IdBatch(torch.zeros(9, 2, dtype=torch.int64)), module.stored.detach(), module.layout)
        for keep in (False, True):
            options = {"names": "", "keep": keep, "invalid": torch.tensor(0)}
            twice(projection.lookup_split, *read, module.pieces, module.matrices(), **options)


if __name__ == "__main__":
    driver.set_active(Hopper())
    compile_tables()
    compile_frequency()
    compile_paths()
    compile_narrow()
    print(triton.__version__, *sorted(compiled), sep="\n")
