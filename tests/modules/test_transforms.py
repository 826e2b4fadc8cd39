"""What torch does to modules and functions: compile, export, meta, vmap, functional gradients."""

import copy
import warnings

import pytest
import torch
from oracles import CASES, FEW, D, N, assert_near, assert_same_gradients, dense_by_hand, fill_, twin_of
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vmap

from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, Full, GeneralizedQR, HotCold, Path, Table, optim

IDS = torch.tensor([[7, 0, 59], [59, 31, 12]])
BAG_IDS, OFFSETS = torch.tensor([4, 7, 59, 12, 7, 7, 33]), torch.tensor([0, 0, 3, 6])
MIXED = [
    Table("a", N, D, CASES["qr-mult"], padding_idx=7),
    Table("b", N + 7, D, Full()),
    Table("c", N, D, CASES["path-mlp"]),
    Table("d", N, D, CASES["qr-feature"]),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def embedding(case: str, **options: object) -> Embedding:
    return fill_(Embedding(N, D, CASES[case], padding_idx=7, **options))


def bag(case: str, **options: object) -> EmbeddingBag:
    return fill_(EmbeddingBag(N, D, CASES[case], padding_idx=7, **options))


def calls() -> dict[str, tuple[torch.nn.Module, tuple[Tensor, ...]]]:
    """A module and its arguments, of every kind that takes another path through the code."""
    weights = torch.linspace(-1, 1, len(BAG_IDS))
    jagged = torch.tensor([0, 2, 2, 3, 4, 4, 6, 6, 7])
    found = {f"embedding-{case}": (embedding(case), (IDS,)) for case in FEW}
    for case in ("qr-mult", "path-mlp"):
        for mode in ("sum", "mean", "max"):
            found[f"bag-{case}-{mode}"] = (bag(case, mode=mode), (BAG_IDS, OFFSETS))
        found[f"bag-{case}-weighted"] = (bag(case, mode="sum"), (BAG_IDS, OFFSETS, weights))
        found[f"bag-{case}-2d"] = (bag(case), (IDS,))
    narrow = QR(4, width=4, force=True)
    found["embedding-narrow"] = (fill_(Embedding(N, D, narrow, padding_idx=7)), (IDS,))
    found["bag-narrow-mean"] = (fill_(EmbeddingBag(N, D, narrow)), (BAG_IDS, OFFSETS))
    tables = [Table("a", N, D, narrow), Table("b", N, D, Full())]
    found["collection-narrow"] = (fill_(EmbeddingCollection(tables)), (torch.arange(20).view(10, 2),))
    found["collection"] = (fill_(EmbeddingCollection(MIXED)), (torch.arange(20).view(5, 4),))
    found["collection-jagged"] = (fill_(EmbeddingCollection(MIXED)), (BAG_IDS, jagged, weights))
    return found


CALLS = list(calls())


def check_same(module: torch.nn.Module, function: object, arguments: tuple[Tensor, ...]) -> None:
    """``function`` gives what ``module`` gives, and the gradients too."""
    twin = copy.deepcopy(module)
    expected, out = twin(*arguments), function(*arguments)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected.backward(upstream)
    out.backward(upstream)
    assert_same_gradients(module, twin)


@pytest.mark.parametrize("name", CALLS)
def test_compile(name: str) -> None:
    module, arguments = calls()[name]
    check_same(module, torch.compile(module, fullgraph=True, backend="aot_eager"), arguments)


class Tied(torch.nn.Module):
    """A head that reads the composed table."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.items = fill_(Embedding(N, D, QR(4), sparse=sparse))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.nn.functional.linear(self.items(ids), self.items.weight)


@pytest.mark.parametrize("sparse", [False, True])
def test_compiled_models_read_composed_weights(sparse: bool) -> None:
    """The compiler's graph breaks at lookups with sparse gradients; it is then given the weight."""
    model = Tied(sparse)
    expected, out = model(IDS), torch.compile(model, fullgraph=not sparse, backend="aot_eager")(IDS)
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(each.square().sum(), model.items.stored)[0].to_dense() for each in (out, expected)]
    torch.testing.assert_close(*grads)


def test_compile_with_inductor() -> None:
    module, arguments = calls()["embedding-path-mlp"]
    check_same(module, torch.compile(module, fullgraph=True), arguments)


@pytest.mark.parametrize("case", ["qr-mult", "path-mlp"])
@pytest.mark.parametrize("kind", ["embedding", "sum", "max"])
def test_compiled_once_for_batches_of_any_size(kind: str, case: str) -> None:
    module = embedding(case) if kind == "embedding" else bag(case, mode=kind)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    compiled(*((BAG_IDS,) if kind == "embedding" else (BAG_IDS, OFFSETS)))
    with torch.compiler.set_stance("fail_on_recompile"):
        for size in (5, 12, 47, 5000):
            ids = torch.arange(size) % 60
            arguments = (ids,) if kind == "embedding" else (ids, torch.arange(0, size, 2))
            module.zero_grad()
            check_same(module, compiled, arguments)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_ids_out_of_range_raise(backend: str) -> None:
    compiled = torch.compile(embedding("qr-mult"), fullgraph=True, backend=backend)
    with pytest.raises(IndexError, match=r"id 60 is outside \[0, 60\) of Embedding"):
        compiled(torch.tensor([1, 60]))


def test_compiled_ids_out_of_range_raise_in_bags_and_collections() -> None:
    for mode in ("sum", "max"):
        with pytest.raises(IndexError, match=r"id -1 is outside \[0, 60\) of EmbeddingBag"):
            torch.compile(bag("path-mlp", mode=mode), fullgraph=True, backend="aot_eager")(torch.tensor([[0, -1]]))
    collection = torch.compile(EmbeddingCollection(MIXED), fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError, match=r"id 60 is outside \[0, 60\) of table c"):
        collection(torch.tensor([[0, 60, 60, 0]]))
    with pytest.raises(IndexError, match=r"id 60 is outside \[0, 60\) of table c"):
        collection(torch.tensor([0, 60, 60]), torch.tensor([0, 1, 2, 3, 3]))


@pytest.mark.parametrize("name", CALLS)
def test_export(name: str) -> None:
    module, arguments = calls()[name]
    exported = torch.export.export(module, arguments).module()
    torch.testing.assert_close(exported(*arguments), module(*arguments))


@pytest.mark.parametrize("name", CALLS)
def test_meta(name: str) -> None:
    module, arguments = calls()[name]
    expected = module(*arguments)
    out = copy.deepcopy(module).to("meta")(*(a.to("meta") for a in arguments))
    assert out.is_meta and out.shape == expected.shape and out.dtype == expected.dtype
    out.sum().backward()


@pytest.mark.parametrize("name", CALLS)
def test_autocast_leaves_the_dtype_of_the_tables(name: str) -> None:
    """As for ``nn.Embedding``: vectors of a float32 table are float32; networks may be rounded inside."""
    module, arguments = calls()[name]
    expected = module(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(*arguments)
    assert out.dtype == torch.float32
    assert_near(out, expected, torch.bfloat16 if "path" in name or "collection" in name else torch.float32)
    out.sum().backward()


@pytest.mark.parametrize("case", FEW)
def test_functional_call_and_gradient(case: str) -> None:
    module = embedding(case, dtype=torch.float64)
    twin = twin_of(module)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    grads = grad(lambda p: functional_call(module, p, (IDS,)).pow(3).sum())(parameters)
    twin.to_dense()[IDS].pow(3).sum().backward()
    for name, expected in twin.named_parameters():
        torch.testing.assert_close(grads[name], expected.grad, msg=name)


@pytest.mark.parametrize("no_grad", [False, True])
@pytest.mark.parametrize("case", FEW)
def test_vmap_over_ids(case: str, no_grad: bool) -> None:
    table = embedding(case)
    with torch.set_grad_enabled(not no_grad), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(vmap(table)(IDS), table(IDS))
        torch.testing.assert_close(vmap(table, in_dims=1, out_dims=1)(IDS), table(IDS))
        torch.testing.assert_close(vmap(vmap(table))(IDS), table(IDS))
        for bags in (bag(case), bag(case, mode="max")):
            torch.testing.assert_close(vmap(bags)(IDS[:, None])[:, 0], bags(IDS))
        assert (vmap(table)(IDS + 1).isnan().flatten(2).any(2) == (IDS == 59)).all()


@pytest.mark.parametrize("case", FEW)
def test_gradients_per_sample(case: str) -> None:
    """``vmap(grad)`` over samples is the loop over samples; ``grad(vmap)`` is its sum."""
    check_per_sample(embedding(case), IDS)
    check_per_sample(bag(case), IDS[:, None])


def check_per_sample(module: torch.nn.Module, ids: Tensor) -> None:
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(p: dict[str, Tensor], i: Tensor) -> Tensor:
        return functional_call(module, p, (i,)).pow(2).sum()

    each = vmap(grad(loss), (None, 0))(parameters, ids)
    looped = [grad(loss)(parameters, i) for i in ids]
    total = grad(lambda p: vmap(loss, (None, 0))(p, ids).sum())(parameters)
    for name in parameters:
        expected = torch.stack([g[name] for g in looped])
        torch.testing.assert_close(each[name], expected, msg=name)
        torch.testing.assert_close(total[name], expected.sum(0), msg=name)


def test_an_ensemble_and_a_jacobian() -> None:
    """One set of ids and several sets of tables; and the derivatives by all rows, which are those of ``to_dense``."""
    modules = [fill_(Embedding(N, D, CASES["qr-mult"], dtype=torch.float64), seed) for seed in range(3)]
    stacked, _ = torch.func.stack_module_state(modules)
    out = vmap(lambda p: functional_call(modules[0], p, (IDS,)))(stacked)
    torch.testing.assert_close(out, torch.stack([m(IDS) for m in modules]))
    twin, jacobian = modules[1], jacrev(lambda w: functional_call(modules[0], {"stored": w}, (IDS,)))
    expected = torch.autograd.functional.jacobian(lambda w: by_hand(twin, w)[IDS], twin.stored.detach())
    torch.testing.assert_close(jacobian(twin.stored.detach()), expected)


def by_hand(module: Embedding, stored: Tensor) -> Tensor:
    """The table of a quotient-remainder module whose rows are ``stored``."""
    remainder, quotient = (extent.of(stored) for extent in module.all_extents)
    return remainder[torch.arange(N) % len(remainder)] * quotient[torch.arange(N) // len(remainder)]


def test_forward_mode() -> None:
    module = embedding("generalized3-mult", dtype=torch.float64)
    weight = module.stored.detach()
    _, moved = jvp(lambda w: functional_call(module, {"stored": w}, (IDS,)), (weight,), (weight,))
    torch.testing.assert_close(moved, 3 * module(IDS).detach())  # products of three rows


@pytest.mark.parametrize("case", [*FEW[1:4], "generalized3-mult", "path-sigmoid"])
def test_gradients_and_their_gradients_against_differences(case: str) -> None:
    module = fill_(Embedding(N, D, CASES[case], padding_idx=7, dtype=torch.float64))
    names, values = zip(*module.named_parameters(), strict=True)
    chosen = [0, 1] if len(values) > 1 else [0]
    inputs = tuple(values[j].detach().requires_grad_() for j in chosen)
    ids = torch.tensor([7, 0, 59, 0])

    def function(*parameters: Tensor) -> Tensor:
        return functional_call(module, dict(zip([names[j] for j in chosen], parameters, strict=True)), (ids,))

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_gradients_of_gradients() -> None:
    """The gradient of a gradient's norm, as a gradient penalty takes it, by autograd and by ``torch.func``."""
    module = embedding("generalized3-mult", dtype=torch.float64)
    twin = twin_of(module)
    (first,) = torch.autograd.grad(twin.to_dense()[IDS].pow(3).sum(), twin.stored, create_graph=True)
    first.pow(2).sum().backward()

    def penalty(stored: Tensor) -> Tensor:
        return grad(lambda w: functional_call(module, {"stored": w}, (IDS,)).pow(3).sum())(stored).pow(2).sum()

    torch.testing.assert_close(grad(penalty)(module.stored.detach()), twin.stored.grad)
    (first,) = torch.autograd.grad(module(IDS).pow(3).sum(), module.stored, create_graph=True)
    first.pow(2).sum().backward()
    assert_same_gradients(module, twin)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("case", ["qr-mult", "generalized3-concat", "path-sigmoid"])
def test_bag_gradients_and_their_gradients_against_differences(case: str, mode: str) -> None:
    module = bag(case, mode=mode, dtype=torch.float64)
    weight = module.stored.detach().requires_grad_()
    sample = torch.linspace(-1, 1, len(BAG_IDS), dtype=torch.float64).requires_grad_()

    def function(weight: Tensor, sample: Tensor) -> Tensor:
        return functional_call(module, {"stored": weight}, (BAG_IDS, OFFSETS, sample))

    assert torch.autograd.gradcheck(function, (weight, sample), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (weight, sample), fast_mode=True)


@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_networks_of_cold_ids_that_are_listed_compile(kind: type[Embedding]) -> None:
    scheme = HotCold(5, cold=Path(4, (3,)), num_rest=9, force=True)
    module = fill_(kind(N, D, scheme, frequencies=torch.arange(N) % 7))
    check_same(module, torch.compile(module, fullgraph=True, backend="aot_eager"), (IDS,))


def test_networks_of_unlike_shape_in_one_collection_compile() -> None:
    linear = Path(6, (), force=True)
    tables = [Table("a", N, 4, Path(4, (3,))), Table("b", N, 8, linear), Table("c", N, 8, linear)]
    module = fill_(EmbeddingCollection([*tables, Table("d", 9, 2)]))
    check_same(module, torch.compile(module, fullgraph=True, backend="aot_eager"), (torch.arange(8).view(2, 4),))
    assert_near(module(torch.tensor([[5, 6, 7, 8]]))[0, 4:12], dense_by_hand(module, 1)[6], torch.float32)


@pytest.mark.filterwarnings("ignore:.*jit.trace:DeprecationWarning")
@pytest.mark.parametrize("raw_ids", [False, True])
def test_a_traced_module_reads_other_ids(raw_ids):
    """And no weight is composed, which would take 29 TiB."""
    table = Embedding(10**12, 8, GeneralizedQR(4), raw_ids=raw_ids)
    ids = torch.tensor([7, 2**30, 10**12 - 1])
    with torch.no_grad():
        traced = torch.jit.trace(table, torch.arange(5), check_trace=False)
        assert torch.equal(traced(ids), table(ids))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Embedding(100, 8, HotCold(9, cold=QR(4), num_rest=5), padding_idx=7, sparse=True),
        lambda: EmbeddingBag(100, 8, QR(4), mode="mean", sparse=True),
        lambda: EmbeddingCollection([Table("a", 100, 8, QR(4)), Table("b", 100, 8, Path(20, force=True))], sparse=True),
    ],
    ids=["embedding", "bag", "collection"],
)
def test_lookups_with_sparse_gradients_run_outside_of_compiled_graphs(make):
    """Under Adam, whose rows lag behind: the same rows have gradients, and move as without the compiler."""
    table = make()
    twin = copy.deepcopy(table)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"sparse=True or updated by quorem.optim are not compiled"):
        torch.compile(table, fullgraph=True, backend="aot_eager")(torch.tensor([[1, 2]]))
    torch._dynamo.reset()
    compiled = torch.compile(table, backend="aot_eager")
    optimizers = [optim.Adam([module.stored], lr=0.1) for module in (table, twin)]
    for size in (5, 2, 9):
        ids = torch.randint(0, 100, (size, 2))
        for optimizer, read in zip(optimizers, (compiled, twin), strict=True):
            optimizer.zero_grad()
            read(ids).square().sum().backward()
        ours, theirs = table.stored.grad, twin.stored.grad
        assert ours.is_sparse and set(ours._indices()[0].tolist()) == set(theirs._indices()[0].tolist())
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense())
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(table.stored, twin.stored)
