"""Lookups in drawn modules: each gives what torch gives on the whole table, and an id that is not there raises.

``python tests/hunt/lookups.py --lookups 1000000`` prints its figures as JSON; the tests run it on a few. A module is
drawn (kind, scheme, size, dtype, padding, frequencies), then batches of ids: their shape and dtype, bags of any
lengths, weights. Each id of a batch is a lookup. The oracle is ``F.embedding`` or ``F.embedding_bag`` on
``to_dense()``. Once for each module gradients are compared with autograd's through ``to_dense()``, and an id that the
table does not have is looked up.
"""

import argparse
import json
import random
import sys
import time
import warnings
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quorem import (
    QR,
    ChineseRemainder,
    Embedding,
    EmbeddingBag,
    EmbeddingCollection,
    Full,
    GeneralizedQR,
    Hash,
    HotCold,
    Path,
    Pool,
    Table,
)

BATCHES_A_MODULE = 10
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


def drawn_scheme(rng: random.Random, n: int, cold: bool = True) -> Any:
    """Any scheme, stored so even where it does not shrink the table."""
    operation = rng.choice(["mult", "add", "concat"])
    name = rng.choice(["full", "hash", "qr", "generalized", "chinese", "path", *(["hot", "pool"] if cold else [])])
    collisions = rng.randint(2, 9)
    if name == "full":
        return Full()
    if name == "hash":
        return Hash(collisions, force=True)
    if name == "generalized":
        return GeneralizedQR(rng.choice([2, 3]), operation=rng.choice(["mult", "add"]), force=True)
    if name == "chinese":
        return ChineseRemainder(rng.choice([2, 3]), operation=rng.choice(["mult", "add"]), force=True)
    if name == "path":
        return Path(collisions, (rng.randint(2, 6),), force=True)
    if name == "hot":
        hot = rng.randint(1, n // 3)
        return HotCold(hot, cold=QR(collisions, operation="add", force=True), num_rest=rng.randint(0, n // 3))
    if name == "pool":
        rows = rng.randint(100, 120)  # enough for the ids of all tables
        return HotCold(rng.randint(1, n // 3), cold=Pool(rows, name=f"of{rows}"), num_rest=rng.randint(0, n // 3))
    permute = rng.choice([None, rng.randrange(100)])
    return QR(collisions, operation=operation, force=True, **({} if permute is None else {"permute": permute}))


def drawn_table(rng: random.Random, name: str, width: int) -> Table:
    """A table of 30 to 400 ids."""
    n = rng.randint(30, 400)
    scheme = drawn_scheme(rng, n)
    counts = None
    if isinstance(scheme, HotCold) and rng.random() < 0.5:
        counts = torch.randint(0, 1000, (n,), generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    padding = rng.randrange(n) if rng.random() < 0.3 else None
    features = (name, f"{name}2") if rng.random() < 0.2 else ()
    return Table(name, n, width, scheme, padding_idx=padding, frequencies=counts, features=features)


def drawn_module(rng: random.Random) -> Any:
    """An ``Embedding``, ``EmbeddingBag`` or ``EmbeddingCollection`` whose rows all differ."""
    dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
    width, kind = 4 * rng.randint(1, 6), rng.choice(["embedding", "bag", "collection"])
    if kind == "collection":
        tables = [drawn_table(rng, f"t{k}", width) for k in range(rng.randint(1, 6))]
        module: Any = EmbeddingCollection(tables, mode=rng.choice(["sum", "mean"]), dtype=dtype)
    else:
        table = drawn_table(rng, "t", width)
        options = {"padding_idx": table.padding_idx, "frequencies": table.frequencies, "dtype": dtype}
        make, more = (Embedding, {}) if kind == "embedding" else (EmbeddingBag, {})
        if kind == "bag":
            more = {"mode": rng.choice(["sum", "mean", "max"]), "include_last_offset": rng.random() < 0.5}
        module = make(table.num_embeddings, width, table.scheme, **options, **more)
    draw = torch.Generator().manual_seed(rng.randrange(2**31))
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.5 + torch.rand(p.shape, generator=draw))
    return module


def drawn_ids(rng: random.Random, count: int, limit: int) -> Tensor:
    """Ids of one table: any, or a few again and again."""
    draw = torch.Generator().manual_seed(rng.randrange(2**31))
    ids = torch.randint(0, limit, (count,), generator=draw)
    few = rng.choice([1, 3, limit])
    return (ids - ids % few).clamp(min=0).to(rng.choice([torch.int32, torch.int64]))


def drawn_offsets(rng: random.Random, count: int, bags: int) -> Tensor:
    """Where bags of any length begin; the first of them at 0."""
    draw = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.cat(
        [torch.zeros(1, dtype=torch.int64), torch.randint(0, count + 1, (bags - 1,), generator=draw).sort()[0]]
    )


def sizes_of(module: Any) -> list[int]:
    return [module.specs[t].num_embeddings for t in module.table_of]


def pooled(
    dense: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, mode: str, padding: int | None
) -> Tensor:
    """The oracle of bags, in float64. torch knows weights for sums only: a weighted mean is a sum over the count."""
    options = {"padding_idx": padding, "include_last_offset": True}
    if weights is None:
        return F.embedding_bag(ids, dense, offsets, mode=mode, **options)
    total = F.embedding_bag(ids, dense, offsets, mode="sum", per_sample_weights=weights, **options)
    if mode == "mean":
        ones = torch.ones(len(dense), 1, dtype=dense.dtype)
        total = total / F.embedding_bag(ids, ones, offsets, mode="sum", **options).clamp(min=1)
    return total


class Lookup:
    """One drawn lookup: what the module is called with, and what torch gives on the whole tables."""

    def __init__(self, module: Any, dense: list[Tensor], rng: random.Random) -> None:
        self.arguments: tuple[Tensor | None, ...]
        if isinstance(module, EmbeddingCollection):
            self._collection(module, dense, rng)
        elif isinstance(module, EmbeddingBag):
            self._bags(module, dense[0], rng)
        else:
            shape = rng.choice([(rng.randint(0, 300),), (rng.randint(1, 17), rng.randint(1, 17)), ()])
            ids = drawn_ids(rng, torch.Size(shape).numel(), len(dense[0])).view(shape)
            ids = ids.T if rng.random() < 0.2 else ids
            self.arguments, self.expected = (ids,), F.embedding(ids.long(), dense[0])
        self.num_ids = self.arguments[0].numel()

    def _weights(self, rng: random.Random, count: int, dtype: torch.dtype) -> Tensor | None:
        draw = torch.Generator().manual_seed(rng.randrange(2**31))
        return None if rng.random() < 0.5 else (2 * torch.rand(count, generator=draw) - 1).to(dtype)

    def _bags(self, module: EmbeddingBag, dense: Tensor, rng: random.Random) -> None:
        count, bags = rng.randint(0, 300), rng.randint(1, 60)
        ids, starts = drawn_ids(rng, count, len(dense)), drawn_offsets(rng, count, bags)
        weights = None if module.mode == "max" else self._weights(rng, count, module.dtype)
        ends = torch.cat([starts, torch.tensor([count])])
        exact = None if weights is None else weights.double()
        self.expected = pooled(dense, ids.long(), ends, exact, module.mode, module.padding_idx)
        self.arguments = (ids, ends if module.include_last_offset else starts, weights)

    def _collection(self, module: EmbeddingCollection, dense: list[Tensor], rng: random.Random) -> None:
        sizes, batch = sizes_of(module), rng.randint(1, 60)
        if rng.random() < 0.5:
            columns = [drawn_ids(rng, batch, n).long() for n in sizes]
            self.arguments = (torch.stack(columns, 1),)
            vectors = [F.embedding(ids, dense[t]) for ids, t in zip(columns, module.table_of, strict=True)]
        else:
            counts = [rng.randint(0, 100) for _ in sizes]
            values = [drawn_ids(rng, c, n).long() for c, n in zip(counts, sizes, strict=True)]
            offsets = [drawn_offsets(rng, c, batch) for c in counts]
            weights = self._weights(rng, sum(counts), module.dtype)
            parts = [None] * len(sizes) if weights is None else weights.double().split(counts)
            vectors = []
            for ids, starts, part, t in zip(values, offsets, parts, module.table_of, strict=True):
                ends = torch.cat([starts, torch.tensor([len(ids)])])
                vectors.append(pooled(dense[t], ids, ends, part, module.mode, module.padding[t]))
            bases = torch.tensor([0, *counts]).cumsum(0)
            joined = [starts + base for starts, base in zip(offsets, bases, strict=False)]
            self.arguments = (torch.cat(values), torch.cat([*joined, bases[-1:]]), weights)
        self.expected = torch.stack(vectors, 1)


def check(module: Any, rng: random.Random, tally: Counter[str]) -> str | None:
    """Some batches in one module: None, or what was wrong."""
    with torch.no_grad():
        dense = [module.dense(t).double() for t in range(len(module.specs))]
    for number in range(BATCHES_A_MODULE):
        lookup = Lookup(module, dense, rng)
        tally["batches"] += 1
        tally["ids"] += lookup.num_ids
        with torch.no_grad():
            wrong = _difference(module(*lookup.arguments), lookup.expected, TOLERANCE[module.dtype])
        if wrong is not None:
            return f"{module} batch {number}: {wrong}"
    for what, kind in ((_gradients, "gradients"), (_refusal, "refused")):
        tally[kind] += 1
        wrong = what(module, rng)
        if wrong is not None:
            return f"{module} {kind}: {wrong}"
    return None


def _difference(actual: Tensor, expected: Tensor, tolerance: float) -> str | None:
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    if not actual.numel():
        return None
    scale = max(1.0, float(expected.abs().max()))
    error = float((actual.double() - expected).abs().max()) / scale
    return None if error <= tolerance else f"{error:.2e} off"


def _gradients(module: Any, rng: random.Random) -> str | None:
    """Of a random product with the vectors, on the stored rows and networks, against autograd through ``to_dense``."""
    dense = [module.dense(t) for t in range(len(module.specs))]
    lookup = Lookup(module, [table.double() for table in dense], rng)
    upstream = torch.rand(lookup.expected.shape, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    parameters = list(module.parameters())
    options = {"allow_unused": True, "materialize_grads": True}
    if not lookup.expected.requires_grad or not lookup.expected.numel():
        return None
    expected = torch.autograd.grad((lookup.expected * upstream).sum(), parameters, **options)
    out = module(*lookup.arguments)
    actual = torch.autograd.grad((out * upstream.to(out.dtype)).sum(), parameters, **options)
    for a, e in zip(actual, expected, strict=True):
        wrong = _difference(a, e.double(), 20 * TOLERANCE[module.dtype])
        if wrong is not None:
            return f"gradient {tuple(a.shape)} {wrong}"
    return None


def _refusal(module: Any, rng: random.Random) -> str | None:
    """An id that the table does not have, among others that it has."""
    limit = sizes_of(module)[0]
    stranger = rng.choice([-1, limit, 2**31 - 1, -(2**31), limit + rng.randrange(1000)])
    ids = torch.zeros(3, len(module.features), dtype=torch.int64)
    ids[rng.randrange(3), 0] = stranger
    if isinstance(module, EmbeddingBag) and stranger == module.padding_idx:
        return None
    try:
        module(ids if not isinstance(module, Embedding) else ids[:, :1])
    except IndexError as error:
        return None if str(stranger) in str(error) else f"{error} does not name {stranger}"
    return f"id {stranger} was looked up"


def hunt(lookups: int, seed: int = 0) -> dict[str, Any]:
    """So many lookups, some thousands in each drawn module."""
    rng, began = random.Random(seed), time.monotonic()
    tally: Counter[str] = Counter()
    schemes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    bad = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while tally["ids"] < lookups:
            module, before = drawn_module(rng), tally["ids"]
            wrong = check(module, rng, tally)
            if wrong is not None:
                bad.append(wrong[:600])
            tally["modules"] += 1
            kinds[f"{type(module).__name__} {str(module.dtype).removeprefix('torch.')}"] += tally["ids"] - before
            schemes.update({type(spec.scheme).__name__ for spec in module.specs})
    return {
        "lookups": tally.pop("ids"),
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        **dict(sorted(tally.items())),
        "lookups_by_kind": dict(sorted(kinds.items())),
        "modules_by_scheme": dict(sorted(schemes.items())),
        "bad": bad,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lookups", type=int, default=10**6, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tally = hunt(options.lookups, options.seed)
    print(json.dumps(tally, indent=1))
    sys.exit(bool(tally["bad"]))


if __name__ == "__main__":
    main()
