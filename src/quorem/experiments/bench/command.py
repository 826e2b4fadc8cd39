"""The command: choose grids by the options, check the kernels, write rows as they are measured, then draw a plot."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from . import check, report
from .facts import facts_of_run
from .grid import PRESETS, PROVIDERS, Axes, Grid
from .run import rows as measured


class WrongKernelsError(RuntimeError):
    """A kernel test failed, or a kernel differs from the reference."""


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
    quick_check: bool,
    command: str,
    commit: str | None,
    console: Console,
) -> list[report.Row]:
    """Check, measure, and write ``name``.csv and ``name``.png into ``out``; on Ctrl-C with the finished rows.

    Raises:
        WrongKernelsError: if the check fails; nothing is measured.
        OSError: if ``out`` or the folder of ``plot`` cannot be written; raised before anything is measured.
    """
    for option, folder in (("out", out), ("plot", plot and plot.parent)):
        if folder is not None:
            check_folder(option, folder)
    done: list[report.Row] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("checking the kernels", total=None)
        wrong = check.kernels_are_wrong(device, quick_check)
        if wrong is not None:
            raise WrongKernelsError(f"the kernels are wrong, so nothing is measured:\n{wrong}")

        def say(line: str) -> None:
            progress.update(task, description=line)
            console.print(line, soft_wrap=True)

        file = None
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            file = out / f"{name}.csv"
            file.unlink(missing_ok=True)
            plot = plot or out / f"{name}.png"
        facts = facts_of_run(device, command, commit)
        try:
            for row in measured(grids, device, quick=quick, say=say, facts=facts):
                done.append(row)
                if file is not None:
                    report.append(file, [row])
                where = "graph" if row.graph else "eager"
                progress.update(
                    task, description=f"{row.mode} B={row.batch} {row.provider} {where}: {row.median_us} us"
                )
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
