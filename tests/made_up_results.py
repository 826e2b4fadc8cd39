"""Figures with numbers made up, for what draws them: no training."""

import json
from typing import Any

from quorem.experiments.figures import Axes, Dataset, Figure, Made, Result
from quorem.paper.schemes import QR, Full, Scheme, to_json

DATA = Dataset(name="made-up", identity="1", rows={"train": 1200, "test": 100}, cardinalities=[30, 1000])


def result(
    series: str = "mult",
    x: float | None = 4,
    *,
    loss: float | None = 0.45,
    sd: float | None = 0.001,
    size: int = 4000,
    scheme: Scheme = QR(4),  # noqa: B008 - a scheme is frozen
    **more: Any,
) -> Result:
    """A point; ``size`` are the bytes of its tables."""
    network, optimizer = more.get("network", "dcn"), more.get("optimizer", "adagrad")
    config = {"data": "made-up", "network": network, "optimizer": optimizer, "threshold": 0, "x": x, "series": series}
    numbers: dict[str, Any] = {
        **{"network": network, "series": series, "x": x, "optimizer": optimizer, "trials": 5},
        **{"test_mean": loss, "test_sd": sd, "validation_mean": loss, "validation_sd": sd},
        **{"auc_mean": 0.78, "auc_sd": 0.001, "parameters": size // 4 + 100, "bytes": size + 400},
        **{"embedding_parameters": size // 4, "embedding_bytes": size, "rows_per_second": 1000.0, "others": {}},
        **{"config": config | {"scheme": json.loads(to_json(scheme))}, "runs": [], "command": f"quorem train --x {x}"},
    }
    return Result(**numbers | more)


def figure(points: list[Result], data: Dataset = DATA, **axes: Any) -> Figure:
    """A figure of those points."""
    origin = {"command": "quorem reproduce all", "date": "2026-01-02", "device": "a machine"}
    made = Made(data=data, versions={"torch": "2.13.0"}, commit="abc1234", **origin)
    axes = {"name": "figure6", "title": "Figure 6: made up", "x_label": "threshold"} | axes
    return Figure(axes=Axes(**axes), made=made, points=points)


def sweep(series: tuple[str, ...] = ("hash", "mult"), xs: tuple[int, ...] = (1, 20, 200), **axes: Any) -> Figure:
    """A figure of every series at every x for both networks, with a baseline; ``mult`` has the lowest losses."""
    points = [
        result("full", None, loss=0.44, size=64_000, scheme=Full(), network=network) for network in ("dcn", "dlrm")
    ]
    points += [
        result(name, x, loss=0.46 - 0.005 * k + 0.0001 * j, size=16_000 + 10 * j + k, network=network)
        for network in ("dcn", "dlrm")
        for k, name in enumerate(series)
        for j, x in enumerate(xs)
    ]
    return figure(points, **{"x_log": True, "baseline": "full", "paper": "mult is best."} | axes)
