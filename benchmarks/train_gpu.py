"""Training on a GPU: captured steps, and a whole run over prepared data.

    PYTHONPATH=src python3 benchmarks/train_gpu.py --out train_gpu.json [--data DIR]

``steps``: a step within its CUDA graph, with the copies that fill the graph's buffers, over made-up rows of Criteo's
cardinalities that lie on the GPU; and what an epoch of its 39.3 million rows would take. ``kernels``: the launches of
one step of DLRM. ``run``, with ``--data``: one epoch of DLRM on prepared data as ``quorem train`` does it, and how long
it takes before the first and after the last step.
"""

import statistics
import tempfile
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import torch
from result_file import made_by, parser_of, write

from quorem import QR, Full, models
from quorem.data.batches import Batch
from quorem.data.prepared import Prepared
from quorem.data.shape import CARDINALITIES, NUM_ROWS
from quorem.modules.collection import EmbeddingCollection
from quorem.training.config import RunConfig
from quorem.training.loop import Options, train
from quorem.training.model import data_identity
from quorem.training.tables import tables_of
from quorem.training.trial import STEPS_PER_GRAPH, Trial

EPOCH = NUM_ROWS * 6 // 7
SCHEMES = {"QR(4)": QR(4), "full": Full()}
ROUNDS = 9


def draw(rows: int) -> Batch:
    """Rows on the GPU whose ids are log-uniform, so that some are hot."""
    sizes = torch.tensor(CARDINALITIES, device="cuda", dtype=torch.float64)
    ids = ((sizes.log() * torch.rand(rows, len(sizes), device="cuda", dtype=torch.float64)).exp() - 1).long()
    ids = ids.clamp(min=0).minimum(sizes.long() - 1).int()
    labels = (torch.rand(rows, device="cuda") < 0.25).to(torch.uint8)
    return Batch(labels, torch.randn(rows, 13, device="cuda").abs(), ids)


def trial_of(network: str, scheme: str, optimizer: str, batch: int) -> Trial:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tables that stay full
        tables = EmbeddingCollection(tables_of(CARDINALITIES, SCHEMES[scheme]), device="cuda", on_invalid_id="trust")
    model = models.build(network, tables, device="cuda")
    config = RunConfig(data="made up", network=network, optimizer=optimizer, batch_size=batch)
    return Trial(config, model, list(tables.names))


def seconds_of(trial: Trial, rows: Batch, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        trial.step(rows)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def steps(network: str, scheme: str, optimizer: str, batch: int) -> dict[str, Any]:
    """One configuration: compile and capture, then the median time of a step."""
    trial, rows = trial_of(network, scheme, optimizer, batch), draw(batch * STEPS_PER_GRAPH)
    warm_up = seconds_of(trial, rows, 2)
    calls = max(3, int(0.1 / seconds_of(trial, rows, 3) * 3))
    times = sorted(seconds_of(trial, rows, calls) / calls / STEPS_PER_GRAPH for _ in range(ROUNDS))
    step = statistics.median(times)
    return {
        "network": network,
        "scheme": scheme,
        "optimizer": optimizer,
        "batch": batch,
        "step_us": round(step * 1e6, 1),
        "step_us_range": [round(times[0] * 1e6, 1), round(times[-1] * 1e6, 1)],
        "epoch_s": round(step * -(-EPOCH // batch), 1),
        "warm_up_s": round(warm_up, 1),
        "loss_is_finite": bool(trial.loss_sum.isfinite()),
    }


def kernels() -> list[dict[str, Any]]:
    """The launches of one step of DLRM, by time."""
    trial, rows = trial_of("dlrm", "QR(4)", "adagrad", 128), draw(128 * STEPS_PER_GRAPH)
    seconds_of(trial, rows, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds_of(trial, rows, 1)
    times: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.setdefault(event.name[:80], []).append(event.time_range.elapsed_us())
    rows_ = [
        {"kernel": name, "launches": len(us) / STEPS_PER_GRAPH, "us_of_step": round(sum(us) / STEPS_PER_GRAPH, 2)}
        for name, us in times.items()
    ]
    return sorted(rows_, key=lambda row: -row["us_of_step"])


def run(data: Path) -> dict[str, Any]:
    """One epoch of DLRM with ``QR(4)`` and Adagrad at batch 128, to its last file."""
    began, reports = time.perf_counter(), []
    options = Options(report=lambda status: reports.append(time.perf_counter()))
    prepared = Prepared(data)
    config = RunConfig(data=data_identity(prepared), scheme=QR(4))
    with tempfile.TemporaryDirectory() as folder:
        result = train(config, prepared, Path(folder) / "run", device="cuda", options=options)
    ended = time.perf_counter()
    return {
        "rows": result["rows"],
        "before_first_report_s": round(reports[0] - began, 1),
        "training_s": round(result["seconds"], 1),
        "after_last_step_s": round(ended - reports[-1], 1),
        "all_s": round(ended - began, 1),
        "test_log_loss": result["test"]["log_loss"],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, help="prepared data for a whole run")
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 2048, 16384])
    arguments = parser.parse_args()
    result = {"device": torch.cuda.get_device_name(), **made_by("triton"), "epoch_rows": EPOCH}
    if arguments.data is not None:
        result["run"] = run(arguments.data)
    cases = product(("dlrm", "dcn"), SCHEMES, ("adagrad", "amsgrad"), arguments.batch)
    result["steps"] = []
    for case in cases:
        result["steps"].append(steps(*case))
        print(result["steps"][-1], flush=True)
        torch.cuda.empty_cache()
        write(arguments.out, result)
    result["kernels"] = kernels()
    write(arguments.out, result)


if __name__ == "__main__":
    main()
