"""The command: choose grids by the options, write rows as they are measured, then draw a plot."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from . import report
from .facts import facts_of_run
from .grid import PRESETS, PROVIDERS, Axes, Grid
from .run import rows as measured


def chosen(preset: str | None, device: torch.device, named: Axes) -> tuple[Grid, ...]:
    """The grids of ``preset``, with the ``named`` axes replaced.

    Without a preset, it is ``"full"`` if an axis is named, else the preset of the device.

    Raises:
        ValueError: if a preset, or a value on an axis, is unknown.
    """
    if preset is None:
        preset = "full" if named else "h200" if device.type == "cuda" else "cpu"
    if preset not in PRESETS:
        raise ValueError(f"preset ({preset!r}) must be one of {', '.join(PRESETS)}")
    if not named:
        return PRESETS[preset]
    return tuple(dataclasses.replace(grid, limits=(), **named) for grid in PRESETS[preset])


def run(
    grids: Sequence[Grid],
    device: torch.device,
    *,
    name: str,
    out: Path | None,
    plot: Path | None,
    quick: bool,
    command: str,
    commit: str | None,
    say: Callable[[str], None],
    show: Callable[[report.Row], None],
) -> list[report.Row]:
    """Measure, and write ``name``.csv and ``name``.png into ``out``; on Ctrl-C with the finished rows.

    ``say`` is called with lines of progress, and ``show`` with each row.
    """
    file = None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        file = out / f"{name}.csv"
        file.unlink(missing_ok=True)
        plot = plot or out / f"{name}.png"
    done: list[report.Row] = []
    try:
        for row in measured(grids, device, quick=quick, say=say, facts=facts_of_run(device, command, commit)):
            done.append(row)
            show(row)
            if file is not None:
                report.append(file, [row])
    finally:
        if plot is not None and done:
            plot.parent.mkdir(parents=True, exist_ok=True)
            report.plot(done, plot)
    return done


def check_folder(option: str, folder: Path) -> None:
    """Check that files can be written in a folder, which need not exist.

    Raises:
        OSError: if they cannot.
    """
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"{option} ({folder}) must be a folder, and {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"{option} ({folder}) must be a folder that can be written, and {existing} cannot")


def selected(rows: Sequence[report.Row], named: Axes) -> tuple[list[report.Row], list[str]]:
    """The rows that match every ``named`` axis, and the named providers without any row.

    Raises:
        ValueError: if no row has a named value; a known provider may have no rows.
    """
    measured_providers = {row.provider for row in rows}
    absent = [p for p in named.get("provider", ()) if p in PROVIDERS and p not in measured_providers]
    for axis, chosen_values in named.items():
        values = [value for value in chosen_values if value not in absent]
        measured_values = dict.fromkeys(getattr(row, axis) for row in rows)
        for value in values:
            if value not in measured_values:
                shown = ", ".join(map(str, measured_values))
                raise ValueError(f"{axis} ({value!r}) must be one that was measured: {shown}")
        rows = [row for row in rows if getattr(row, axis) in values]
    return list(rows), absent
