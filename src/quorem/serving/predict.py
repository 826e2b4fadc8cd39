"""``quorem predict``: score a file of any size, a block at a time."""

import io
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import torch

from ..data import criteo, shape
from ..data.batches import Batch, ahead
from ..data.folder import ProgressCallback
from ..data.malformed import Malformed
from ..data.source import LABEL, Source, open_source
from ..data.text import TextFile
from ..files.atomic import replacing
from ..training.metrics import Evaluation, Metrics
from .scorer import Scorer

BLOCK_BYTES = 1 << 22  # bytes of text; a few blocks are in memory at a time, each about ten times as large as its text


class Predicted(NamedTuple):
    """What ``predict`` counted."""

    rows: int
    malformed: int  # lines that were left out
    unseen: dict[str, int]  # by column, values that no training row has
    seconds: float
    metrics: Metrics | None  # None without labels


def predict(
    scorer: Scorer,
    file: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    label: str | None = None,
    max_malformed: int = 0,
    progress: ProgressCallback | None = None,
) -> Predicted:
    """Write the probability of a click for every row of a file, in order, a block at a time.

    Args:
        scorer: the scorer of a run.
        file: CSV with a header line (plain or gzip) or Parquet, with the columns of the file that was prepared; fields
            may have another separator. For a run on Criteo's file, also a file in its format, with or without labels.
        out: file to write, atomically: Parquet if its name ends in ``.parquet``, else CSV. It holds the number and the
            probability of each line (of a Parquet file: row). Numbers start at 1, and the header line counts.
        label: column of labels, as in the data that were prepared, to compute the metrics; None if there is none.
        max_malformed: number of malformed lines that may be left out; with one more, it stops.
        progress: called with the stage, the fraction of it that is done, and the rows so far.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if a column is missing, a value is unknown, too many lines are malformed, or ``out`` is ``file``.
        OSError: if the disk is full; an existing file is kept.

    >>> import tempfile
    >>> from quorem.data import ClickLog, synthesize
    >>> from quorem.training.config import RunConfig
    >>> from quorem.training.loop import train
    >>> from quorem.training.model import data_identity
    >>> folder = tempfile.mkdtemp()
    >>> data = synthesize(ClickLog(cardinalities=(10, 1000), num_dense=1), 300, f"{folder}/log")
    >>> _ = train(RunConfig(data=data_identity(data)), data, f"{folder}/run")
    >>> _ = Path(folder, "rows.csv").write_text("I1,C1,C2\\n0.5,3,999\\n,9,1\\n")
    >>> predict(Scorer(f"{folder}/run"), f"{folder}/rows.csv", f"{folder}/scores.csv").rows
    2
    """
    source, began, meta = Path(file), time.perf_counter(), scorer.encoding.meta
    opened = open_source(source, None, meta.columns.categorical[0], BLOCK_BYTES, meta.separator)
    if Path(out).exists() and os.path.samefile(source, out):
        raise ValueError(f"out ({out}) must be another file than the one that is scored")
    unit, evaluation = opened.unit, Evaluation()
    malformed = Malformed(source.name, max_malformed, unit)
    counted, before = 0, Counter(scorer.encoder.unseen_counts)

    def frames() -> Iterator[pl.DataFrame]:
        nonlocal counted
        for numbers, batch, done in ahead(_encoded(scorer, opened, label, malformed)):
            logits = scorer.logits_of_rows(batch)
            if label is not None:
                evaluation.update(logits, batch.labels)
            probability = pl.Series("probability", logits.sigmoid().numpy())
            counted += len(batch)
            if progress is not None:
                progress("score", done, counted)
            yield pl.DataFrame([pl.Series(unit, numbers), probability])

    with replacing(out) as sink:
        if Path(out).suffix == ".parquet":
            empty = pl.DataFrame(schema={unit: pl.Int64, "probability": pl.Float32})
            buffer = io.BytesIO()  # in memory, 12 bytes per row: Polars writes a Parquet file at once
            pl.concat([empty, *frames()]).write_parquet(buffer)
            sink.write(buffer.getbuffer())
        else:
            sink.write(f"{unit},probability\n".encode())
            for frame in frames():
                frame.write_csv(sink, include_header=False)
    unseen = dict(Counter(scorer.encoder.unseen_counts) - before)
    metrics = evaluation.compute() if label is not None and counted else None
    return Predicted(counted, malformed.count, unseen, time.perf_counter() - began, metrics)


def _encoded(
    scorer: Scorer, source: Source, label: str | None, malformed: Malformed
) -> Iterator[tuple[Any, Batch, float]]:
    """Line numbers, encoded rows and the fraction of the file that is done."""
    columns = replace(scorer.encoding.meta.columns, label=label)
    features = (*columns.dense, *columns.categorical)
    is_criteo = features == shape.COLUMN_NAMES[1:] and not set(features) <= set(source.schema)
    if is_criteo and isinstance(source.content, TextFile):
        source = criteo.criteo_source(source.content)
        columns = replace(columns, label="label" if label is not None else None)
    for frame, numbers, done in ahead(source.rows(columns, scorer.encoding.meta.transforms, malformed)):
        batch = scorer.encoder.encode(frame)
        if LABEL in frame.columns:
            batch = replace(batch, labels=torch.from_numpy(frame[LABEL].to_numpy().copy()))
        yield numbers, batch, done
