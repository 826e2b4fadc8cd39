"""Every fused op against the truth where ids have rows of their own, are mixed over a pool, or share rows."""

import pytest
import torch
import torch.nn.functional as F
from gpu_cases import CUDA, DEVICE, assert_close, copied, gradient, rule_state, scalar
from torch import Tensor

import quorem
from quorem import QR, ChineseRemainder, Custom, HotCold, Pool, Table, partitions, quantize_
from quorem.ops import gradients as truth_gradients
from quorem.ops import lookup as truth
from quorem.ops import replay as truth_replay
from quorem.ops import rules as truth_rules
from quorem.ops.layout import LIMIT, PITCH
from quorem.ops.rows import IdBatch, lookup_reads
from quorem.ops.state import CATCHES_UP

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.ops.gpu import gradients, host, lookup, places, replay, rules, word_bytes

pytestmark = [pytest.mark.kernels(device="gpu"), pytest.mark.usefixtures("nan_filled")]
N = 300
COUNTS = torch.randperm(N, generator=torch.Generator().manual_seed(0))
MAP = Custom((partitions.ExplicitPartition([i % 7 for i in range(N - 90)]),), check=False)


def tables(d: int, **options: object) -> dict[str, list[Table]]:
    """Collections by what is special about them; ``options`` may give frequencies."""
    return {
        "own": [
            Table("sum", N, d, HotCold(5, cold=QR(4, operation="add"), force=True), **options),
            Table("mult", N, d, HotCold(150, cold=QR(4), num_rest=50, force=True), padding_idx=7, **options),
            Table("cat", N, d, HotCold(70, cold=QR(4, operation="concat", permute=3), force=True), **options),
            Table("map", N, d, HotCold(60, cold=MAP, num_rest=30, force=True), **options),
            Table("no cold", N, d, HotCold(40, cold=QR(4), num_rest=N - 40, force=True), **options),
            Table("plain", N, d, ChineseRemainder(3)),
        ],
        "pool": [
            Table("a", N, d, HotCold(9, cold=Pool(70)), **options),
            Table("b", N, d, HotCold(100, cold=Pool(70), num_rest=100), padding_idx=200, **options),
            Table("both", N, d, HotCold(3, cold=Pool(70), force=True), features=("clicked", "seen"), **options),
            Table("no hot", N, d, HotCold(0, cold=Pool(300, 3, name="other"), force=True)),
        ],
        "shared": [
            Table("one", N, d, QR(4), features=("x", "y"), padding_idx=3),
            Table("two", N, d, QR(100, operation="concat"), features=("z", "t", "u")),
            Table("alone", N, d, QR(4)),
        ],
    }


def collection(kind: str, d: int = 4, dtype: torch.dtype = torch.float32) -> quorem.EmbeddingCollection:
    torch.manual_seed(0)
    name, *ranked = kind.split()
    options = {"frequencies": COUNTS} if ranked else {}
    module = quorem.EmbeddingCollection(tables(d, **options)[name], device=DEVICE, dtype=dtype)
    torch.nn.init.uniform_(module.stored, -0.5, 0.5)
    return module


def limits(module: quorem.EmbeddingCollection) -> list[int]:
    return module.layout.slots[module.layout.spans[:, 0], LIMIT].tolist()


def batch(module: quorem.EmbeddingCollection, b: int) -> Tensor:
    ids = torch.stack([torch.randint(n, (b,)) for n in limits(module)], 1)
    ids[: b // 3] = ids[0]  # hot rows
    ids[-1] = N - 1
    ids[-2, 0], ids[-2, -1] = -1, N
    return ids.to(DEVICE)


def jagged(module: quorem.EmbeddingCollection, b: int, weighted: bool = False, mean: bool = False) -> IdBatch:
    counts = torch.randint(0, 5, (len(limits(module)), b))
    ids = [torch.randint(n, (int(c),)) for n, c in zip(limits(module), counts.sum(1), strict=True)]
    values, offsets = torch.cat(ids).to(DEVICE), F.pad(counts.flatten().cumsum(0), (1, 0)).to(DEVICE)
    weights = torch.rand(len(values), dtype=module.stored.dtype, device=DEVICE) if weighted else None
    return IdBatch(values, offsets, weights, mean)


KINDS = ["own", "own ranked", "pool", "pool ranked", "shared"]
FEW = ["pool ranked", "shared"]  # for the slow interpreter
STEPS = [
    ("own ranked", "adagrad", "lookup"),
    ("pool", "adagrad", "lookup"),
    ("pool ranked", "rowwise_adagrad", "bag"),
    ("pool", "amsgrad", "lookup"),
    ("shared", "sgd", "lookup"),
    ("shared", "adam", "bag"),
]
if CUDA:
    RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam", "amsgrad")
    STEPS = [(kind, rule, name) for kind in KINDS for rule in RULES for name in ("lookup", "bag")]
    # Fused row-wise Adagrad is for rows of one piece; tables of the other kinds have rows of several.
    STEPS = [step for step in STEPS if step[1] != "rowwise_adagrad" or step[0].startswith("pool")]


@pytest.mark.parametrize("kind", KINDS)
def test_lookup_and_bag(kind: str) -> None:
    module, id_dtype = collection(kind), torch.int32 if "pool" in kind else torch.int64
    stored, layout = module.stored.detach(), module.layout
    ids, bags = batch(module, 70).to(id_dtype), jagged(module, 9, weighted=True, mean=True)
    counts = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(2)]
    out = lookup.lookup(IdBatch(ids), stored, layout, counts[0])
    assert_close(out, truth.lookup(IdBatch(ids), stored, layout, counts[1]), torch.float32, "out")
    assert int(counts[0]) == int(counts[1]) == 2
    assert torch.equal(lookup.lookup(IdBatch(ids), stored, layout), out)
    pooled = lookup.lookup(bags._replace(ids=bags.ids.to(id_dtype)), stored, layout)
    assert_close(pooled, truth.lookup(bags, stored, layout), torch.float32, "bags", slack=4)


@pytest.mark.parametrize(("num_hot", "num_rest", "levels"), [(2000, 0, 1), (2000, 90, 1), (300, 0, 2), (5, 5990, 3)])
def test_ids_are_found_in_the_words_of_a_list(num_hot: int, num_rest: int, levels: int) -> None:
    """In runs of ids that are all hot, in runs without any, and in lists of few ids, whose words have more levels."""
    counts = torch.rand(6000, generator=torch.Generator().manual_seed(1)) + 1
    counts[1000:2500] += 1  # hot, where there are as many
    counts[3000:4000] -= 1  # never hot
    scheme = HotCold(num_hot, cold=QR(4), num_rest=num_rest)
    module = quorem.EmbeddingCollection([Table("t", 6000, 4, scheme, frequencies=counts)], device=DEVICE)
    layout, stored = module.layout, module.stored.detach()
    assert host.host_layout(layout).levels == levels
    assert word_bytes(layout) <= layout.ranks.nbytes or levels > 2
    assert levels > 1 or word_bytes(layout) == 8 * (1 + (num_rest > 0)) * (6000 // 32 + 2)
    for dtype in (torch.int64, torch.int32):
        ids = torch.arange(6000, dtype=dtype, device=DEVICE)[:, None]
        assert torch.equal(lookup.lookup(IdBatch(ids), stored, layout), truth.lookup(IdBatch(ids), stored, layout))


@pytest.mark.parametrize("kind", KINDS if CUDA else FEW)
def test_gradients(kind: str) -> None:
    """In a batch of more ids than some tables have rows, and of fewer."""
    module = collection(kind, dtype=torch.float64)
    stored, layout = module.stored.detach(), module.layout
    for b in (4, 40 if CUDA else 9):
        ids, grad = batch(module, b), gradient(module, b)
        dense = gradients.backward(grad, IdBatch(ids), stored, layout)
        expected = truth_gradients.backward(grad, IdBatch(ids), stored, layout)
        assert_close(dense, expected, torch.float64, f"lookup of {b}", slack=4)
        inputs = (grad, jagged(module, b, weighted=True, mean=True), stored, layout)
        dense, expected = gradients.backward(*inputs), truth_gradients.backward(*inputs)
        assert_close(dense, expected, torch.float64, f"bags of {b}", slack=4)
        own, expected = gradients.sample_weights_backward(*inputs), truth_gradients.sample_weights_backward(*inputs)
        assert_close(own, expected, torch.float64, "weights", 4)
    assert (places.claims_of(stored, 0).place == places.UNCLAIMED).all()


@pytest.mark.parametrize(("kind", "rule", "name"), STEPS)
def test_steps(kind: str, rule: str, name: str) -> None:
    module = collection(kind, dtype=torch.float64)
    layout, start = module.layout, module.stored.detach()
    assert rule != "rowwise_adagrad" or (layout.parts[..., PITCH] <= 1).all()
    fused, plain = start.clone(), start.clone()
    fused_state, constants = rule_state(rule, fused)
    plain_state, lr, options = copied(fused_state), scalar(0.05), {"rule": rule, "constants": constants}
    for step, b in enumerate((40, 5, 7) if CUDA else (12, 4)):
        ids, grad = jagged(module, b) if name == "bag" else IdBatch(batch(module, b)), gradient(module, b)
        if rule in CATCHES_UP:
            replay.catch_up_(ids, fused, fused_state, layout, **options)
            truth_replay.catch_up_(ids, plain, plain_state, layout, **options)
        pitched = bool((layout.parts[..., PITCH] > 1).any())
        extra = {"clip_value": 1.0} if step else {}
        if step and not pitched:
            extra["loss_scale"] = torch.tensor(2.0, device=DEVICE)
        rules.update_(grad, ids, fused, lr, fused_state, layout, **options, **extra)
        truth_rules.update_(grad, ids, plain, lr, plain_state, layout, **options, **extra)
    if rule in CATCHES_UP:
        truth_replay.rows_catch_up_(None, fused, fused_state, **options)
        truth_replay.rows_catch_up_(None, plain, plain_state, **options)
    assert_close(fused - start, plain - start, torch.float64, "change of stored", slack=20)
    assert_close(fused_state[0].double(), plain_state[0].double(), torch.float64, "state", slack=20)
    assert (places.claims_of(fused, 0).place == places.UNCLAIMED).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("kind", "d", "dtype"),
    [
        ("own", 6, torch.float32),
        ("pool ranked", 1, torch.float64),
        ("pool", 7, torch.bfloat16),
        ("shared", 144, torch.float32),
    ],
)
def test_rows_of_fewer_bits(kind: str, d: int, bits: int, dtype: torch.dtype) -> None:
    module = quantize_(collection(kind, d), bits)
    stored, layout, width = module.stored.detach(), module.layout, module.width
    ids, bags = batch(module, 20), jagged(module, 5, mean=True)
    options = {"width": width, "bits": bits, "dtype": dtype}
    count = torch.zeros((), dtype=torch.int64, device=DEVICE)
    out = lookup.lookup(IdBatch(ids), stored, layout, count, **options)
    assert int(count) == 2 and torch.equal(lookup.lookup(IdBatch(ids), stored, layout, **options), out)
    expected = truth.compose(lookup_reads(ids, layout), stored, width=width, bits=bits)
    assert out.dtype == dtype
    assert_close(out, expected, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32, "lookup")
    pooled = lookup.lookup(bags, stored, layout, **options)
    expected = truth.lookup(bags, stored, layout, **options | {"dtype": torch.float32})
    assert_close(pooled, expected, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32, "bag", slack=4)
