"""What two processes do together, each case in both; ``test_replicas.py`` starts them."""

import copy
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optimizers import oracle
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, HotCold, Path, Pool, Table, optim

N, D, STEPS = 60, 8, 4
PATH = Path(20, (6,), force=True)
CASES: list[Callable[[], None]] = []


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES.append(function)
    return function


def shard_(model: nn.Module) -> None:
    """``fully_shard`` on the CPU: on a GPU, which it would take by itself, a gather by gloo ends the process."""
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


class Model(nn.Module):
    """Tables read alone and in bags, and a layer."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        tables = [Table("a", N, D, QR(4)), Table("b", N, D, QR(4, operation="add"))]
        self.tables = EmbeddingCollection(tables, dtype=torch.float64, **options)
        self.bag = EmbeddingBag(N, D, QR(4), mode="sum", dtype=torch.float64, **options)
        self.top = nn.Linear(D, 1, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        vectors = self.tables(ids).sum(1) + self.bag(ids) + self.tables(ids.flip(0)).sum(1)
        return self.top(vectors.square()).mean()


def batch(step: int, rank: int) -> Tensor:
    """Of each process another, and of another length."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, N, (5 + rank, 2), generator=draw)


def steps_of_one_process(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """The mean of both processes' losses, on the rows as they are stored."""
    for step in range(STEPS):
        optimizer.zero_grad()
        ((model(batch(step, 0)) + model(batch(step, 1))) / 2).backward()
        optimizer.step()


def train(wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The steps of this process, on its own batches."""
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(batch(step, dist.get_rank())).backward()
        optimizer.step()


def assert_same(model: nn.Module, truth: nn.Module) -> None:
    for (name, value), expected in zip(model.state_dict().items(), truth.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, msg=lambda text, name=name: f"{name}: {text}")


def dense_twin(rule: str) -> tuple[Model, torch.optim.Optimizer]:
    truth = Model(0)
    return truth, oracle(rule, truth, 0.05)


@case
def updates_in_backward() -> None:
    """Wrapped after or before: the step is that of one process on both batches; replicas start as the first does."""
    for rule, first in (("Adagrad", "apply"), ("AMSGrad", "wrap"), ("SGD", "apply")):
        truth, optimizer = dense_twin(rule)
        steps_of_one_process(truth, optimizer)
        model = Model(dist.get_rank())
        make = getattr(optim, rule)
        if first == "apply":
            optim.apply_in_backward(model, make, lr=0.05)
        wrapped = DistributedDataParallel(model)
        if first == "wrap":
            optim.apply_in_backward(wrapped, make, lr=0.05)
        train(wrapped, make(model.top.parameters(), lr=0.05))
        assert model.tables.stored.grad is None
        assert_same(model, truth)


@case
def a_model_that_has_trained_some_steps() -> None:
    """The broadcast at its start reads and writes rows that are up to date: no step that they missed is lost."""
    for rule, in_backward in (("Adam", True), ("AMSGrad", False), ("AdamW", True), ("AdamW", False)):
        truth, optimizer = dense_twin(rule)
        model = Model(0, sparse=not in_backward)
        make = getattr(optim, rule)
        if in_backward:
            optim.apply_in_backward(model, make, lr=0.05)
        ours = make(model.top.parameters() if in_backward else model.parameters(), lr=0.05)
        for step in range(5):
            for each, its in ((model, ours), (truth, optimizer)):
                its.zero_grad()
                each(batch(step, 0)[:2]).backward()
                its.step()
        wrapped = DistributedDataParallel(model)
        assert_same(model, truth)
        steps_of_one_process(truth, optimizer)
        train(wrapped, ours)
        assert_same(model, truth)


@case
def no_sync_is_refused() -> None:
    model = Model(0)
    optim.apply_in_backward(model, optim.SGD, lr=0.1)
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync(), pytest.raises(RuntimeError, match="no_sync"):
        wrapped(batch(0, 0))


@case
def sparse_gradients() -> None:
    for rule in ("Adagrad", "Adam", "AMSGrad", "AdamW", "SGD"):
        truth, optimizer = dense_twin(rule)
        steps_of_one_process(truth, optimizer)
        model = Model(dist.get_rank(), sparse=True)
        wrapped = DistributedDataParallel(model)
        train(wrapped, getattr(optim, rule)(wrapped.parameters(), lr=0.05))
        assert_same(model, truth)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Embedding": lambda: Embedding(N, D, QR(4)),
    "EmbeddingBag": lambda: nn.Sequential(EmbeddingBag(N, D, PATH)),
    "HotCold": lambda: Embedding(N, D, HotCold(9, cold=Pool(30), num_rest=4), frequencies=torch.arange(N)),
    "EmbeddingCollection": lambda: EmbeddingCollection([Table("a.b", N, D, PATH), Table("c", N, D, PATH)]),
}


@case
def distributed_checkpoints() -> None:
    """``get_model_state_dict`` and ``set_model_state_dict``, wrapped or not, with whole or broadcast states."""
    rank = dist.get_rank()
    for make in MODULES.values():
        for wrap in (lambda module: module, DistributedDataParallel):
            for options in ({}, {"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}):
                torch.manual_seed(1)
                source, target = make(), make()
                expected = {name: value.clone() for name, value in source.state_dict().items()}
                state = get_model_state_dict(wrap(source))
                assert list(state) == list(expected)
                if "broadcast_from_rank0" in options and rank:
                    state = {}
                set_model_state_dict(wrap(target), state, options=StateDictOptions(**options))
                for name, value in target.state_dict().items():
                    assert torch.equal(value, expected[name]), name


@case
def sharded_tables_are_saved_and_loaded() -> None:
    """By ``fully_shard``: every process has a part of ``stored``."""
    for make in MODULES.values():
        torch.manual_seed(1)  # of a parameter that is sharded, each process keeps its own part
        source, target = (nn.Sequential(make(), nn.Linear(D, 1)) for _ in range(2))
        twin = copy.deepcopy(source)
        whole = weakref.ref(source[0].stored if hasattr(source[0], "stored") else source[0][0].stored)
        for model in (source, target):
            shard_(model)
        assert whole() is None  # nobody keeps the whole table
        state = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
        set_model_state_dict(target, state, options=StateDictOptions(full_state_dict=True))
        loaded = get_model_state_dict(target, options=StateDictOptions(full_state_dict=True))
        for name, value in twin.state_dict().items():
            assert torch.equal(value, loaded[name]), name
        torch.testing.assert_close(target(batch(0, 0)), twin(batch(0, 0)))


@case
def sharded_tables_are_not_updated_in_backward() -> None:
    model = nn.Sequential(Embedding(N, D, QR(4)))
    shard_(model)
    with pytest.raises(ValueError, match="sharded"):
        optim.apply_in_backward(model, optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"state_dtype \('log8'\) must be 'float32' for sharded parameters"):
        optim.Adagrad(model.parameters(), state_dtype="log8")
    for make in (lambda: Embedding(N, D, QR(4)), lambda: EmbeddingBag(N, D, PATH)):
        model = nn.Sequential(make())
        optim.apply_in_backward(model, optim.SGD, lr=0.1)
        shard_(model)
        with pytest.raises(RuntimeError, match="fully_shard or functional_call has replaced a table"):
            model(batch(0, 0))


def run(rank: int, folder: str, cases: Sequence[Callable[[], None]] = CASES) -> None:
    """All cases, in process ``rank`` of two."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for function in cases:
        function()
        dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # every case has passed; threads of torch's have aborted the ordinary end of a process
