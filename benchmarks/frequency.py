"""Tables with hot and cold ids over one pool beside QR(4) of as many rows.

    PYTHONPATH=src python3 benchmarks/frequency.py --out benchmarks/results/frequency.json [--commit SHA]

On a GPU, eager and in CUDA graphs; on the Criteo tables' numbers of ids, with Zipf ids. Of ``hot and cold`` the lowest
eighth of each table's ids have rows of their own, and the others share one pool. With ``lists``, frequencies say which
ids are hot, in no order. A row has the median time and its ratio to QR(4), measured in turns.
"""

import argparse
import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

import quorem
from quorem.data.shape import CARDINALITIES
from quorem.experiments.bench import grid, measure, run

SMALL = 100  # ids up to which a table stays full
HOT = 8  # one of so many ids has a row of its own
MODES = {
    "forward": None,
    "step": quorem.optim.Adagrad,
    "step_adam": quorem.optim.Adam,
    "step_amsgrad": quorem.optim.AMSGrad,
}
SETTLED = 400  # steps of Adam and AMSGrad from which on missed steps have a closed form


def collection(name: str, dim: int, device: torch.device, orders: list[torch.Tensor]) -> quorem.EmbeddingCollection:
    """The tables of a row; ``orders`` has the ids of each table by falling frequency, where there are lists."""
    qr, tables = quorem.QR(4), []
    rows = sum(r for n in CARDINALITIES for r, _ in qr.spec(n, dim).shapes)
    pool = quorem.Pool(rows - sum(n // HOT if n > SMALL else n for n in CARDINALITIES))
    for t, n in enumerate(CARDINALITIES):
        scheme: Any = qr
        frequencies = None
        if name.startswith("hot"):
            scheme = quorem.HotCold(n // HOT, cold=pool) if n > SMALL else quorem.Full()
            if "lists" in name and n > SMALL:
                hot = orders[t][: n // HOT].sort().values.int()
                frequencies = quorem.schemes.Ranks(hot, hot[:0])
        tables.append(quorem.Table(f"C{t}", n, dim, scheme, frequencies=frequencies))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tables that stay full
        return quorem.EmbeddingCollection(tables, device=device)


def operation(mode: str, module: quorem.EmbeddingCollection, ids: torch.Tensor) -> Callable[[], Any]:
    """A lookup or a training step on one batch."""
    if mode == "forward":
        return torch.no_grad()(lambda: module(ids))
    grad = torch.randn(module(ids[:1]).shape[1:], device=ids.device).expand(len(ids), -1, -1) / len(ids)
    grad = grad.contiguous()
    return lambda: module(ids).backward(grad)


@cache
def orders_by_frequency() -> list[torch.Tensor]:
    """The ids of each table by falling frequency: drawn at random."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randperm(n, generator=draw) for n in CARDINALITIES]


def measured(dim: int, batch: int, mode: str, device: torch.device) -> list[dict[str, Any]]:
    """A row for each kind of tables, eager and in a graph."""
    orders = orders_by_frequency()
    ranks = [grid.draw_ids("zipf", CARDINALITIES, batch, seed=seed) for seed in range(grid.ROTATION)]
    calls: dict[tuple[str, bool], measure.Call] = {}
    for name in ("QR(4)", "hot and cold", "hot and cold, lists"):
        module = collection(name, dim, device, orders)
        ids = ranks
        if "lists" in name:
            ids = [torch.stack([order[column] for order, column in zip(orders, r.T, strict=True)], 1) for r in ranks]
        if MODES[mode] is not None:
            quorem.optim.apply_in_backward(module, MODES[mode], lr=0.01)
        ids = [i.to(device) for i in ids]
        runs = [operation(mode, module, i) for i in ids]
        for each in runs:
            each()
        calls[name, False] = measure.Call(name, run.rotation(runs))
        replay = measure.captured(runs)
        for _ in range(SETTLED // len(runs) if mode in ("step_adam", "step_amsgrad") else 0):
            replay()
        calls[name, True] = measure.Call(name, replay, count=len(runs))
    measure.time_in_turns(list(calls.values()), device, measure.Effort(1e-2, 0.2, most=20), grid.ROTATION)
    rows = []
    for (name, graph), call in calls.items():
        q20, median, q80 = (round(x, 3) for x in call.quantiles())
        ratio = round(median / calls["QR(4)", graph].quantiles()[1], 3)
        setting = {"mode": mode, "tables": name, "dim": dim, "batch": batch, "graph": int(graph)}
        rows.append(setting | {"median_us": median, "q20_us": q20, "q80_us": q80, "over_qr": ratio})
        rows[-1] |= {"samples": len(call.seconds)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="of the code, where there is no repository to ask")
    parser.add_argument("--dim", type=int, action="append", help="by default 16 and 64")
    parser.add_argument("--mode", choices=list(MODES), action="append", help="by default all")
    options = parser.parse_args()
    device = torch.device("cuda")
    command = "python benchmarks/frequency.py"
    results: dict[str, Any] = {"facts": run.facts_of_run(device, command, options.commit), "rows": []}
    for dim in options.dim or (16, 64):
        for mode in options.mode or MODES:
            for batch in (2048, 65536):
                for row in measured(dim, batch, mode, device):
                    results["rows"].append(row)
                    print(*list(row.values())[:9], flush=True)
                torch.cuda.empty_cache()
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
