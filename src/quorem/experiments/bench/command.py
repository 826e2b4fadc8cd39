"""The command: options to grids, the check before, rows to files as they come, tables and a plot after."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from . import check, report
from .facts import facts_of_run
from .grid import PRESETS, SCHEMES, Grid
from .run import rows as measured

# The options of the command by axis of a grid.
AXES = {
    "mode": "modes",
    "provider": "providers",
    "scheme": "schemes",
    "ids": "ids",
    "batch": "batches",
    "dim": "dims",
}


class WrongKernelsError(RuntimeError):
    """A kernel test failed, or a kernel differs from the reference."""


def chosen(preset: str | None, device: torch.device, options: Mapping[str, Sequence[Any]]) -> tuple[Grid, ...]:
    """The grids of ``preset``, with the axes that options name replaced.

    Without a preset: all of the grid where an option names an axis, else the preset of the device.

    Raises:
        ValueError: if a preset, or a value on an axis, is unknown.
    """
    given = {AXES[option]: tuple(values) for option, values in options.items() if values}
    if "schemes" in given:
        given["schemes"] = tuple(scheme_named(name) for name in given["schemes"])
    if preset is None:
        preset = "full" if given else "h200" if device.type == "cuda" else "cpu"
    if preset not in PRESETS:
        raise ValueError(f"preset ({preset!r}) must be one of {', '.join(PRESETS)}")
    if given:
        given["limits"] = ()
    return tuple(dataclasses.replace(grid, **given) for grid in PRESETS[preset])


def scheme_named(name: str) -> str:
    """The scheme whose name starts so, in any case.

    >>> scheme_named("qr"), scheme_named("chinese")
    ('QR(4)', 'ChineseRemainder(3)')
    """
    found = [scheme for scheme in SCHEMES if scheme.lower().startswith(name.lower())]
    if len(found) != 1:
        raise ValueError(f"scheme ({name!r}) must be the start of one of {', '.join(SCHEMES)}")
    return found[0]


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
    """Check, measure, and write ``name``.csv and ``name``.png into ``out``; on Ctrl-C with what is finished.

    Raises:
        WrongKernelsError: then nothing is measured.
    """
    done: list[report.Row] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("checking the kernels", total=None)
        wrong = check.kernels_are_wrong(device, quick_check)
        if wrong is not None:
            raise WrongKernelsError(f"the kernels are wrong, so nothing is measured:\n{wrong}")

        def say(line: str) -> None:
            progress.update(task, description=line)
            console.print(line, highlight=False, markup=False, soft_wrap=True)

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
                report.plot(done, plot)
    return done


def selected(rows: Sequence[report.Row], options: Mapping[str, Sequence[Any]]) -> list[report.Row]:
    """The rows that have one of the values of each option.

    Raises:
        ValueError: if no row has a value that an option names.
    """
    given = {option: set(values) for option, values in options.items() if values}
    if "scheme" in given:
        given["scheme"] = {scheme_named(name) for name in given["scheme"]}
    for option, values in given.items():
        known = dict.fromkeys(getattr(row, option) for row in rows)
        for value in sorted(values - known.keys(), key=str):
            raise ValueError(f"{option} ({value!r}) must be one that was measured: {', '.join(map(str, known))}")
    return [row for row in rows if all(getattr(row, option) in values for option, values in given.items())]
