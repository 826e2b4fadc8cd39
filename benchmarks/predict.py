"""How many rows a second a finished run scores, by part: reading, encoding, lookup, layers, and ``quorem predict``.

``serving.py`` measures it and writes the result.

A log of Criteo's shape is made up as text, prepared and trained on for a moment (its loss does not matter); then the
same text is scored. ``floor`` is the time of the network's matrix products alone, in one product each, without
activations: no program that computes them in float32 on the same cores is faster.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import quorem
from quorem.data.config import PrepareConfig
from quorem.data.criteo import COLUMNS, criteo_source, prepare_criteo
from quorem.data.malformed import Malformed
from quorem.data.raw import write_raw
from quorem.data.shape import scaled_cardinalities
from quorem.data.synthetic import ClickLog
from quorem.data.table import read_columns
from quorem.data.text import TextFile
from quorem.serving.predict import predict
from quorem.serving.scorer import BATCH_ROWS, Scorer
from quorem.training.config import RunConfig
from quorem.training.loop import train
from quorem.training.model import data_identity


def measure(folder: Path, rows: int, scale: float, repeat: int) -> dict[str, Any]:
    log = ClickLog(cardinalities=scaled_cardinalities(scale))
    write_raw(log, rows, folder / "log.txt")
    data = prepare_criteo(folder / "log.txt", folder / "log", PrepareConfig(days=7))
    config = RunConfig(data=data_identity(data), scheme=quorem.QR(4), max_rows=1024)
    train(config, data, folder / "run")
    result: dict[str, Any] = {"rows": rows, "scale": scale, "ids": sum(data.cardinalities), "rows_per_second": {}}

    def note(name: str, work: Callable[[], object], counted: int = rows) -> None:
        times = []
        for _ in range(repeat):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        result["rows_per_second"][name] = round(counted / min(times))

    batch = data.all.rows(0, min(rows, 16 * BATCH_ROWS))
    for bits in (0, 8, 4):
        scorer = Scorer(folder / "run")
        if bits:
            scorer.quantize_(bits)
        title = f"int{bits}" if bits else "float32"
        assert scorer.encoder is not None
        note(f"predict {title}", lambda scorer=scorer: predict(scorer, folder / "log.txt", folder / "scores.csv"))
        note(f"model {title}", lambda scorer=scorer: scorer.probabilities(batch), len(batch))
        note(f"lookup {title}", lambda scorer=scorer: lookup(scorer, batch), len(batch))

    def read() -> list[Any]:
        source = criteo_source(TextFile(folder / "log.txt"))
        return [rows.frame for rows in read_columns(source, COLUMNS, Malformed("log.txt", 0))]

    frames = read()
    note("read", read)
    note("encode", lambda: [scorer.encoder(frame) for frame in frames])
    note("floor", products(scorer.model), BATCH_ROWS)
    return result


def lookup(scorer: Scorer, batch: Any) -> None:
    with torch.no_grad():
        for part in batch.batches(BATCH_ROWS):
            scorer.model.embeddings(part.ids)


def products(model: Any) -> Callable[[], object]:
    """The matrix products of DLRM for a batch: each layer's, and the dot products of all pairs."""
    widths = [
        [model.num_dense, *(layer.out_features for layer in model.bottom if hasattr(layer, "out_features"))],
        [model.top[0].in_features, *(layer.out_features for layer in model.top if hasattr(layer, "out_features")), 1],
    ]
    layers = [(torch.rand(BATCH_ROWS, i), torch.rand(i, o)) for sizes in widths for i, o in pairwise(sizes)]
    vectors = torch.rand(BATCH_ROWS, model.num_vectors, model.embedding_dim)

    def work() -> object:
        return [torch.mm(x, w) for x, w in layers], torch.bmm(vectors, vectors.mT)

    return work
