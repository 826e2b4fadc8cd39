"""A kernel is compiled once for all launches that Triton would give the same code, and for no others; a call that is
repeated makes the same launches with new addresses."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.ops.gpu import launch as launching
from quorem.ops.gpu.launch import launch, planned, scratch, specialization

pytestmark = pytest.mark.kernels(device="gpu")


class Kernel:
    """Stands for a jitted function: notes what is compiled and what is launched."""

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.compiled.append((grid, arguments, options))
            return Compiled(self)

        return run


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel):
        self.kernel = kernel

    def run(self, *inputs):  # as Triton calls it
        grid, fixed, arguments = inputs[:3], inputs[3:9], inputs[9:]
        assert fixed == ("stream of -1", self.function, self.packed_metadata, None, None, None)
        self.kernel.launched.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launching, "_compiled", {})
    active = SimpleNamespace(get_current_stream="stream of {}".format)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=active))
    return Kernel()


def test_the_same_code_is_compiled_once(kernel):
    x, y = torch.zeros(64), torch.ones(32)
    launch(kernel, (3,), x, 32, W=4, T=8, num_warps=2)
    launch(kernel, (5, 2), y, 48, W=4, T=8, num_warps=2)
    assert kernel.compiled == [((3, 1, 1), (x, 32), {"W": 4, "T": 8, "num_warps": 2})]
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


def test_integers_are_told_apart_as_triton_does():
    native_specialize_impl = pytest.importorskip("triton._C.libtriton").native_specialize_impl
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
    with pytest.raises(ValueError, match=r"a tensor is on .* but must be on the CPU"):
        launch(kernel, (1,), torch.zeros(4), torch.zeros(4).as_subclass(OnGPU5), W=1, T=1)


class Calls:
    """A call of four launches that can be planned: of ``given``, of two scratch tensors, and of ``own``."""

    def __init__(self, kernel):
        self.kernel, self.plans, self.bodies, self.own = kernel, {}, 0, torch.zeros(8)

    def __call__(self, given, known, n=32):
        def body():
            self.bodies += 1
            sums, rows = scratch(given, 3, n, dtype=torch.float64), scratch(given, 5, dtype=torch.int32)
            launch(self.kernel, (n,), given, n, W=1, T=2)
            launch(self.kernel, (7,), sums, known, W=1, T=2)
            launch(self.kernel, (7,), rows, known, W=1, T=2)
            launch(self.kernel, (7,), self.own, known, W=1, T=2)

        planned(self.plans, (n, given.dtype), (known,), (given,), body)


def test_a_planned_call_is_worked_out_once(kernel, monkeypatch):
    call, known = Calls(kernel), torch.zeros(16)
    call(torch.zeros(64), known)
    kernel.launched.clear()
    made, fresh = torch.ones(64), []
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda *args, **options: fresh.append(new_empty(*args, **options)) or fresh[-1]
    )
    call(made, known)
    assert call.bodies == 1
    (block,) = fresh  # of both scratch tensors
    first, second, third, fourth = kernel.launched
    sums, rows = second[1][0], third[1][0]
    assert block.data_ptr() <= sums and sums + 3 * 32 * 8 <= rows
    assert rows + 5 * 4 <= block.data_ptr() + block.nbytes and (rows - sums) % 16 == 0
    assert first == ((32, 1, 1), (made.data_ptr(), 32, 1, 2))
    assert second == ((7, 1, 1), (sums, known.data_ptr(), 1, 2))
    assert third == ((7, 1, 1), (rows, known.data_ptr(), 1, 2))
    assert fourth == ((7, 1, 1), (call.own.data_ptr(), known.data_ptr(), 1, 2))


@pytest.mark.parametrize(
    "other",
    [
        {"given": torch.zeros(64, dtype=torch.int64)},
        {"given": torch.zeros(65)[1:]},  # not aligned to 16 bytes: never planned
        {"known": torch.zeros(16)},
        {"n": 48},
    ],
)
def test_another_call_is_worked_out_anew(kernel, other):
    call, options = Calls(kernel), {"given": torch.zeros(64), "known": torch.zeros(16), "n": 32}
    call(**options)
    call(**options | other)
    call(**options)
    assert call.bodies == 2


def test_in_a_tuple_only_the_members_that_change_are_new(kernel):
    plans, known = {}, torch.zeros(16)

    def call(given):
        planned(plans, (), (known,), (given,), lambda: launch(kernel, (3,), (known, 7, given, None), given, W=1, T=2))

    call(torch.zeros(64))
    made = torch.ones(64)
    call(made)
    assert kernel.launched == [((3, 1, 1), ((known.data_ptr(), 7, made.data_ptr(), None), made.data_ptr(), 1, 2))]
    assert len(kernel.compiled) == 1
    launch(kernel, (3,), (known, 7, made[1:], None), made, W=1, T=2)  # another alignment
    assert len(kernel.compiled) == 2


def test_what_a_plan_alone_holds_lives_as_long_as_it(kernel):
    call = Calls(kernel)
    known, given = torch.zeros(16), torch.zeros(64)
    call(given, known)
    (plan,) = call.plans.values()
    assert [tensor is call.own for tensor in plan.kept] == [True] and not plan.fixed and not plan.changing


def test_plans_do_not_grow_without_bound(kernel, monkeypatch):
    monkeypatch.setattr(launching, "MOST_PLANS", 3)
    call, known, given = Calls(kernel), torch.zeros(16), torch.zeros(64)
    for n in range(2, 10):
        call(given, known, n)
    assert len(call.plans) <= 3 and call.bodies == 8


def test_a_call_that_fails_is_not_planned(kernel):
    plans, given = {}, torch.zeros(64)

    def body():
        launch(kernel, (1,), given, 3, W=1, T=2)
        raise MemoryError

    for _ in range(2):
        with pytest.raises(MemoryError):
            planned(plans, (), (), (given,), body)
    assert not plans and launching._recording.plan is None


def test_one_tensor_in_two_places_is_not_planned(kernel):
    """Else it could not be told which of the two addresses goes where."""
    plans, x, y = {}, torch.zeros(64), torch.zeros(64)

    def call(first, second):
        planned(plans, (), (), (first, second), lambda: launch(kernel, (1,), first, second, W=1, T=2))

    call(x, x)
    for _ in range(2):
        call(x, y)
    assert kernel.launched[-1][1][:2] == (x.data_ptr(), y.data_ptr())
