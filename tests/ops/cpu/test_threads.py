"""Several threads: the same bits, calls from many at once, and forks."""

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from threading import Event, get_ident

import pytest
import torch
from kernel_cases import LR, MIX, Case, each_once, fresh, fused, same, truth
from torch import Tensor

from quorem.ops.cpu import threads
from quorem.ops.rows import IdBatch

pytestmark = pytest.mark.kernels(device="cpu")


@pytest.mark.parametrize("mix", [MIX, MIX[:1]], ids=["many slots", "one slot"])
def test_threads_change_no_bit(mix, many_threads):
    case = Case(mix)
    ids, grad = case.ids(1000), case.grad(1000)
    bag_ids, offsets = case.bags(300)
    bags = IdBatch(bag_ids, offsets, torch.rand(len(bag_ids)), mean=True)

    def run() -> dict[str, Tensor]:
        tables = (case.stored, case.layout)
        stored, (state, constants) = case.stored.clone(), fresh("adagrad", case)
        options = {"rule": "adagrad", "constants": constants}
        fused("update_", grad, IdBatch(ids), stored, LR, state, case.layout, **options)
        rows = torch.randint(0, len(stored), (2000,), generator=torch.Generator().manual_seed(0))
        fused("rows_update_", rows, torch.ones(2000, 16), stored, LR, state, **options)
        return {
            "lookup": fused("lookup", IdBatch(ids), *tables, names=""),
            "gradient": fused("backward", grad, IdBatch(ids), *tables),
            "sparse gradient": each_once(*fused("row_grads", grad, IdBatch(ids), *tables), case.stored),
            "bags": fused("lookup", bags, *tables, names=""),
            "gradient of bags": fused("backward", grad[:300], bags, *tables),
            "sample_weights": fused("sample_weights_backward", grad[:300], bags, *tables),
            "updated": stored,
            "state": state.sum,
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


def test_work_does_not_wait_for_a_thread_that_has_not_woken(monkeypatch):
    helpers, finished = threads._Helpers(), Event()
    monkeypatch.setattr(threads, "_helpers", [helpers])
    helpers.invite([threads._Invitation(lambda: int(finished.wait(60)))])  # the only other thread has other work
    tasks = [(i,) for i in range(5)]
    assert threads.run_tasks(lambda: lambda i: i, tasks, 2) == 4 and not finished.is_set()
    finished.set()


def test_an_exception_on_another_thread_is_raised():
    main, failed = get_ident(), Event()

    def run(task: int) -> int:
        if get_ident() == main:
            return int(failed.wait(60))
        failed.set()
        raise ValueError(f"task {task}")

    with pytest.raises(ValueError, match="task"):
        threads.run_tasks(lambda: run, [(0,), (1,)], 2)


@pytest.mark.parametrize("gain, chosen", [(0.5, 4), (0.95, 1), (3.0, 1)])
def test_several_threads_are_taken_where_they_were_quicker(gain, chosen, monkeypatch):
    work, taken = clocked_work(monkeypatch), []
    for _ in range(40):
        taken.append(work(lambda number: gain if number == 4 else 1.0))
    assert taken[:8] == [1, 4] * 4 and set(taken[8:]) == {chosen}
    for _ in range(600):  # the machine's load changes
        taken.append(work(lambda number: 1.0 if number == 4 else gain))
    assert taken[-1] == (1 if chosen == 4 else 4 if gain > 1.2 else 1)


def test_calls_that_became_slower_are_tried_the_other_way_at_once(monkeypatch):
    work = clocked_work(monkeypatch)
    for _ in range(300):
        work(lambda number: 0.6 if number == 4 else 1.0)
    taken = [work(lambda number: 3.0 if number == 4 else 1.0) for _ in range(40)]
    assert set(taken[:16]) == {4} and set(taken[21:]) == {1}


def test_sometimes_late_threads_are_not_taken(monkeypatch):
    """The median of their times is short, the mean is not."""
    work, late = clocked_work(monkeypatch), iter([0.5, 0.5, 0.5, 4.0] * 1000)
    taken = [work(lambda number: next(late) if number == 4 else 1.0) for _ in range(600)]
    assert taken.count(4) < 200


def clocked_work(monkeypatch):
    """A function that does some work, with a given number of seconds for a number of threads; returns the number."""
    clock = [0.0]
    monkeypatch.setattr(threads.time, "perf_counter", lambda: clock[0])
    choice = threads.ThreadChoice(4)

    def work(seconds):
        with threads._Call(choice, 1000) as number:
            clock[0] += seconds(number)
        return number

    return work


def test_kernels_survive_a_fork():
    """In a process of its own, since a test runner may have threads that a fork would lose."""
    code = """
        import os, torch
        from quorem import QR, Embedding
        from quorem.ops.cpu import threads
        threads.GRAIN, threads.CHOOSES = 1, False
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
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
