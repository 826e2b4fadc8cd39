"""Compiles every GPU kernel for Hopper (sm_90), on any machine: ``python tests/compile_kernels.py``.

The interpreter does not see what the compiler refuses, such as a variable whose type changes between branches. Prints
the name of each kernel that compiled. ``TRITON_INTERPRET`` must not be set.
"""

import os

os.environ["QUOREM_FAST_LAUNCH"] = "0"  # which would load what was compiled onto a GPU

import torch
import triton
from gpu_cases import batch, collection, gradient, jagged, rule_state, scalar
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import quorem
from quorem.ops.gpu import gradients, lookup, path, replay, rules
from quorem.ops.rows import IdBatch


class Hopper:
    """Stands for Triton's driver of a GPU, of which the compiler only asks what it is."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


compiled = set()
MOST_ARGUMENTS = 20  # of a kernel, constants among them; what belongs together is one tuple


def compile_only(kernel, grid):  # type: ignore[no-untyped-def]
    """In place of ``kernel[grid]``: compiles, and launches nothing."""

    def run(*arguments, **options):  # type: ignore[no-untyped-def]
        assert len(kernel.arg_names) <= MOST_ARGUMENTS, kernel.arg_names
        kernel.warmup(*arguments, grid=grid, **options)
        compiled.add(kernel.fn.__name__)

    return run


def compile_tables() -> None:
    module = collection(4, names="qr pad cat")  # rows of several widths, so that W = 2
    layout, stored = module.layout, module.stored.detach()
    ids, grad, count = IdBatch(batch(module, 9)), gradient(module, 9), torch.tensor(0)
    bags = jagged(module, 9, weighted=True, mean=True)
    lookup.lookup(ids, stored, layout, count)
    lookup.count_invalid_(ids, count, layout)
    lookup.lookup(bags, stored, layout)
    gradients.backward(grad, ids, stored, layout)
    gradients.sample_weights_backward(grad, bags, stored, layout)
    for rule in ("adagrad", "amsgrad"):
        state, constants = rule_state(rule, stored)
        options = {"rule": rule, "constants": constants}
        rules.update_(grad, ids, stored, scalar(0.1), state, layout, **options, clip_value=0.5)
        if rule == "amsgrad":
            replay.catch_up_(ids, stored, state, layout, **options)
        else:
            rules.update_(grad, bags, stored, scalar(0.1), state, layout, **options)


def compile_frequency() -> None:
    """Rows of ids' own, lists of them, a pool, rows of fewer bits, rows rounded at random."""
    scheme, counts = quorem.HotCold(9, cold=quorem.Pool(70), num_rest=9), torch.arange(300)
    tables = [
        quorem.Table("ranked", 300, 4, scheme, frequencies=counts),
        quorem.Table("mult", 300, 4, quorem.HotCold(9, cold=quorem.QR(4)), features=("a", "b")),
    ]
    module = quorem.EmbeddingCollection(tables, dtype=torch.bfloat16)
    layout, stored = module.layout, module.stored.detach()
    ids, grad = IdBatch(torch.zeros(9, 3, dtype=torch.int64)), gradient(module, 9)
    bags = IdBatch(ids.ids.flatten(), torch.arange(28), mean=True)
    lookup.lookup(ids, stored, layout, torch.tensor(0))
    gradients.backward(grad, bags, stored, layout)
    for rule in ("adagrad", "rowwise_adagrad", "amsgrad"):
        state, constants = rule_state(rule, stored.float())
        options = {"rule": rule, "constants": constants, "rounding_seed": 5}
        rules.update_(grad, ids, stored, scalar(0.1), state, layout, **options, loss_scale=torch.tensor(2.0))
        if rule == "amsgrad":
            replay.catch_up_(bags, stored, state, layout, **options)
            replay.MANY_READS = 1
            replay.catch_up_(ids, stored, state, layout, **options)
    for dtype in (torch.uint8, torch.bfloat16):
        state, constants = rule_state("adagrad", stored.float())
        state = state._replace(sum=state.sum.to(dtype))
        options = {"rule": "adagrad", "constants": constants, "rounding_seed": 5}
        rules.update_(grad, ids, stored, scalar(0.1), state, layout, **options)
    for bits in (8, 4):
        fewer = quorem.quantize_(quorem.EmbeddingCollection(tables), bits)
        options = {"width": 4, "bits": bits, "dtype": torch.float32}
        for read in (ids, bags):
            lookup.lookup(read, fewer.stored, fewer.layout, **options)


def compile_paths() -> None:
    table = quorem.Table("t", 60, 12, quorem.Path(4, (5,), force=True))
    networks = quorem.EmbeddingCollection([table]).paths[0]
    layers = [t.detach() for pair in zip(networks.weights, networks.biases, strict=True) for t in pair]
    integers = (networks.network_slots, networks.network_parts, networks.all_columns)
    inputs = (torch.randn(9, 1, 12), torch.zeros(9, 1, dtype=torch.int64), layers, *integers)
    options = {"networks": networks.most[0], "activation": "relu"}
    vectors, *lists = path.path(*inputs, **options)
    path.path_backward(vectors, *inputs, *lists, **options)


if __name__ == "__main__":
    driver.set_active(Hopper())
    JITFunction.__getitem__ = compile_only
    compile_tables()
    compile_frequency()
    compile_paths()
    print(triton.__version__, *sorted(compiled), sep="\n")
