"""The Triton kernels against the reference: on a GPU where there is one, in Triton's interpreter elsewhere.

``TRITON_INTERPRET`` is set by conftest before Triton is imported; the interpreter is slow, so it sees smaller batches.
"""

import pytest
import torch
import torch.nn.functional as F
from closeness import CUDA, DEVICE, assert_close
from torch import Tensor

import quorem
from quorem import partitions
from quorem.data.shape import CARDINALITIES
from quorem.ops import layout, reference, replay, rules, update

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.ops.gpu import bag as gpu_bag
from quorem.ops.gpu import gather, host, places
from quorem.ops.gpu import lookup as gpu_lookup
from quorem.ops.gpu import update as gpu_update

pytestmark = [pytest.mark.usefixtures("nan_filled"), pytest.mark.kernels(device="gpu")]


def every_kind(d: int, n: int = 1000) -> list[quorem.Table]:
    """A table of each kind: products and sums of two to four, one alone, permuted, padded, mapped, past 2^31 ids."""
    codes = [partitions.ExplicitPartition(torch.arange(n) % 40), partitions.ExplicitPartition(torch.arange(n) // 40)]
    tables = [
        quorem.Table("qr", n, d, quorem.QR(4)),
        quorem.Table("k3", n, d, quorem.GeneralizedQR(3)),
        quorem.Table("tiny", 7, d, quorem.Full()),
        quorem.Table("sum", n, d, quorem.ChineseRemainder(2, operation="add", permute=3)),
        quorem.Table("wide", 2**40, d, quorem.ChineseRemainder(4)),
        quorem.Table("pad", n, d, quorem.QR(4, operation="feature"), padding_idx=3),
        quorem.Table("map", n, d, quorem.Custom(codes)),
    ]
    return tables + ([quorem.Table("cat", n, d, quorem.QR(4, operation="concat"))] if d % 2 == 0 else [])


def collection(d: int, dtype: torch.dtype) -> quorem.EmbeddingCollection:
    torch.manual_seed(d)
    module = quorem.EmbeddingCollection(every_kind(d), device=DEVICE, dtype=dtype)
    module.reset_parameters("symmetric")
    return module


def integers(module: quorem.EmbeddingCollection) -> tuple[Tensor, ...]:
    return module.slots, module.parts, module.maps, module.spans


def batch(module: quorem.EmbeddingCollection, b: int) -> Tensor:
    ids = torch.stack([torch.randint(s.num_embeddings, (b,)) for s in module.specs], 1)
    ids[: b // 2] = ids[0]  # hot rows
    ids[-1, -1] = -1  # gives zeros and no gradient, as padding does
    return ids.to(DEVICE)


def jagged(module: quorem.EmbeddingCollection, b: int) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(0, 4, (len(module.specs), b))
    ids = [torch.randint(s.num_embeddings, (int(n),)) for s, n in zip(module.specs, lengths.sum(1), strict=True)]
    return torch.cat(ids).to(DEVICE), F.pad(lengths.flatten().cumsum(0), (1, 0)).to(DEVICE)


def gradient(module: quorem.EmbeddingCollection, b: int) -> Tensor:
    return torch.randn(b, len(module.slots), module.weight.shape[1], device=DEVICE).to(module.weight.dtype)


@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("d", "b", "dtype"),
    [
        (1, 7, torch.float32),
        (3, 63, torch.float64),
        (16, 1, torch.float32),
        (16, 1000 if CUDA else 130, torch.float32),
        (60, 7, torch.bfloat16),
        (100, 7, torch.float16),
        (130, 7, torch.float32),
    ],
)
def test_lookup_and_its_gradient(d: int, b: int, dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    module = collection(d, dtype)
    ids, weight = batch(module, b), module.weight.detach()
    if id_dtype == torch.int32:
        if b > 63 and not CUDA:
            pytest.skip("int32 ids are covered by the smaller batches; run on a GPU for the larger ones")
        ids[:, [s.num_embeddings > 2**31 for s in module.specs]] %= 2**31 - 1
        ids = ids.int()
    truth = reference.lookup(ids, weight.double(), *integers(module))
    assert_close(gpu_lookup.lookup(ids, weight, *integers(module)), truth, dtype, "out")
    grad = gradient(module, b)
    row_grads = reference.lookup_row_grads(grad.double(), ids, weight.double(), *integers(module))
    truth = reference.accumulate(*row_grads, weight.double())
    dense = gpu_lookup.lookup_backward(grad, ids, weight, *integers(module))
    for (name, mine), (_, true) in zip(module.named_tables(dense), module.named_tables(truth), strict=True):
        assert_close(mine, true, dtype, name, slack=4)
    assert (places.claims_of(weight, 0) == places.UNCLAIMED).all()


@pytest.mark.parametrize("names", ["qr", "k3", "tiny", "sum", "wide", "pad", "map", "cat", "qr k3 tiny", "qr sum"])
def test_what_some_kinds_do_not_need_is_not_read(names: str) -> None:
    """A kernel leaves out what none of its slots has, such as permutations: each kind alone, and some mixed."""
    tables = [table for table in every_kind(16) if table.name in names.split()]
    module = quorem.EmbeddingCollection(tables, device=DEVICE)
    module.reset_parameters("symmetric")
    ids, weight, ints, grad = batch(module, 70), module.weight.detach(), integers(module), gradient(module, 70)
    ids[5] = 2**41
    invalid = torch.zeros((), dtype=torch.int64, device=DEVICE)
    out = gpu_lookup.lookup_counting(ids, weight, *ints, invalid)
    assert_close(out, reference.lookup(ids, weight, *ints), torch.float32, "out")
    assert int(invalid) == len(tables) + 1
    truth = reference.accumulate(*reference.lookup_row_grads(grad, ids, weight, *ints), weight)
    assert_close(gpu_lookup.lookup_backward(grad, ids, weight, *ints), truth, torch.float32, "gradient", slack=4)


def test_jagged_batches_share_places() -> None:
    """A batch has the places of a somewhat larger one, and leaves those past its end alone."""
    module = collection(16, torch.float32)
    weight, ints, grad = module.weight.detach(), integers(module), gradient(module, 9)
    for seed in range(3):
        torch.manual_seed(seed)
        ids, offsets = jagged(module, 9)
        assert places.bucket(len(ids)) > len(ids) or seed
        dense = gpu_bag.bag_backward(grad, ids, offsets, None, weight, *ints, mean=False)
        truth = reference.accumulate(
            *reference.bag_row_grads(grad, ids, offsets, None, weight, *ints, mean=False), weight
        )
        assert_close(dense, truth, torch.float32, "gradient", slack=4)
        assert (places.claims_of(weight, 0) == places.UNCLAIMED).all()


def test_the_default_device_does_not_matter() -> None:
    module = collection(4, torch.float32)
    ids, weight, ints, grad = batch(module, 5), module.weight.detach(), integers(module), gradient(module, 5)
    (values, offsets), bags = jagged(module, 5), gradient(module, 5)
    with torch.device("meta"):
        gpu_lookup.lookup(ids, weight, *ints)
        gpu_lookup.lookup_backward(grad, ids, weight, *ints)
        gpu_bag.bag_backward(bags, values, offsets, None, weight, *ints, mean=False)


def test_nodes_are_those_of_the_moments() -> None:
    """Whoever took the steps: a plain one, after a lookup in inference mode, and a fused one."""
    module = collection(3, torch.float32)
    ids, weight, ints = batch(module, 5), module.weight.detach().clone(), integers(module)
    state, hyper = ledger("amsgrad", weight)
    lr, options = torch.tensor(0.1, dtype=torch.float64, device=DEVICE), {"rule": "amsgrad", "hyper": hyper}
    with torch.inference_mode():
        gpu_update.lookup_catch_up_(ids, weight, state, *ints, **options)
    replay.advance_(lr, tuple(state[-3:]), hyper, True)
    gpu_update.lookup_update_(gradient(module, 5), ids, weight, lr, state, *ints, **options)
    moments, nodes = state[-1][:2].split(4, 1)
    since = torch.arange(2, device=DEVICE)
    assert_close(nodes, replay.nodes(moments, since, hyper, True), torch.float32, "nodes")


@pytest.mark.parametrize("number", [2, 9])
def test_passes_give_what_one_gives(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = collection(16, torch.float32)
    ids, weight, ints, grad = batch(module, 9), module.weight.detach(), integers(module), gradient(module, 9)
    divided = places.divided(host.on_host(*ints), 9, False, number, 64)
    monkeypatch.setattr(gather, "places_of", lambda *args: divided)
    passes = divided.passes
    assert 1 < len(passes) <= number and sum(now.pairs for now in passes) == ints[1].shape[:2].numel()
    row_grads = reference.lookup_row_grads(grad, ids, weight, *ints)
    truth = reference.accumulate(*row_grads, weight)
    assert_close(gpu_lookup.lookup_backward(grad, ids, weight, *ints), truth, torch.float32, "gradient", slack=4)
    lr, options = torch.tensor(0.1, dtype=torch.float64, device=DEVICE), {"rule": "adagrad", "hyper": [0.0, 1e-10]}
    mine, true = weight.clone(), weight.clone()
    my_state, true_state = ([torch.ones_like(weight), torch.tensor(0, device=DEVICE)] for _ in range(2))
    for _ in range(2):
        gpu_update.lookup_update_(grad, ids, mine, lr, my_state, *ints, **options)
        update._lookup_update(grad, ids, true, lr, true_state, *ints, **options)
    assert_close(mine - weight, true - weight, torch.float32, "change of weight", slack=20)
    assert torch.equal(my_state[1], true_state[1])  # a step counts once
    assert (places.claims_of(mine, 0) == places.UNCLAIMED).all()


@pytest.mark.parametrize(
    ("d", "reads", "number"), [(16, 2048, 1), (16, 16384, 1), (16, 65536, 3), (64, 65536, 2), (128, 65536, 2)]
)
def test_a_step_needs_a_quarter_of_the_tables_at_most(d: int, reads: int, number: int) -> None:
    """Beside tables and state: the vectors that it returns, the sums, and the claims kept between steps."""
    specs = [quorem.QR(4).spec(n, d) for n in CARDINALITIES]
    laid = layout.build(specs, [None] * len(specs))
    weight = torch.empty(laid.num_rows, laid.width, device="meta")
    passes = places.places_of(weight, reads, False, laid.slots, laid.parts, laid.maps, laid.spans).passes
    vectors, sums = reads * len(laid.slots) * d, max(now.places for now in passes) * d
    claims = max(now.rows for now in passes)
    assert 4 * (vectors + sums + claims) <= weight.numel() * 4 / 4
    assert len(passes) == number


def test_where_passes_do_not_save_enough_there_is_one() -> None:
    specs = [quorem.QR(4).spec(n, 16) for n in (100, 1000, 10000)]
    laid = layout.build(specs, [None] * len(specs))
    weight = torch.empty(laid.num_rows, laid.width, device="meta")
    assert len(places.places_of(weight, 65536, False, laid.slots, laid.parts, laid.maps, laid.spans).passes) == 1


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(("d", "b", "dtype"), [(3, 9, torch.float64), (16, 500 if CUDA else 5, torch.float32)])
def test_bag_and_its_gradients(d: int, b: int, dtype: torch.dtype, mean: bool) -> None:
    module = collection(d, dtype)
    (ids, offsets), weight, ints = jagged(module, b), module.weight.detach(), integers(module)
    samples, grad = torch.rand(len(ids), dtype=dtype, device=DEVICE), gradient(module, b)
    out = gpu_bag.bag(ids, offsets, samples, weight, *ints, mean=mean)
    assert_close(out, reference.bag(ids, offsets, samples, weight, *ints, mean=mean), dtype, "out")
    out = gpu_bag.bag(ids, offsets, None, weight, *ints, mean=mean)
    assert_close(out, reference.bag(ids, offsets, None, weight, *ints, mean=mean), dtype, "unweighted")
    dense = gpu_bag.bag_backward(grad, ids, offsets, samples, weight, *ints, mean=mean)
    row_grads = reference.bag_row_grads(grad, ids, offsets, samples, weight, *ints, mean=mean)
    assert_close(dense, reference.accumulate(*row_grads, weight), dtype, "weight", slack=4)
    dsamples = gpu_bag.bag_sample_weights_backward(grad, ids, offsets, weight, *ints, mean=mean)
    truth = reference.bag_sample_weights_grad(grad, ids, offsets, weight, *ints, mean=mean)
    assert_close(dsamples, truth, dtype, "sample_weights", slack=4)


def ledger(rule: str, weight: Tensor) -> tuple[list[Tensor], list[float]]:
    """State and constants of a rule, as ``ops.update`` lists them."""
    step = torch.zeros((), dtype=torch.int64, device=DEVICE)
    if rule == "sgd":
        return [], []
    if rule == "adagrad":
        return [torch.rand_like(weight) * 0.1, step], [0.01, 1e-10]
    if rule == "rowwise_adagrad":
        return [torch.rand(len(weight), device=DEVICE).to(weight.dtype), step, torch.tensor([[0, 1]]).to(DEVICE)], [
            0,
            1e-10,
        ]
    amsgrad = rule == "amsgrad"
    hyper = replay.constants(0.9, 0.999, 1e-8, weight.dtype, amsgrad)
    last = torch.zeros(len(weight), dtype=torch.int32, device=DEVICE)
    averages = [torch.zeros_like(weight) for _ in range(2 + amsgrad)]
    return [*averages, last, *replay.empty_times(step, hyper, weight.dtype)], hyper


@pytest.mark.parametrize("bags", [False, True], ids=["lookup", "bag"])
@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        ("sgd", torch.float32),
        ("adagrad", torch.float32),
        ("adagrad", torch.float64),
        ("rowwise_adagrad", torch.float32),
        ("adam", torch.float64),
        ("amsgrad", torch.float32),
        ("amsgrad in closed form", torch.float32),
        ("amsgrad", torch.float64),
    ],
)
def test_update(rule: str, dtype: torch.dtype, bags: bool) -> None:
    """A few steps of each rule, clipping and loss scaling among them, equal the plain rules' steps."""
    rule, *closed = rule.split(maxsplit=1)
    module = collection(3, dtype)
    ints, b = integers(module), 300 if CUDA else 9
    mine, truth = (module.weight.detach().clone() for _ in range(2))
    my_state, hyper = ledger(rule, mine)
    if closed:
        hyper[4] = 0.0  # from the first step on
    true_state = [t.clone() for t in my_state]
    lr = torch.tensor(0.05, dtype=torch.float64, device=DEVICE)
    for step in range(6 if CUDA else 3):
        if step == 2 and len(my_state) > 4:  # as if a plain step had come between
            for state in (my_state, true_state):
                replay.advance_(lr * 2, tuple(state[-3:]), hyper, rule == "amsgrad")
        options = {"rule": rule, "hyper": hyper}
        extra = (
            {"clip_value": 0.5} if step == 1 else {"loss_scale": torch.tensor(2.0, device=DEVICE)} if step == 2 else {}
        )
        grad = gradient(module, b)
        where: tuple[Tensor, ...] = jagged(module, b) if bags else (batch(module, b),)
        if rule in rules.OWING:
            fused, plain = (
                (gpu_update.bag_catch_up_, update._bag_catch_up)
                if bags
                else (gpu_update.lookup_catch_up_, update._lookup_catch_up)
            )
            fused(*where, mine, my_state, *ints, **options)
            plain(*where, truth, true_state, *ints, **options)
        if bags:
            samples = torch.rand(len(where[0]), dtype=dtype, device=DEVICE)
            gpu_update.bag_update_(grad, *where, samples, mine, lr, my_state, *ints, mean=True, **options, **extra)
            update._bag_update(grad, *where, samples, truth, lr, true_state, *ints, mean=True, **options, **extra)
        else:
            gpu_update.lookup_update_(grad, *where, mine, lr, my_state, *ints, **options, **extra)
            update._lookup_update(grad, *where, truth, lr, true_state, *ints, **options, **extra)
    if rule in rules.OWING:  # the rows whose turn it was differ: bring all of them up to date
        rules.catch_up(None, mine, my_state, hyper)
        rules.catch_up(None, truth, true_state, hyper)
    start = module.weight.detach()
    assert_close(mine - start, truth - start, dtype, "change of weight", slack=20)
    for i, (my, true) in enumerate(zip(my_state, true_state, strict=True)):
        if my.is_floating_point() and my.numel():
            assert_close(my, true, dtype, f"state {i}", slack=20)
        elif rule not in rules.OWING:
            assert torch.equal(my, true)
    assert (places.claims_of(mine, 0) == places.UNCLAIMED).all()


def test_empty_batches() -> None:
    module = collection(4, torch.float32)
    ints, weight = integers(module), module.weight.detach()
    none = torch.empty(0, len(module.specs), dtype=torch.int64, device=DEVICE)
    assert gpu_lookup.lookup(none, weight, *ints).shape == (0, len(module.slots), module.weight.shape[1])
    assert not gpu_lookup.lookup_backward(gradient(module, 0), none, weight, *ints).any()
    offsets = torch.zeros(len(module.specs) * 3 + 1, dtype=torch.int64, device=DEVICE)
    assert not gpu_bag.bag(none.flatten(), offsets, None, weight, *ints, mean=True).any()
    assert not gpu_bag.bag_backward(gradient(module, 3), none.flatten(), offsets, None, weight, *ints, mean=True).any()


def test_invalid_ids_are_counted() -> None:
    module = collection(4, torch.float32)
    ids = batch(module, 20)
    ids[3, 0], ids[4, 1], ids[5, 1] = 1000, -7, 2**40
    count = torch.zeros((), dtype=torch.int64, device=DEVICE)
    gpu_lookup.count_invalid_(ids, None, count, *integers(module))
    assert int(count) == 4  # and the -1 that ``batch`` plants
    count.zero_()
    out = gpu_lookup.lookup_counting(ids, module.weight.detach(), *integers(module), count)
    assert int(count) == 4
    torch.testing.assert_close(out, reference.lookup(ids, module.weight.detach(), *integers(module)))
    values, offsets = jagged(module, 6)
    values[0] = 10**6
    count.zero_()
    gpu_lookup.count_invalid_(values, offsets, count, *integers(module))
    assert int(count) == 1
