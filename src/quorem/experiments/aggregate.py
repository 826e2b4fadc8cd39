"""From finished runs to the numbers of a figure: mean and deviation over trials, the optimizer chosen by validation."""

import csv
import dataclasses
import io
import json
import shlex
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from .. import models
from ..collection import EmbeddingCollection
from ..files import write
from ..schemes import to_json
from ..training.config import RunConfig
from ..training.run import read_metrics, read_result
from ..training.tables import tables_of
from .conditions import conditions_of
from .figures import Figure, Plan, Point, Result


def aggregate(plan: Plan, folder: Path) -> Figure:
    """The figure of a plan, from the runs in a sweep's folder that are finished.

    A point without a finished run is left out, unless the figure only counts parameters.
    """
    points, made = [], dict(plan.made)
    for point, configs in zip(plan.points, plan.runs, strict=True):
        results = {config: result for config in configs if (result := _result(folder, config)) is not None}
        failed = sum((folder / "errors" / f"{config.key()}.json").exists() for config in configs)
        if results:
            made |= {name: next(iter(results.values()))[name] for name in ("device", "versions", "commit")}
            points.append(_trained(point, configs, results, folder, failed, plan))
        elif plan.axes.y == "parameters":
            points.append(_counted(point, configs[0], plan.made["datasets"][configs[0].data]))
    return Figure(axes=plan.axes, made=made, points=points)


def _result(folder: Path, config: RunConfig) -> dict[str, Any] | None:
    path = folder / "runs" / config.key() / "result.json"
    if not path.exists():
        return None
    try:
        return read_result(path)
    except ValueError as error:
        raise ValueError(f"{error}; remove it, and the next command trains the run again") from None


def _trained(
    point: Point,
    configs: Sequence[RunConfig],
    results: dict[RunConfig, dict[str, Any]],
    folder: Path,
    failed: int,
    plan: Plan,
) -> Result:
    by_optimizer: dict[str, list[dict[str, Any]]] = {}
    for config, result in results.items():
        by_optimizer.setdefault(config.optimizer, []).append(result)
    others = {
        name: {split: mean(r[split]["log_loss"] for r in found) for split in ("validation", "test")}
        | {"trials": len(found)}
        for name, found in by_optimizer.items()
    }
    best = min(others, key=lambda name: (not isfinite(others[name]["validation"]), others[name]["validation"]))
    chosen = [config for config in results if config.optimizer == best]
    found, first = by_optimizer[best], by_optimizer[best][0]
    config = json.loads(chosen[0].to_json())
    del config["seed"]
    moments: dict[str, Any] = {
        f"{name}_{kind}": value
        for name, split, metric in (
            ("test", "test", "log_loss"),
            ("validation", "validation", "log_loss"),
            ("auc", "test", "auc"),
        )
        for kind, value in zip(("mean", "sd"), mean_and_deviation([r[split][metric] for r in found]), strict=True)
    }
    sizes = {name: first[name] for name in ("parameters", "bytes", "embedding_parameters", "embedding_bytes")}
    return Result(
        network=chosen[0].network,
        series=point.series,
        x=point.x,
        optimizer=best,
        trials=len(found),
        others=others,
        rows_per_second=mean(r["rows_per_second"] for r in found),
        config=config,
        runs=[config.key() for config in chosen],
        command=command_of(chosen[0], plan.made["datasets"][chosen[0].data]["path"]),
        test_losses=[r["test"]["log_loss"] for r in found],
        curve=curve([folder / "runs" / config.key() / "metrics.jsonl" for config in chosen]),
        missing=0 if plan.axes.y == "parameters" else len(configs) - len(results),
        failed=failed,
        **sizes,
        **moments,
    )


def _counted(point: Point, config: RunConfig, data: dict[str, Any]) -> Result:
    """A point of which only the parameters are known."""
    tables = tables_of(
        data["cardinalities"], config.scheme, threshold=config.threshold, embedding_dim=config.embedding_dim
    )
    embeddings = EmbeddingCollection(tables, device="meta")
    options = {"preset": config.preset, "num_dense": data["num_dense"], "device": torch.device("meta")}
    model = models.build(config.network, embeddings, **options)
    parameters = sum(p.numel() for p in model.parameters())
    shown = json.loads(config.to_json())
    del shown["seed"]
    return Result(
        network=config.network,
        series=point.series,
        x=point.x,
        optimizer="",
        trials=0,
        test_mean=None,
        test_sd=None,
        validation_mean=None,
        validation_sd=None,
        auc_mean=None,
        auc_sd=None,
        parameters=parameters,
        bytes=4 * parameters,
        embedding_parameters=embeddings.num_parameters,
        embedding_bytes=4 * embeddings.num_parameters,
        rows_per_second=0.0,
        others={},
        config=shown,
        runs=[],
        command=command_of(config, data["path"]),
    )


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation (n - 1), which a single value does not have.

    >>> mean_and_deviation([1.0, 2.0, 4.0, 5.0]), mean_and_deviation([3.0])
    ((3.0, 1.8257418583505538), (3.0, None))
    """
    return mean(values), stdev(values) if len(values) > 1 else None


def curve(metrics: Sequence[Path]) -> list[list[float | None]]:
    """``[step, mean, deviation]`` of the validation loss at the steps where every trial has one."""
    trials = []
    for path in metrics:
        lines, damaged, _ = read_metrics(path)
        if damaged:
            raise ValueError(f"{path} is damaged: remove its folder, and the next command trains the run again")
        trials.append({line["step"]: line["validation"]["log_loss"] for line in lines if "validation" in line})
    steps = sorted(set.intersection(*map(set, trials)))
    if len(steps) < 2:  # the final validation alone is no curve
        return []
    return [[step, *mean_and_deviation([trial[step] for trial in trials])] for step in steps]


def command_of(config: RunConfig, data: str) -> str:
    """The command that trains one run by itself."""
    words = ["quorem", "train", "--data", data, "--out", f"runs/{config.key()}", "--scheme", to_json(config.scheme)]
    for field in dataclasses.fields(RunConfig):
        option = {"embedding_dim": "dim", "max_rows": "rows"}.get(field.name, field.name).replace("_", "-")
        value = getattr(config, field.name)
        if field.name in ("data", "scheme") or (value == field.default and field.name != "seed"):
            continue
        words += [f"--{option}"] if value is True else [f"--{option}", str(value)]
    return shlex.join(words)


COLUMNS = (
    *("figure", "network", "series", "x", "optimizer", "trials", "test_mean", "test_sd", "validation_mean"),
    *("validation_sd", "auc_mean", "auc_sd", "parameters", "bytes", "embedding_parameters", "embedding_bytes"),
    *("missing", "failed", "rows", "epochs", "batch_size", "scheme", "threshold", "command"),
)


def write_csv(figure: Figure, path: Path) -> None:
    """One line a point; a deviation is empty for a single trial, which has none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for point in figure.points:
        trained = conditions_of(point, figure.made)
        values = vars(point) | {
            "figure": figure.axes.name,
            "rows": trained.rows,
            "epochs": trained.epochs,
            "batch_size": trained.batch_size,
            "scheme": json.dumps(point.config["scheme"]),
            "threshold": point.config["threshold"],
        }
        if point.trials < 2:
            values |= dict.fromkeys(("test_sd", "validation_sd", "auc_sd"))
        writer.writerow(["" if values[name] is None else values[name] for name in COLUMNS])
    write(path, text.getvalue())
