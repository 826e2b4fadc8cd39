"""Numbers and settings as text, the same on the page, in hover boxes and in tables."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ..paper import schemes
from .figures import Dataset

NETWORK_NAMES = {"dcn": "DCN", "dlrm": "DLRM"}
OPTIMIZER_NAMES = {"adagrad": "Adagrad", "amsgrad": "AMSGrad"}
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
STORED = {"bits": "{} bits", "row_dtype": "{}", "state_dtype": "{} state"}  # options of a run that name its method
NONE = "\N{EN DASH}"


def or_nan(value: float | None) -> float:
    """The number, or NaN if it is None."""
    return math.nan if value is None else value


def loss(value: float | None) -> str:
    """A log loss with the digits of the paper's table 1; a dash where there is none."""
    return f"{value:.5f}" if math.isfinite(value := or_nan(value)) else NONE


def mean_text(mean: float | None, deviation: float | None, trials: int) -> str:
    """A mean and its deviation as text; one trial has no deviation."""
    return loss(mean) + (f" ± {loss(deviation)}" if trials > 1 and math.isfinite(or_nan(deviation)) else "")


def count(value: float) -> str:
    """A number with three digits and a prefix for its power of 1000.

    >>> count(135_746_273), count(960), count(2_160_805_824)
    ('136 M', '960', '2.16 G')
    """
    size, prefix = next((pair for pair in PREFIXES if abs(value) >= pair[0] * 0.9995), (1, ""))
    scaled = value / size
    digits = f"{scaled:.3g}" if scaled == int(scaled) else f"{scaled:#.3g}".rstrip(".")
    return f"{digits} {prefix}".strip()


def network(name: str) -> str:
    """A network's name as its authors write it; other names unchanged, but without the digest of their file."""
    return NETWORK_NAMES.get(name, re.sub(r"#[0-9a-f]{12}$", "", name))


def optimizer(name: str) -> str:
    """An optimizer's name as the paper writes it; other names unchanged."""
    return OPTIMIZER_NAMES.get(name, name)


def scheme(config: Mapping[str, Any]) -> str:
    """The scheme of a run as Python code, or what its plan has."""
    description = config.get("scheme")
    if isinstance(plan := config.get("plan"), Mapping):
        full = sum(isinstance(table, Mapping) and table.get("scheme") == "Full" for table in plan.values())
        bits = f", {config['bits']} bits" if config.get("bits") else ""
        return f"plan of {len(plan)} table{'s' * (len(plan) != 1)}, {full} of them full{bits}"
    try:
        text = repr(schemes.from_dict(description))
    except (TypeError, ValueError, KeyError):
        text = json.dumps(description)
    return text if len(text) <= 120 else text[:119] + "…"


def method(config: Mapping[str, Any]) -> str:
    """The paper's name of a run's method; ``plan``, or the name of the scheme's class, where it has none; and dtypes.

    >>> method({"scheme": {"scheme": "QR", "operation": "add"}}), method({"scheme": {"scheme": "GeneralizedQR"}})
    ('add', 'GeneralizedQR')
    """
    described = config["scheme"]
    name = str(described["scheme"])
    name = str(described.get("operation", "mult")) if name == "QR" else {"Full": "full", "Hash": "hash"}.get(name, name)
    how = ["plan" if config.get("plan") else name]
    how += [text.format(config[key]) for key, text in STORED.items() if config.get(key) not in (None, "float32")]
    return ", ".join(how)


def data(dataset: Dataset) -> str:
    """What is known about a dataset, in one line.

    >>> data(Dataset(name="a", identity="1", rows={"train": 1200, "test": 100}, num_dense=2, cardinalities=[30, 1000]))
    '1,200 train and 100 test rows; 2 dense and 2 categorical features with 1,030 categories'
    """
    *first, last = [f"{number:,} {split}" for split, number in dataset.rows.items()]
    rows = (", ".join(first) + " and " if first else "") + f"{last} rows"
    if not dataset.cardinalities:
        return rows
    num_dense, sizes = dataset.num_dense, dataset.cardinalities
    return f"{rows}; {num_dense} dense and {len(sizes)} categorical features with {sum(sizes):,} categories"
