"""A finished run as a model that scores raw rows."""

import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..data.batches import Batch
from ..data.encoding import read_encoding
from ..data.prepared import Prepared
from ..modules.lookup import Tables
from ..modules.quantize import quantize_
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
    >>> _ = train(RunConfig(data=data_identity(data), network="deepfm"), data, f"{folder}/run")
    >>> Scorer(f"{folder}/run")({"I1": [0.5, None], "C1": [3, 9], "C2": [999, 1]}).shape
    torch.Size([2])
    """

    def __init__(
        self, run: str | os.PathLike[str], *, unknown: Literal["error", "missing"] = "error", verify: bool = True
    ) -> None:
        if unknown not in ("error", "missing"):
            raise ValueError(f"unknown ({unknown!r}) must be 'error' or 'missing'")
        self.path = Path(run)
        if not (self.path / "run.json").exists():
            raise FileNotFoundError(f"{self.path} is not the folder of a run: run.json is missing")
        for name, reason in {RESULT: "the run is not finished", MODEL: "the run did not keep its model"}.items():
            if not (self.path / name).exists():
                raise FileNotFoundError(f"{self.path} has no {name}: {reason}")
        self.config = read_config(self.path / "run.json")
        self.encoding, self.texts = read_encoding(self.path / ENCODING, verify=verify)
        if self.encoding.data != self.config.data:
            raise ValueError(
                f"{self.path / ENCODING} is of other data ({self.encoding.data}) than the run ({self.config.data})"
            )
        model = read_model(self.path, self.config, len(self.encoding.dense), verify=verify)
        self.model: nn.Module = model.requires_grad_(False).eval()
        self._unknown = unknown
        self._encoder: Any = None

    @property
    def encoder(self) -> Any:
        """The ``Encoder`` that turns raw rows into batches. It is built, with its vocabularies, on first use."""
        if self._encoder is None:
            try:
                from ..data.encoder import Encoder
            except ModuleNotFoundError as error:
                raise ModuleNotFoundError(f'scoring raw rows needs {error.name}: pip install "quorem[data]"') from None

            self._encoder = Encoder(self.encoding, self.texts, unknown=self._unknown, policies=self.policies)
        return self._encoder

    @property
    def policies(self) -> dict[str, str]:
        """How the tables of columns treat unknown ids, ``"rest"`` or ``"hash"``, where that is no error."""
        tables = next(module for module in self.model.modules() if isinstance(module, Tables))
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
        return self.probabilities(self.encoder(rows))

    def probabilities(self, batch: Batch) -> Tensor:
        """The probability of a click for each row of an encoded batch."""
        return self.logits_of_rows(batch).sigmoid()

    def logits_of_rows(self, batch: Batch) -> Tensor:
        """Logits of any number of rows, a few at a time."""
        parts = [self.logits(part) for part in batch.batches(BATCH_ROWS)]
        return torch.cat(parts) if parts else torch.empty(0)

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """Logits ``[B]`` as float32, computed in the precision of the run's training."""
        return logits_of(self.model, batch, self.encoding.categorical, self.config.precision)

    def evaluate(self, prepared: Prepared, split: str = "test") -> Metrics:
        """The metrics on a split of the data on which the run was trained.

        Raises:
            ValueError: if the data are not those of the run, or there is no such split.
        """
        if (identity := data_identity(prepared)) != self.config.data:
            raise ValueError(
                f"{prepared.path} ({identity}) must be the data that {self.path} was trained on ({self.config.data}):"
                " other data number their tokens in another way"
            )
        evaluation = Evaluation()
        for batch in prepared.split(split).batches(BATCH_ROWS):
            evaluation.update(self.logits(batch), batch.labels)
        return evaluation.compute()

    def quantize_(self, bits: Literal[8, 4] = 8) -> "Scorer":
        """Store the rows of the tables in 8 or 4 bits per number (see ``quorem.quantize_``)."""
        quantize_(self.model, bits)
        return self
