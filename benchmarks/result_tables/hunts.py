"""What the scripts of ``tests/hunt`` hunt."""

from .files import markdown, results

DAMAGED = {
    "raw ids": "any file of prepared data with raw ids, by `quorem inspect --verify` and training",
    "models": "saved models with hot and cold ids, a pool, raw ids, rows in 8 and 4 bits, by `quorem.load`",
    "prepared": "arrays of prepared data, by training",
    "meta": "`meta.json` of prepared data, by training",
    "verified": "any file of prepared data, by `quorem inspect --verify`",
    "checkpoint": "a checkpoint, by going on with the run",
    "stopped": "`run.json`, `metrics.jsonl` of a stopped run, by going on",
    "finished": "any file of a finished run",
    "sweep": "plans, results and metrics of a sweep, by `quorem report`",
    "figure": "the numbers of a figure, by `quorem report`",
    "config": "a configuration as JSON",
    "csv": "a CSV file, by `quorem prepare table`",
    "gzip": "the same, packed",
    "parquet": "the same, as Parquet",
    "criteo": "Criteo's text, by `quorem prepare criteo`",
}


def damaged_files() -> str:
    """What came of files that ``tests/hunt/damage.py`` damaged."""
    hunt = results("hunt/damage")
    kinds = ("told", "same", "changed")
    wrong = ("wrong", "unnamed", "traceback", "hang", "executed")
    rows = []
    for name, outcomes in [*hunt["by_target"].items(), ("all", hunt["outcomes"])]:
        counts = [outcomes.get(kind, 0) for kind in kinds] + [sum(outcomes.get(kind, 0) for kind in wrong)]
        rows.append((DAMAGED.get(name, "**all**"), f"{sum(counts):,}", *map(str, counts)))
    return markdown(("what is damaged, and who reads it", "files", "told", "same", "changed", "wrong"), *rows)


def kills() -> str:
    """What came of processes that ``tests/hunt/kills.py`` killed."""
    hunt = results("hunt/kills")
    rows = []
    for name, job in hunt["jobs"].items():
        bad = sum(text.startswith(f"{name}: ") for text in hunt["bad"])
        rows.append((f"`{name}`", f"{job['kills']}", f"{job['ends']}", f"{bad}"))
    ends = sum(job["ends"] for job in hunt["jobs"].values())
    rows.append(("**all**", f"{hunt['kills']}", f"{ends}", f"{len(hunt['bad'])}"))
    return markdown(("command", "kills", "ends", "lost, or wrong"), *rows)


def drawn_lookups() -> str:
    """What came of the lookups that ``tests/hunt/lookups.py`` drew."""
    hunt = results("hunt/lookups")
    kinds: dict[str, list[int]] = {}
    for name, count in hunt["lookups_by_kind"].items():
        kinds.setdefault(name.split()[0], []).append(count)
    bad = [sum(text.startswith(name + "(") for text in hunt["bad"]) for name in kinds]
    rows = [(f"`{name}`", f"{sum(counts):,}", f"{b}") for (name, counts), b in zip(kinds.items(), bad, strict=True)]
    rows.append(("**all**", f"{hunt['lookups']:,} in {hunt['modules']:,} modules", f"{len(hunt['bad'])}"))
    return markdown(("module", "lookups", "wrong"), *rows)


def drawn_steps() -> str:
    """What came of the steps that ``tests/hunt/steps.py`` drew."""
    hunt = results("hunt/steps")
    rows = [
        (name, f"{count:,}", f"{sum(text.startswith(name) for text in hunt['bad'])}")
        for name, count in hunt["by_rule"].items()
    ]
    rows.append(("**all**", f"{hunt['steps']:,}", f"{len(hunt['bad'])}"))
    return markdown(("optimizer", "steps", "wrong"), *rows)
