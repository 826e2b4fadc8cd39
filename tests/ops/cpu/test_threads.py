"""Several threads: the same bits, calls from many at once, and forks."""

import textwrap
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest
import torch
from kernel_cases import MIX, Case, each_once, fresh, fused, same, truth
from processes import python
from torch import Tensor

from quorem.ops.cpu import launch
from quorem.ops.rows import IdBatch

pytestmark = pytest.mark.kernels(device="cpu")


@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("mix", [MIX, MIX[:1]], ids=["many slots", "one slot"])
def test_threads_change_no_bit(mix, sums, many_threads):
    case = Case(mix)
    ids, grad = case.ids(1000), case.grad(1000)
    bag_ids, offsets = case.bags(300)
    bags = IdBatch(bag_ids, offsets, torch.rand(len(bag_ids)), mean=True)

    def run() -> dict[str, Tensor]:
        tables = (case.stored, case.layout)
        stored, rule = case.stored.clone(), fresh("adagrad", case, seed=5)
        rule.state = rule.state._replace(sum=rule.state.sum.to(sums))
        fused("update_", grad, IdBatch(ids), stored, case.layout, rule)
        rows = torch.randint(0, len(stored), (2000,), generator=torch.Generator().manual_seed(0))
        fused("rows_update_", rows, torch.ones(2000, 16), stored, rule)
        return {
            "lookup": fused("lookup", IdBatch(ids), *tables, names=""),
            "gradient": fused("backward", grad, IdBatch(ids), *tables),
            "sparse gradient": each_once(*fused("row_grads", grad, IdBatch(ids), *tables), case.stored),
            "bags": fused("lookup", bags, *tables, names=""),
            "gradient of bags": fused("backward", grad[:300], bags, *tables),
            "updated": stored,
            "state": rule.state.sum,
        }

    several = run()
    again = run()
    torch.set_num_threads(1)
    for name, alone in run().items():
        assert torch.equal(several[name], alone) and torch.equal(again[name], alone), name


def test_calls_from_several_threads(many_threads):
    case = Case()
    batches = [case.ids(200) for _ in range(8)]
    expected = [truth("lookup", IdBatch(ids), case.stored, case.layout) for ids in batches]
    with ThreadPoolExecutor(8) as pool:
        outs = pool.map(lambda ids: fused("lookup", IdBatch(ids), case.stored, case.layout, names=""), batches)
        for out, vectors in zip(outs, expected, strict=True):
            same("out", out, vectors)


def test_an_exception_is_raised_when_all_threads_have_ended():
    done = []

    def run(task: int) -> None:
        if task == 0:
            raise ValueError(f"task {task}")
        sleep(0.1)
        done.append(task)

    with pytest.raises(ValueError, match="task 0"):
        launch.run_tasks(run, [(0,), (1,), (2,)], 2)
    assert sorted(done) == [1, 2]


def test_kernels_survive_a_fork():
    """In a process of its own, since a test runner may have threads that a fork would lose."""
    code = """
        import os, torch
        from quorem import QR, Embedding
        from quorem.ops.cpu import launch
        launch.GRAIN = 1
        torch.set_num_threads(2)
        table = Embedding(1000, 16, QR(4))
        ids = torch.arange(1000)
        with torch.no_grad():
            expected = table(ids)
            child = os.fork()
            if child == 0:
                os._exit(0 if torch.equal(table(ids), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
    """
    python("-c", textwrap.dedent(code), timeout=120)
