"""How the tables' starting values change what a small DLRM learns, on real rows (docs/appendix/start_study.md).

    python benchmarks/start_study.py --data PATH/train.txt.gz --out benchmarks/results/start_study.json
    python benchmarks/start_study.py --out benchmarks/results/start_study.json --table

The data are rows in the layout of the Criteo Kaggle ``train.txt``, in time order: label, 13 integers, 26 categories.
Finished runs are kept in the JSON and skipped, so the command can be stopped and started again.
"""

import argparse
import json
import platform
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quorem
from quorem import init, partitions
from quorem.files import write
from quorem.provenance import commit
from quorem.schemes import Scheme
from quorem.sizes import ceil_div

NULL = -1  # stands for a missing category: a token like any other
COLLISIONS = (4, 16, 60)
NOISES = (0.0, 0.001, 0.01, 0.1)
CLOSE = (("add", 4), ("add", 60), ("mult", 60))  # where five seeds do not tell matched from symmetric


@dataclass(frozen=True)
class Config:
    """What all runs share."""

    train_rows: int = 64_000
    val_rows: int = 8_000
    test_rows: int = 8_000
    batch: int = 128
    lr: float = 0.01
    dim: int = 16
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 256)


@dataclass(frozen=True)
class Setting:
    """One way of storing and starting the tables; ``scheme`` is a key of ``SCHEMES``."""

    scheme: str
    collisions: int
    start: str
    noise: float | None = None

    @property
    def key(self) -> str:
        noise = "" if self.noise is None else f" noise={self.noise:g}"
        return f"{self.scheme} {self.collisions}x {self.start}{noise}"


def generalized(operation: str, k: int) -> Callable[[int, int], Scheme]:
    """Equal tables with as many rows in all as QR's large table; the fewest that cover the ids where that is more."""
    return lambda n, c: quorem.GeneralizedQR(
        k, operation=operation, num_rows=max(ceil_div(n, c), sum(partitions.balanced_sizes(n, k)))
    )


SCHEMES: dict[str, Callable[[int, int], Scheme]] = {  # (n, collisions) -> scheme
    "full": lambda n, c: quorem.Full(),
    "hash": lambda n, c: quorem.Hash(c),
    "mult": lambda n, c: quorem.QR(c, operation="mult"),
    "add": lambda n, c: quorem.QR(c, operation="add"),
    "mult, large quotient": lambda n, c: quorem.QR(c, operation="mult", large="quotient"),
    "add, large quotient": lambda n, c: quorem.QR(c, operation="add", large="quotient"),
    "mult, 2 equal tables": generalized("mult", 2),
    "mult, 3 equal tables": generalized("mult", 3),
    "add, 3 equal tables": generalized("add", 3),
    "path, linear": lambda n, c: quorem.Path(c, hidden=()),
    "path, h=16": lambda n, c: quorem.Path(c, hidden=(16,)),
    "path, h=64": lambda n, c: quorem.Path(c, hidden=(64,)),
}


def settings() -> Iterator[tuple[Setting, int]]:
    """Every setting of the study and its number of seeds, the most telling first."""
    yield Setting("full", 1, "matched"), 5
    for c in COLLISIONS:
        yield Setting("hash", c, "matched"), 5
        for operation in ("mult", "add"):
            yield Setting(operation, c, "matched", init.NOISE), 5
            yield Setting(operation, c, "symmetric"), 5
            yield Setting(operation, c, "reference"), 5
            yield Setting(f"{operation}, large quotient", c, "matched", init.NOISE), 5
    for hidden in ("linear", "h=16", "h=64"):
        for start in ("identity", "nn.Linear"):
            yield Setting(f"path, {hidden}", 4, start), 5
    for scheme in ("mult, 2 equal tables", "mult, 3 equal tables", "add, 3 equal tables"):
        yield Setting(scheme, 16, "matched", init.NOISE), 3
        yield Setting(scheme, 16, "symmetric"), 3
    for c in COLLISIONS:
        for operation in ("mult", "add"):
            for noise in NOISES:
                yield Setting(operation, c, "matched", noise), 3
    yield Setting("full", 1, "matched"), 15
    for operation, c in CLOSE:
        yield Setting(operation, c, "matched", init.NOISE), 15
        yield Setting(operation, c, "symmetric"), 15


class CompactDLRM(nn.Module):
    """A bottom network over the dense features, dot products of all pairs of vectors, a top network."""

    def __init__(self, tables: quorem.EmbeddingCollection, num_dense: int, config: Config) -> None:
        super().__init__()
        self.tables = tables
        vectors = len(tables.embedding_dims) + 1
        self.bottom = mlp(num_dense, *config.bottom, config.dim)
        self.top = mlp(config.dim + vectors * (vectors - 1) // 2, *config.top, 1)[:-1]  # the last activation left out
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.cat([x[:, None], self.tables(ids)], 1)
        dots = (vectors @ vectors.mT)[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, dots], 1))[:, 0]


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers, each with a ReLU, started as the public DLRM starts them."""
    layers: list[nn.Module] = []
    for d_in, d_out in pairwise(widths):
        linear = nn.Linear(d_in, d_out)
        nn.init.normal_(linear.weight, std=(2 / (d_in + d_out)) ** 0.5)
        nn.init.normal_(linear.bias, std=(1 / d_out) ** 0.5)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers)


def read(path: Path, rows: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Labels ``[N]``, dense features ``[N, 13]``, ids ``[N, 26]`` and the number of ids of each feature.

    A dense feature is ``log(x + 1)``, missing and negative ones 0. Ids are given in order of first appearance.
    """
    names = ["label", *(f"i{j}" for j in range(13)), *(f"c{j}" for j in range(26))]
    types = {name: pl.String if name[0] == "c" else pl.Int64 for name in names}
    frame = pl.read_csv(path, separator="\t", has_header=False, schema=types, n_rows=rows)
    if len(frame) < rows:
        raise ValueError(f"{path} has {len(frame)} rows but must have at least {rows}")
    frame = frame.with_columns(
        pl.col("^i\\d+$").fill_null(0).clip(0).log1p(), pl.col("^c\\d+$").str.to_integer(base=16).fill_null(NULL)
    )
    ids, sizes = [], []
    for name in names[14:]:
        tokens, first, inverse = np.unique(frame[name].to_numpy(), return_index=True, return_inverse=True)
        appearance = np.empty(len(tokens), dtype=np.int64)
        appearance[np.argsort(first)] = np.arange(len(tokens))
        ids.append(appearance[inverse])
        sizes.append(len(tokens))
    dense = frame.select(names[1:14]).cast(pl.Float32).to_torch()
    return torch.from_numpy(frame["label"].to_numpy()).float(), dense, torch.from_numpy(np.stack(ids, 1)), sizes


def initialize_(tables: quorem.EmbeddingCollection, setting: Setting) -> None:
    """Draw the initial values of the tables as the setting says."""
    tables.reset_parameters(setting.start if setting.start in init.METHODS else "matched")
    with torch.no_grad():
        if setting.noise is not None:
            for feature, spec in enumerate(tables.specs):
                init.matched_(tables.tables(feature), spec, noise=setting.noise)
        if setting.start == "nn.Linear":  # U(-1/sqrt(d_in), 1/sqrt(d_in)), weights and biases
            for group in tables.paths:
                for weight, bias in zip(group.weights, group.biases, strict=True):
                    bound = weight.shape[1] ** -0.5
                    weight.uniform_(-bound, bound)
                    bias.uniform_(-bound, bound)


def run(setting: Setting, seed: int, data: tuple[Tensor, Tensor, Tensor, list[int]], config: Config) -> dict:
    """Train one model for one epoch in time order; its final losses and the size of its tables."""
    labels, dense, ids, sizes = data
    began = time.perf_counter()
    scheme = SCHEMES[setting.scheme]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tables too small to shrink stay full
        tables = quorem.EmbeddingCollection(
            [quorem.Table(f"c{j}", n, config.dim, scheme(n, setting.collisions)) for j, n in enumerate(sizes)]
        )
    torch.manual_seed(seed)  # here, so that the networks of one seed start alike in every setting
    model = CompactDLRM(tables, dense.shape[1], config)
    initialize_(tables, setting)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=config.lr)
    first = None
    for row in range(0, config.train_rows, config.batch):
        rows = slice(row, min(row + config.batch, config.train_rows))
        loss = F.binary_cross_entropy_with_logits(model(dense[rows], ids[rows]), labels[rows])
        first = loss.item() if first is None else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def mean_loss(begin: int, count: int) -> float:
        logits = [model(dense[r], ids[r]) for r in torch.arange(begin, begin + count).split(1000)]
        return F.binary_cross_entropy_with_logits(torch.cat(logits), labels[begin : begin + count]).item()

    return {
        "setting": setting.key,
        **asdict(setting),
        "seed": seed,
        "parameters": tables.num_parameters,
        "first_batch_loss": round(first, 6),
        "val_loss": round(mean_loss(config.train_rows, config.val_rows), 6),
        "test_loss": round(mean_loss(config.train_rows + config.val_rows, config.test_rows), 6),
        "seconds": round(time.perf_counter() - began, 2),
        "commit": commit() or "unknown",
        "versions": f"torch {torch.__version__}, numpy {np.__version__}, python {platform.python_version()}",
    }


def save(path: Path, config: Config, runs: list[dict]) -> None:
    """Write the study as JSON, a run a line."""
    head = json.dumps({"config": asdict(config)})
    text = head[:-1] + ', "runs": [\n' + ",\n".join(json.dumps(r) for r in runs) + "\n]}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, text)


def study(data_path: Path, out: Path) -> None:
    """Run what is missing, one run after the other, saving after each."""
    torch.set_num_threads(1)  # the networks are small: more threads wait for each other
    config = Config()
    runs = json.loads(out.read_text(encoding="utf-8"))["runs"] if out.exists() else []
    done = {(r["setting"], r["seed"]) for r in runs}
    wanted = [(setting, seed) for setting, seeds in settings() for seed in range(seeds)]
    todo = [(s, seed) for s, seed in dict.fromkeys(wanted) if (s.key, seed) not in done]
    data = read(data_path, config.train_rows + config.val_rows + config.test_rows)
    began = time.perf_counter()
    for num_done, (setting, seed) in enumerate(todo, 1):
        runs.append(run(setting, seed, data, config))
        save(out, config, runs)
        left = (time.perf_counter() - began) / num_done * (len(todo) - num_done)
        loss = runs[-1]["test_loss"]
        print(
            f"{num_done}/{len(todo)} {setting.key} seed {seed}: {loss:.4f}, {left / 60:.0f} min left", file=sys.stderr
        )


def table(study: dict) -> str:
    """The study's results as Markdown: mean and standard deviation over seeds of the final log loss."""
    cells: dict[str, list[dict]] = {}
    for r in study["runs"]:
        cells.setdefault(r["setting"], []).append(r)

    def cell(setting: Setting, seeds: int = 5, loss: str = "test_loss") -> str:
        losses = [r[loss] for r in cells[setting.key] if r["seed"] < seeds]
        return f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"

    def parameters(setting: Setting) -> str:
        return f"{cells[setting.key][0]['parameters']:,}"

    def block(header: list[str], body: list[list[str]]) -> list[str]:
        return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *body)] + [""]

    sizes = [f"{c}x" for c in COLLISIONS]
    rows = [["full", cell(Setting("full", 1, "matched")), "", ""]]
    rows += [["hash", *(cell(Setting("hash", c, "matched")) for c in COLLISIONS)]]
    for operation in ("mult", "add"):
        for start, noise in (("matched", init.NOISE), ("symmetric", None), ("reference", None)):
            rows += [[f"{operation}, {start}", *(cell(Setting(operation, c, start, noise)) for c in COLLISIONS)]]
        name = f"{operation}, large quotient"
        rows += [[f"{name}, matched", *(cell(Setting(name, c, "matched", init.NOISE)) for c in COLLISIONS)]]
    text = block(["test log loss, 5 seeds", *sizes], rows)

    rows = [["full", parameters(Setting("full", 1, "matched")), "", ""]]
    rows += [["hash", *(parameters(Setting("hash", c, "matched")) for c in COLLISIONS)]]
    rows += [["mult, add", *(parameters(Setting("mult", c, "matched", init.NOISE)) for c in COLLISIONS)]]
    text += block(["embedding parameters", *sizes], rows)

    settings = [[Setting(o, c, "matched", init.NOISE), Setting(o, c, "symmetric")] for o, c in CLOSE]
    rows = [
        [
            f"{pair[0].scheme}, {pair[0].collisions}x",
            *(cell(s, 15, loss) for loss in ("val_loss", "test_loss") for s in pair),
        ]
        for pair in settings
    ]
    full = Setting("full", 1, "matched")
    rows = [["full", cell(full, 15, "val_loss"), "", cell(full, 15), ""], *rows]
    starts = ["matched", "symmetric"]
    text += block(["15 seeds", *(f"{split}, {s}" for split in ("validation", "test") for s in starts)], rows)

    schemes = ["path, linear", "path, h=16", "path, h=64"]
    settings = [[Setting(s, 4, "identity"), Setting(s, 4, "nn.Linear")] for s in schemes]
    rows = [[pair[0].scheme, *map(cell, pair), parameters(pair[0])] for pair in settings]
    text += block(["test log loss at 4x, 5 seeds", "near the identity", "as nn.Linear", "parameters"], rows)

    schemes = ["mult, 2 equal tables", "mult, 3 equal tables", "add, 3 equal tables"]
    settings = [[Setting(s, 16, "matched", init.NOISE), Setting(s, 16, "symmetric")] for s in schemes]
    rows = [[pair[0].scheme, *(cell(s, 3) for s in pair), parameters(pair[0])] for pair in settings]
    text += block(["test log loss at 16x, 3 seeds", "matched", "symmetric", "parameters"], rows)

    rows = [
        [f"{operation}, {noise:g}", *(cell(Setting(operation, c, "matched", noise), 3, "val_loss") for c in COLLISIONS)]
        for operation in ("mult", "add")
        for noise in NOISES
    ]
    text += block(["validation log loss by noise, 3 seeds", *sizes], rows)

    for (made_by, versions), count in Counter((r["commit"], r["versions"]) for r in study["runs"]).items():
        text += [f"{count} runs at commit {made_by} with {versions}, one thread.", ""]
    return "\n".join(text[:-1]) + "\n"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="rows in the layout of Criteo's train.txt, plain or gzipped")
    parser.add_argument("--out", type=Path, required=True, help="the study's JSON, read and written")
    parser.add_argument("--table", action="store_true", help="print the results in --out as Markdown; run nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.out.read_text(encoding="utf-8"))), end="")
    elif arguments.data is None:
        parser.error("--data is needed to run the study")
    else:
        study(arguments.data, arguments.out)


if __name__ == "__main__":
    main()
