"""A kernel is compiled once for all launches that Triton would give the same code, and for no others."""

import pytest
import torch

pytest.importorskip("triton")

from quorem.ops.gpu import launch as module
from quorem.ops.gpu.launch import launch, specialization


class Kernel:
    """Stands for a jitted function: notes what is compiled and what is launched."""

    arg_names = ("x", "n", "W", "T")

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.compiled.append((grid, arguments, options))
            return Compiled(self)

        return run


class Compiled:
    """As Triton's: ``run`` takes grid, stream, function, metadata, hooks and then the kernel's arguments."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel):
        self.kernel = kernel

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        assert (stream, function, metadata) == ("stream", "function", "metadata")
        assert launch_metadata is enter is leave is None
        self.kernel.launched.append(((x, y, z), arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "JITFunction", Kernel)
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    return Kernel()


def test_the_same_code_is_compiled_once(kernel):
    x, y = torch.zeros(64), torch.ones(32)
    launch(kernel, (3,), x, 32, W=4, T=8, num_warps=2)
    launch(kernel, (5, 2), y, 48, W=4, T=8, num_warps=2)
    assert kernel.compiled == [((3,), (x, 32), {"W": 4, "T": 8, "num_warps": 2})]
    ((grid, arguments),) = kernel.launched
    assert grid == (5, 2, 1) and arguments == (y.data_ptr(), 48, 4, 8)


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(64, dtype=torch.float64)},
        {"x": torch.zeros(65)[1:]},  # not aligned to 16 bytes
        {"n": 33},
        {"n": 1},
        {"n": 2**40},
        {"W": 5},
        {"num_warps": 4},
    ],
)
def test_other_code_is_compiled_anew(kernel, other):
    options = {"x": torch.zeros(64), "n": 32, "W": 4, "T": 8, "num_warps": 2}
    for own in (options, options | other):
        own = dict(own)
        launch(kernel, (1,), own.pop("x"), own.pop("n"), **own)
    assert len(kernel.compiled) == 2 and not kernel.launched


def test_an_argument_may_be_missing(kernel):
    launch(kernel, (1,), torch.zeros(64), 3, W=1, T=2)
    launch(kernel, (1,), torch.zeros(64), None, W=1, T=2)
    launch(kernel, (1,), torch.zeros(64), None, W=1, T=2)
    assert len(kernel.compiled) == 2 and [arguments[1:] for _, arguments in kernel.launched] == [(None, 1, 2)]


def test_constants_out_of_order_are_refused(kernel):
    with pytest.raises(TypeError, match=r"constants \(T, W\) must be W, T, in this order"):
        launch(kernel, (1,), torch.zeros(1), 3, T=1, W=2)


def test_integers_are_told_apart_as_triton_does():
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    def triton_own(x):
        return native_specialize_impl(CUDABackend, x, False, True, True)

    values = [0, 1, 2, 15, 16, 17, 2**31 - 1, 2**31, 2**31 + 1, -1, -16, 2**40, 2**40 + 1, 0.5, None]
    for one in values:
        for other in values:
            if specialization(one) == specialization(other):
                assert triton_own(one) == triton_own(other), (one, other)


class OnGPU5(torch.Tensor):
    def get_device(self):
        return 5


def test_tensors_of_two_devices_are_refused(kernel):
    with pytest.raises(ValueError, match=r"a tensor is on .* but must be on cpu"):
        launch(kernel, (1,), torch.zeros(4), torch.zeros(4).as_subclass(OnGPU5), W=1, T=1)
