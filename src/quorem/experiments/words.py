"""Numbers and settings as text, the same on the page, in hover boxes and in tables."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..paper import schemes
from .figures import Result

NETWORK_NAMES = {"dcn": "DCN", "dlrm": "DLRM", "deepfm": "DeepFM"}
OPTIMIZER_NAMES = {"adagrad": "Adagrad", "amsgrad": "AMSGrad"}
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
NONE = "\N{EN DASH}"


def or_nan(value: float | None) -> float:
    """The number, or NaN if it is None."""
    return math.nan if value is None else value


def loss(value: float | None) -> str:
    """A log loss with the digits of the paper's table 1; a dash where there is none.

    >>> loss(0.452517)
    '0.45252'
    """
    return f"{value:.5f}" if math.isfinite(value := or_nan(value)) else NONE


def mean_text(mean: float | None, deviation: float | None, trials: int) -> str:
    """A mean and its deviation as text; one trial has no deviation.

    >>> mean_text(0.45, 0.0003, 5), mean_text(0.45, 0.0, 1)
    ('0.45000 ± 0.00030', '0.45000')
    """
    return loss(mean) + (f" ± {loss(deviation)}" if trials > 1 and math.isfinite(or_nan(deviation)) else "")


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown, whose head is the first row.

    >>> table([["size", "loss"], ["4", "0.45"]])
    ['| size | loss |', '|---|---|', '| 4 | 0.45 |']
    """
    head, *body = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *body]


def metrics(split: str, values: Mapping[str, float]) -> str:
    """The metrics of a split in one line.

    >>> metrics("test", {"log_loss": 0.45, "auc": 0.75, "accuracy": 0.8, "calibration": 1.01})
    'test: log loss 0.45000, AUC 0.75000, accuracy 0.8000, calibration 1.0100'
    """
    return (
        f"{split}: log loss {values['log_loss']:.5f}, AUC {values['auc']:.5f},"
        f" accuracy {values['accuracy']:.4f}, calibration {values['calibration']:.4f}"
    )


def count(value: float, unit: str = "") -> str:
    """A number with three digits and a prefix for its power of 1000.

    >>> count(135_746_273), count(960), count(2_160_805_824, "B")
    ('136 M', '960', '2.16 GB')
    """
    for size, prefix in PREFIXES:
        if abs(value) >= size * 0.9995:
            return f"{_digits(value / size)} {prefix}{unit}"
    return f"{_digits(value)} {unit}".strip()


def counts(values: Sequence[float], unit: str = "") -> list[str]:
    """Numbers that are shown together, such as the marks of an axis, all with the same prefix.

    >>> counts([500_000, 1_000_000, 2_500_000]), counts([0, 250, 500]), counts([3e4, 1e6], "B")
    (['0.5 M', '1 M', '2.5 M'], ['0', '250', '500'], ['0.03 MB', '1 MB'])
    """
    least = min((abs(value) for value in values if value), default=0.0)
    most = max(map(abs, values), default=0.0)
    sizes = [(size, prefix) for size, prefix in (*PREFIXES, (1.0, "")) if most >= size and least >= 0.001 * size]
    size, prefix = sizes[0] if sizes else (1.0, "")
    return ["0" if not value else f"{value / size:,.6g} {prefix}{unit}".strip() for value in values]


def size(value: float) -> str:
    """A number of bytes as text: 1 kB is 1000 bytes.

    >>> size(540_201_456 * 4)
    '2.16 GB'
    """
    return count(value, "B")


def _digits(value: float) -> str:
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}" if abs(value) < 999.5 else f"{value:.0f}"


def network(name: str) -> str:
    """A network's name as its authors write it; other names unchanged, but without the digest of their file.

    >>> network("dlrm"), network("nets/wide.py:build#0123456789ab")
    ('DLRM', 'nets/wide.py:build')
    """
    return NETWORK_NAMES.get(name, re.sub(r"#[0-9a-f]{12}$", "", name))


def optimizer(name: str) -> str:
    """An optimizer's name as the paper writes it; other names unchanged."""
    return OPTIMIZER_NAMES.get(name, name)


def scheme(config: Mapping[str, Any]) -> str:
    """The scheme of a run as Python code.

    >>> scheme({"scheme": {"scheme": "QR", "num_collisions": 60}})
    'QR(num_collisions=60)'
    """
    description = config.get("scheme")
    if isinstance(plan := config.get("plan"), Mapping):
        full = sum(isinstance(table, Mapping) and table.get("scheme") == "Full" for table in plan.values())
        bits = f", {config['bits']} bits" if config.get("bits") else ""
        return f"plan of {len(plan)} tables, {full} of them full{bits}"
    try:
        text = repr(schemes.from_dict(description))
    except (TypeError, ValueError, KeyError):
        text = json.dumps(description)
    return text if len(text) <= 120 else text[:119] + "…"


def method(config: Mapping[str, Any]) -> str:
    """The paper's name of a run's method; ``plan``, or the name of the scheme's class, where it has none.

    >>> method({"scheme": {"scheme": "QR", "operation": "add"}}), method({"scheme": {"scheme": "GeneralizedQR"}})
    ('add', 'GeneralizedQR')
    """
    if config.get("plan"):
        return f"plan, {config['bits']} bits" if config.get("bits") else "plan"
    described = config["scheme"]
    name = str(described["scheme"])
    return str(described.get("operation", "mult")) if name == "QR" else {"Full": "full", "Hash": "hash"}.get(name, name)


def settings(point: Result) -> list[str]:
    """Scheme, threshold and optimizer, each with its label."""
    threshold = point.config.get("threshold")
    return [
        f"scheme {scheme(point.config)}",
        *([f"threshold {threshold:,}"] if isinstance(threshold, int) else []),
        *([f"optimizer {optimizer(point.optimizer)}"] if point.optimizer else []),
    ]


def finished(point: Result) -> int:
    """Number of finished trials with any optimizer."""
    return sum(int(other.get("trials", 0)) for other in point.others.values()) or point.trials


def facts(made: Mapping[str, Any]) -> str:
    """The entries of a mapping in one line, including nested ones.

    >>> facts({"rows": 1000000, "versions": {"torch": "2.13.0"}})
    'rows 1,000,000, versions (torch 2.13.0)'
    """
    return ", ".join(f"{str(name).replace('_', ' ')} {value_text(value)}" for name, value in made.items())


def data(dataset: Mapping[str, Any]) -> str:
    """What is known about a dataset, in one line.

    >>> data({"name": "log", "rows": {"train": 1200, "test": 100}, "num_dense": 2, "cardinalities": [30, 1000]})
    '1,200 train and 100 test rows; 2 dense and 2 categorical features with 1,030 categories'
    """
    entries = {name: value for name, value in dataset.items() if name not in ("name", "path", "identity")}
    parts = []
    if isinstance(rows := entries.get("rows"), Mapping) and rows:
        *first, last = [f"{value_text(number)} {split}" for split, number in entries.pop("rows").items()]
        parts.append((", ".join(first) + " and " if first else "") + f"{last} rows")
    if isinstance(sizes := entries.get("cardinalities"), list) and all(isinstance(size, int) for size in sizes):
        del entries["cardinalities"]
        dense = f"{entries.pop('num_dense')} dense and " if "num_dense" in entries else ""
        parts.append(f"{dense}{len(sizes)} categorical features with {sum(sizes):,} categories")
    return "; ".join([*parts, *([facts(entries)] if entries else [])])


def value_text(value: Any) -> str:
    """Any value from a file as text."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "unknown"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return f"({facts(value)})"
    if isinstance(value, list | tuple):
        if len(value) > 8 and all(isinstance(entry, int) for entry in value):
            return f"{len(value)} numbers, {sum(value):,} together"
        return ", ".join(map(value_text, value))
    return str(value)
