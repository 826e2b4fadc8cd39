"""What the tests of the GPU kernels share: where they run, how near to the truth they come, tables of every kind.

On a GPU where there is one, in Triton's interpreter elsewhere: ``TRITON_INTERPRET`` is set by conftest before Triton is
imported. The interpreter is slow, so it sees smaller batches.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import quorem
from quorem import partitions
from quorem.ops import replay, state
from quorem.ops.rows import IdBatch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ULPS = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def assert_close(actual: Tensor, truth: Tensor, dtype: torch.dtype, name: str, slack: float = 1) -> None:
    """Relative to the norm: a sum's rounding is relative to its terms, not to itself."""
    assert actual.shape == truth.shape and actual.isfinite().all(), name
    error = (actual.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30)
    assert error <= slack * ULPS[dtype], f"{name}: {error:.2e}"


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


def collection(d: int, dtype: torch.dtype = torch.float32, names: str = "") -> quorem.EmbeddingCollection:
    """A collection of every kind of table, or of those named."""
    torch.manual_seed(d)
    tables = [table for table in every_kind(d) if not names or table.name in names.split()]
    module = quorem.EmbeddingCollection(tables, device=DEVICE, dtype=dtype)
    torch.nn.init.uniform_(module.stored, -(1000**-0.5), 1000**-0.5)
    return module


def batch(module: quorem.EmbeddingCollection, b: int) -> Tensor:
    ids = torch.stack([torch.randint(s.num_embeddings, (b,)) for s in module.specs], 1)
    ids[: b // 2] = ids[0]  # hot rows
    ids[-1, -1] = -1  # gives zeros and no gradient, as padding does
    return ids.to(DEVICE)


def jagged(module: quorem.EmbeddingCollection, b: int, weighted: bool = False, mean: bool = False) -> IdBatch:
    lengths = torch.randint(0, 4, (len(module.specs), b))
    ids = [torch.randint(s.num_embeddings, (int(n),)) for s, n in zip(module.specs, lengths.sum(1), strict=True)]
    values, offsets = torch.cat(ids).to(DEVICE), F.pad(lengths.flatten().cumsum(0), (1, 0)).to(DEVICE)
    weights = torch.rand(len(values), dtype=module.stored.dtype, device=DEVICE) if weighted else None
    return IdBatch(values, offsets, weights, mean)


def gradient(module: quorem.EmbeddingCollection, b: int) -> Tensor:
    return torch.randn(b, len(module.layout.slots), module.stored.shape[1], device=DEVICE).to(module.stored.dtype)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=DEVICE)


def rule_state(rule: str, stored: Tensor) -> tuple[state.State, state.Constants]:
    """State and constants of a rule before its first step."""
    step = torch.zeros((), dtype=torch.int64, device=DEVICE)
    if rule == "sgd":
        return state.SGDState(step), state.SGDConstants()
    if rule == "adagrad":
        return state.AdagradState(torch.rand_like(stored) * 0.1, step), state.AdagradConstants(0.01, 1e-10)
    if rule == "rowwise_adagrad":
        total, extents = torch.rand(len(stored), device=DEVICE).to(stored.dtype), torch.tensor([[0, 1]], device=DEVICE)
        return state.RowWiseAdagradState(total, step, extents), state.AdagradConstants(0.0, 1e-10)
    amsgrad = rule == "amsgrad"
    constants = replay.adam_constants(0.9, 0.999, 1e-8, stored.dtype, amsgrad)
    zeros = [torch.zeros_like(stored) for _ in range(2 + amsgrad)]
    last = torch.zeros(len(stored), dtype=torch.int32, device=DEVICE)
    history = replay.empty_history(stored.device, constants, stored.dtype)
    return state.AdamState(*zeros[:2], last, step, *history, *zeros[2:]), constants


def copied(states: state.State) -> state.State:
    return type(states)(*(tensor if tensor is None else tensor.clone() for tensor in states))
