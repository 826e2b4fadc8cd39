"""The JSON file beside an exported model: how a row of raw values becomes the inputs of the graph.

``examples/encode_row.py`` follows it in plain Python, and ``docs/serve.md`` describes the fields.
"""

import json
import os
from typing import Any

from ..data.prepared import tokens_of
from ..files.atomic import write
from .scorer import Scorer


def row_rules(scorer: Scorer, *, jagged: bool) -> dict[str, Any]:
    """The rules of a run's columns.

    Args:
        scorer: the run.
        jagged: whether the graph takes bags by offsets.
    """
    encoding = scorer.encoding
    columns = []
    for name, size in zip(encoding.categorical, encoding.cardinalities, strict=True):
        column: dict[str, Any] = {"name": name, "size": size, "multi": name in encoding.bags}
        policy = scorer.policies.get(name)
        column["unknown"] = encoding.unknown if policy is None else {"rest": -1, "hash": "hash"}[policy]
        if encoding.ids == "vocabulary":
            column["vocabulary"] = tokens_of(scorer.texts[name].numpy().tobytes())
        columns.append(column)
    return {
        "format": "quorem-row-rules",
        "format_version": 1,
        "jagged": jagged,
        "dense": [{"name": name, "transform": encoding.transforms[name]} for name in encoding.dense],
        "categorical": columns,
        "ids": encoding.ids,
        "first_token": encoding.first_token,
        "missing": ["", *encoding.missing],
        "missing_id": 0,
        "missing_number": 0.0,
        "separator": encoding.separator,
        "multi_separator": encoding.multi_separator,
    }


def write_row_rules(path: str | os.PathLike[str], scorer: Scorer, *, jagged: bool) -> None:
    """Write ``row_rules`` as JSON.

    Raises:
        OSError: if the disk is full; an existing file is kept.
    """
    write(path, json.dumps(row_rules(scorer, jagged=jagged), indent=1, ensure_ascii=False) + "\n")
