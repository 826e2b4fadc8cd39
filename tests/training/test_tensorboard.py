"""What TensorBoard shows is what ``metrics.jsonl`` holds, however often the run was interrupted."""

import json

import pytest
from runs_of_training import StopAt, small_log, small_run

from quorem.training.loop import Options, train

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="needs TensorBoard: pip install tensorboard"
)


def shown(folder) -> dict[str, dict[int, float]]:
    """Scalars by tag and step, as TensorBoard reads them."""
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    scalars = {}
    for tag in events.Tags()["scalars"]:
        steps = [event.step for event in events.Scalars(tag)]
        assert steps == sorted(set(steps)), tag
        scalars[tag] = {event.step: event.value for event in events.Scalars(tag)}
    return scalars


def logged(folder) -> dict[str, dict[int, float]]:
    scalars: dict[str, dict[int, float]] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        for name, value in line.items():
            if name == "loss":
                scalars.setdefault("train/loss", {})[line["step"]] = value
            elif isinstance(value, dict):
                for key, number in value.items():
                    scalars.setdefault(f"{name}/{key}", {})[line["step"]] = number
    return scalars


def test_tensorboard_shows_the_metrics(tmp_path):
    log = small_log(tmp_path / "log", 20_000)
    config = small_run(log, validate_every=50)
    options = Options(tensorboard=True, checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        train(config, log, tmp_path / "run", options=options, stop=StopAt(170))
    (tmp_path / "run" / "checkpoints").mkdir(exist_ok=True)
    for newest in sorted((tmp_path / "run" / "checkpoints").iterdir())[-1:]:
        newest.unlink()  # so that some steps are taken again
    train(config, log, tmp_path / "run", options=options)
    scalars, expected = shown(tmp_path / "run"), logged(tmp_path / "run")
    assert scalars.keys() == expected.keys() and "validation/auc" in scalars and "train/loss" in scalars
    for tag, values in expected.items():
        assert scalars[tag] == pytest.approx(values, rel=1e-6), tag
