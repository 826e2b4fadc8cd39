"""A finished run as a model that scores raw rows; and ``quorem.load``, which loads it, or a saved file."""

import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..checks import check_choice
from ..data.batches import Batch
from ..data.encoding import read_encoding
from ..data.prepared import Prepared, tokens_of
from ..files import saved_model
from ..files.atomic import write
from ..modules.lookup import tables_in
from ..training.metrics import Evaluation, Metrics
from ..training.model import data_identity, logits_of
from ..training.run import ENCODING, MODEL, RESULT, read_config, read_model

BATCH_ROWS = 4096  # so few that the activations fit in a CPU's cache


class Scorer:
    """The model of a run, which computes probabilities from raw rows.

    Args:
        run: the folder of a finished run.
        unknown: how a token that is not in the vocabulary is treated: ``"error"``, or ``"missing"``, as a missing
            value. It has no effect if the data have an id for unknown tokens, or the table has a policy for them
            (``RunConfig.unknown``).
        verify: compare every file with its checksums.

    Raises:
        FileNotFoundError: if there is no such folder, the run is not finished, or it did not keep its model.
        ValueError: if a file is damaged, or ``unknown`` has another value.

    >>> import tempfile
    >>> from quorem.data import ClickLog, synthesize
    >>> from quorem.training.config import RunConfig
    >>> from quorem.training.loop import train
    >>> folder = tempfile.mkdtemp()
    >>> data = synthesize(ClickLog(cardinalities=(10, 1000), num_dense=1), 300, f"{folder}/log")
    >>> _ = train(RunConfig(data=data_identity(data)), data, f"{folder}/run")
    >>> Scorer(f"{folder}/run")({"I1": [0.5, None], "C1": [3, 9], "C2": [999, 1]}).shape
    torch.Size([2])
    """

    def __init__(
        self, run: str | os.PathLike[str], *, unknown: Literal["error", "missing"] = "error", verify: bool = True
    ) -> None:
        check_choice("unknown", unknown, Literal["error", "missing"])
        self.path = Path(run)
        if not (self.path / "run.json").exists():
            raise FileNotFoundError(f"{self.path} is not the folder of a run: run.json is missing")
        for name, reason in {RESULT: "the run is not finished", MODEL: "the run did not keep its model"}.items():
            if not (self.path / name).exists():
                raise FileNotFoundError(f"{self.path} has no {name}: {reason}")
        self.config = read_config(self.path / "run.json")
        self.encoding, self.texts = read_encoding(self.path / ENCODING, verify=verify)
        if (data := self.encoding.data) != self.config.data:
            raise ValueError(f"{self.path / ENCODING} is of other data ({data}) than the run ({self.config.data})")
        model = read_model(self.path, self.config, len(self.encoding.meta.columns.dense), verify=verify)
        self.model: nn.Module = model.requires_grad_(False).eval()
        self._unknown = unknown

    @cached_property
    def encoder(self) -> Any:
        """The ``Encoder`` that turns raw rows into batches. It is built, with its vocabularies, on first use."""
        try:
            from ..data.encoder import Encoder
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f'scoring raw rows needs {error.name}: pip install "quorem[data]"') from None
        return Encoder(self.encoding, self.texts, unknown=self._unknown, policies=self.policies)

    @property
    def policies(self) -> dict[str, str]:
        """How the tables of columns treat unknown ids, ``"rest"`` or ``"hash"``, where that is no error."""
        tables = tables_in(self.model)[0]
        columns = zip(tables.features, tables.table_of, strict=True)
        return {name: tables.unknown[t] for name, t in columns if tables.unknown[t] != "error"}

    def __call__(self, rows: Any) -> Tensor:
        """The probability of a click for each row, float32 ``[N]``.

        Args:
            rows: values by column: strings or numbers, or lists of them in columns with several values per row; None
                if a value is missing. Or a data frame (Polars, Arrow, pandas).

        Raises:
            TypeError: if ``rows`` is neither a mapping nor a data frame.
            ValueError: if a column is missing, or has values of the wrong type or an unknown value.
        """
        return self.logits_of_rows(self.encoder(rows)).sigmoid()

    def logits_of_rows(self, batch: Batch) -> Tensor:
        """Logits of any number of rows, a few at a time."""
        parts = [self.logits(part) for part in batch.batches(BATCH_ROWS)]
        return torch.cat(parts) if parts else torch.empty(0)

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """Logits ``[B]`` as float32, computed in the precision of the run's training."""
        return logits_of(self.model, batch, self.encoding.meta.columns.categorical, self.config.precision)

    def evaluate(self, prepared: Prepared, split: str = "test") -> Metrics:
        """The metrics on a split of the data on which the run was trained.

        Raises:
            ValueError: if the data are not those of the run, or there is no such split.
        """
        if (identity := data_identity(prepared)) != self.config.data:
            rule = f"must be the data that {self.path} was trained on ({self.config.data})"
            raise ValueError(f"{prepared.path} ({identity}) {rule}: other data number their tokens in another way")
        rows, evaluation = prepared.split(split), Evaluation()
        evaluation.update(self.logits_of_rows(rows), rows.labels)
        return evaluation.compute()


def load(
    path: str | os.PathLike[str],
    *,
    unknown: Literal["error", "missing"] = "error",
    verify: bool = True,
) -> nn.Module | Scorer:
    """The module or network that ``save`` wrote; for the folder of a run, a ``Scorer`` that scores raw rows.

    The parameters are views of the mapped file; memory is copied only where they are written to.

    Args:
        path: path of the file, or of the folder of a finished run.
        unknown: for a run, how a token that is not in the vocabulary is treated if the data have no id for unknown
            tokens: ``"error"``, or ``"missing"``, as a missing value.
        verify: compare every tensor with its checksum, which reads the file once; False maps the file and reads
            nothing.

    Raises:
        FileNotFoundError: if there is no such file, or the run is not finished.
        ValueError: if a file is cut off, damaged, or of another kind or version.

    >>> import quorem, tempfile
    >>> path = tempfile.mkdtemp() + "/items.safetensors"
    >>> quorem.save(quorem.EmbeddingBag(1000, 16, quorem.QR(4)), path)
    >>> load(path).num_parameters
    4064
    """
    if not Path(path).is_dir():
        if unknown != "error":
            raise ValueError(f"unknown ({unknown!r}) must be 'error' for a file: only a run has a vocabulary")
        return saved_model.load(path, verify=verify)
    return Scorer(path, unknown=unknown, verify=verify)


def write_row_rules(path: str | os.PathLike[str], scorer: Scorer, *, jagged: bool) -> None:
    """Write the JSON file beside an exported run: how a row of raw values becomes the inputs of the graph.

    ``examples/encode_row.py`` follows it in plain Python, and ``docs/serve.md`` describes the fields. ``jagged`` says
    whether the graph takes bags by offsets.
    """
    meta, columns = scorer.encoding.meta, scorer.encoding.meta.columns
    categorical = []
    for name, size in zip(columns.categorical, meta.cardinalities, strict=True):
        column: dict[str, Any] = {"name": name, "size": size, "multi": name in columns.bags}
        policy = scorer.policies.get(name)
        column["unknown"] = meta.unknown_id if policy is None else {"rest": -1, "hash": "hash"}[policy]
        if meta.has_vocabularies:
            column["vocabulary"] = tokens_of(scorer.texts[name].numpy().tobytes())
        categorical.append(column)
    rules = {
        "format": "quorem-row-rules",
        "format_version": 1,
        "jagged": jagged,
        "dense": [{"name": name, "transform": meta.transforms[name]} for name in columns.dense],
        "categorical": categorical,
        "ids": "vocabulary" if meta.has_vocabularies else "none",
        "first_token": meta.first_token_id or 0,
        "missing": ["", *columns.missing],
        "missing_id": 0,
        "missing_number": 0.0,
        "separator": meta.separator,
        "multi_separator": columns.multi_separator,
    }
    write(path, json.dumps(rules, indent=1, ensure_ascii=False) + "\n")
