"""What the conformance tests share: every scheme on a small table, and the paper's equations one id at a time."""

import copy
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import quorem
from quorem.modules.lookup import Tables
from quorem.paper.partitions import ExplicitPartition, Partition
from quorem.paper.schemes import Scheme

N, D = 60, 12  # ids and width of every case: 12 splits evenly over 1 to 4 tables
OPERATIONS = ("concat", "add", "mult", "feature")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}  # values of order 1

GROUPS = ExplicitPartition([i * i % 7 for i in range(N)])  # 4 of its 5 buckets used
DIGITS = (Partition(1, 8), Partition(8, 8))


def all_schemes() -> Iterator[tuple[str, Scheme]]:
    """Every scheme with every operation, under a name."""
    yield "full", quorem.Full()
    yield "hash", quorem.Hash(4)
    for op in OPERATIONS:
        yield f"qr-{op}", quorem.QR(4, operation=op)
        yield f"qr-quotient-{op}", quorem.QR(7, operation=op, large="quotient")
        for k in (1, 2, 3, 4):
            yield f"generalized{k}-{op}", quorem.GeneralizedQR(k, operation=op)
        for k in (2, 3):
            yield f"chinese{k}-{op}", quorem.ChineseRemainder(k, operation=op)
        yield f"generalized-rows-{op}", quorem.GeneralizedQR(3, operation=op, num_rows=25)
        yield f"chinese-rows-{op}", quorem.ChineseRemainder(2, operation=op, num_rows=27)
        yield f"mixed-{op}", quorem.Custom((*DIGITS, GROUPS), operation=op)
    yield "explicit", quorem.Custom((GROUPS,), check=False)
    yield "qr-dims", quorem.QR(4, operation="concat", dims=(8, 4))
    yield "generalized-dims", quorem.GeneralizedQR(3, operation="concat", dims=(2, 3, 7))
    yield "path-linear", quorem.Path(4, hidden=())
    yield "path-mlp", quorem.Path(4, hidden=(5,))
    yield "path-deep", quorem.Path(4, hidden=(30, 7))
    yield "path-levels", quorem.Path(10, hidden=(4,), num_partitions=3)
    yield "path-sigmoid", quorem.Path(4, hidden=(6,), activation="sigmoid")


CASES = {name: replace(scheme, force=True) for name, scheme in all_schemes()}
# One of each kind, for what does not depend on the scheme.
FEW = ("full", "qr-mult", "generalized3-concat", "chinese2-add", "qr-feature", "mixed-mult", "path-mlp")


def fill_(module: Tables, seed: int = 0) -> Tables:
    """Give every parameter random values, so that vectors and gradients are of order one."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_matrix = parameter.dim() == 3 or name.startswith("projections")
            shrink = math.sqrt(max(parameter.shape[-2:])) if is_matrix else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / shrink)
    return module


def twin_of(module: Tables) -> Tables:
    """A float64 copy with the same values and no gradients: what the oracles are computed from."""
    twin = copy.deepcopy(module).double()
    twin.zero_grad()
    return twin


def dense_by_hand(module: Tables, feature: int = 0) -> Tensor:
    """``to_dense`` from the equations of sections 2 to 4, one id at a time in Python. Differentiable."""
    spec, tables = module.specs[feature], module.tables(feature)
    vectors = []
    for i in range(spec.num_embeddings):
        if i == module.padding[feature]:
            vectors.append(torch.zeros_like(vectors_of(spec.operation, [t[0] for t in tables])))
            continue
        parts = spec.partitions
        buckets = [int(p.index[i]) if isinstance(p, ExplicitPartition) else i // p.stride % p.size for p in parts]
        x = vectors_of(spec.operation, [table[b] for table, b in zip(tables, buckets, strict=False)])
        if spec.hidden is not None:
            x = path_by_hand(module, feature, x, buckets[1:])
        vectors.append(x)
    dense = torch.stack(vectors)
    return dense @ module.projections[module.narrow.index(feature)] if feature in module.narrow else dense


def vectors_of(operation: str, rows: Sequence[Tensor]) -> Tensor:
    if operation == "concat":
        return torch.cat(list(rows))
    if operation == "feature":
        return torch.stack(list(rows))
    total = rows[0]
    for row in rows[1:]:
        total = total + row if operation == "add" else total * row
    return total


def path_by_hand(module: Tables, feature: int, x: Tensor, networks: Sequence[int]) -> Tensor:
    """The composition of section 4.1: at each level the network that the id's bucket names."""
    (group,) = (g for g in module.paths if feature in g.members)
    layers = len(module.specs[feature].hidden) + 1
    for level, network in enumerate(networks):
        before = group.members[: group.members.index(feature)]
        network += sum(module.specs[f].path_sizes[level] for f in before)
        for layer in range(layers):
            i = level * layers + layer
            x = x @ group.weights[i][network] + group.biases[i][network]
            if layer < layers - 1:
                x = x.clamp(min=0) if group.activation == "relu" else 1 / (1 + torch.exp(-x))
    return x


def bags_by_torch(dense: Tensor, ids: Tensor, offsets: Tensor, mode: str, weights: Tensor | None, pad: int | None):
    """``F.embedding_bag`` over the dense table; offsets include the last. ``[B, D]`` or ``[B, K, D]``."""
    flat = dense.flatten(1)
    options = {"offsets": offsets, "include_last_offset": True, "padding_idx": pad}
    if weights is None or mode != "mean":
        pooled = F.embedding_bag(ids, flat, mode=mode, per_sample_weights=weights, **options)
    else:  # torch refuses weights for the mean: a weighted sum, divided by the number of ids that count
        total = F.embedding_bag(ids, flat, mode="sum", per_sample_weights=weights, **options)
        count = F.embedding_bag(ids, torch.ones_like(flat[:, :1]), mode="sum", **options)
        pooled = total / count.clamp(min=1)
    return pooled.unflatten(1, dense.shape[1:])


def reloaded(value: Any, **options: bool) -> Any:
    """What ``torch.load`` reads from what ``torch.save`` wrote."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32, name: str = "") -> None:
    tolerance = TOLERANCE[dtype]
    near = {"rtol": tolerance, "atol": tolerance, "msg": lambda m: f"{name}: {m}"}
    torch.testing.assert_close(actual.double(), expected.double(), **near)


def assert_same_gradients(module: Tables, twin: Tables) -> None:
    """The gradient of each table and each network weight, by name."""
    dtype = module.stored.dtype
    grad = module.stored.grad
    expected = dict(twin.named_tables(torch.zeros_like(twin.stored) if twin.stored.grad is None else twin.stored.grad))
    for name, actual in module.named_tables(grad.to_dense() if grad.is_sparse else grad):
        assert_near(actual, expected[name], dtype, name)
    wanted = dict(twin.named_parameters())
    for name, parameter in module.named_parameters():
        if name != "stored":
            assert_near(parameter.grad, wanted[name].grad, dtype, name)


def assert_same_backward(module: Tables, twin: Tables, out: Tensor, expected: Tensor) -> None:
    """Values of the module and of the oracle over its twin, and the gradients of both by one random gradient."""
    assert out.shape == expected.shape and out.dtype == module.stored.dtype
    assert_near(out, expected, out.dtype, "value")
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    out.backward(grad)
    expected.backward(grad.double())
    assert_same_gradients(module, twin)


def pairwise_coprime(sizes: Sequence[int]) -> bool:
    """Whether no two of ``sizes`` share a factor."""
    return all(math.gcd(a, b) == 1 for a, b in itertools.combinations(sizes, 2))


def definition_1(parts: Sequence[Partition | ExplicitPartition], n: int) -> bool:
    """For all a != b there is an i such that [a]_{P_i} != [b]_{P_i}."""
    classes = [part(torch.arange(n)).tolist() for part in parts]
    return all(any(p[a] != p[b] for p in classes) for a, b in itertools.combinations(range(n), 2))
