"""``quorem train``: one run on the terminal."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .. import schemes
from ..data.batches import Prepared
from ..schemes import Scheme
from ..training.config import RunConfig
from ..training.loop import Options, stop_on_signal, train
from ..training.tables import METHODS, scheme_of
from .watch import watching


def scheme_from(text: str, num_collisions: int = 4) -> Scheme:
    """A scheme by the paper's name for its method, or by its JSON.

    Raises:
        ValueError: if it is neither.

    >>> scheme_from("hash", 60) == scheme_of("hash", 60), scheme_from('{"scheme": "Full"}')
    (True, Full())
    """
    if text.startswith("{"):
        return schemes.from_json(text)
    if text not in METHODS:
        known = ", ".join(map(repr, METHODS))
        raise ValueError(
            f"scheme ({text!r}) must be one of {known}, or JSON such as '{schemes.to_json(schemes.QR(4))}'"
        )
    return scheme_of(text, num_collisions)


def run(
    config: RunConfig,
    prepared: Prepared,
    out: Path,
    *,
    device: str,
    threads: int | None = None,
    deterministic: bool = False,
    checkpoint_seconds: float = 60,
    tensorboard: bool = False,
    console: Console,
) -> dict[str, Any]:
    """Train, watch and sum up; goes on from where an earlier attempt in ``out`` was interrupted.

    Args:
        config: of the run.
        prepared: its data.
        out: the run's folder.
        device: where to train.
        threads: of torch; None leaves them as they are.
        deterministic: use torch's deterministic algorithms.
        checkpoint_seconds: least time between two checkpoints.
        tensorboard: write metrics for TensorBoard too.
        console: for progress and results.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if deterministic:
        torch.use_deterministic_algorithms(True)
    with stop_on_signal() as stop, watching(console, {config: config.network}) as report:
        options = Options(checkpoint_seconds=checkpoint_seconds, report=report, tensorboard=tensorboard)
        try:
            result = train(config, prepared, out, device=device, options=options, stop=stop)
        except KeyboardInterrupt:
            console.print(f"Interrupted; the same command goes on from the checkpoint in {out}", highlight=False)
            raise
    for split in ("validation", "test"):
        found = result[split]
        console.print(
            f"{split}: log loss {found['log_loss']:.5f}, AUC {found['auc']:.5f}, accuracy {found['accuracy']:.4f},"
            f" calibration {found['calibration']:.4f}",
            highlight=False,
        )
    console.print(
        f"{result['parameters']:,} parameters, {result['embedding_bytes'] / 1e6:,.2f} MB of tables,"
        f" {result['rows_per_second']:,.0f} rows/s; {out / 'result.json'}",
        highlight=False,
    )
    return result
