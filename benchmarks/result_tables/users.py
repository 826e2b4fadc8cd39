"""What a user does: first minutes, other libraries' models, fits, and serving."""

from .files import machine, markdown, results, short


def first_minutes() -> str:
    """Seconds of each step of a newcomer."""
    result = results("first_minutes")
    steps = result["steps"]
    table = sum(steps[name]["seconds"] for name in ("prepare", "train", "predict"))
    demo = steps["demo"]
    rows = [
        ("`pip install`, packages within reach", f"{steps['install']['seconds']:.0f} s"),
        ("`quorem --help`", f"{steps['help']['seconds']:.1f} s"),
        ("first vectors and gradients, CPU kernels compiled", f"{steps['first vectors']['seconds']:.0f} s"),
        ("the same in the next process", f"{steps['first vectors, again']['seconds']:.0f} s"),
        ("`quorem demo`: first line, whole", f"{demo['first_line_s']:.0f} s, {demo['seconds']:.0f} s"),
        ("your own CSV of 10,000 rows: prepared, trained, scored", f"{table:.0f} s"),
    ]
    return machine(result) + markdown(("step", "wait"), *rows)


def foreign_models() -> str:
    """Models of other libraries before and after ``compress_``, from ``foreign_models.json``."""
    head = ("model", "loss at first", "before", "after", "MB before", "MB after")
    rows = []
    for row in results("foreign_models")["rows"]:
        losses = [f"{row[key]:.3f}" for key in ("first_loss", "loss_before", "loss_after")]
        rows.append((row["model"], *losses, *(f"{row[key] / 1e6:.1f}" for key in ("bytes_before", "bytes_after"))))
    return markdown(head, *rows)


def fine_tune() -> str:
    """Test log loss of a trained model that is compressed, and of one that is compressed first."""
    rows = {row["scheme"]: row for row in results("fine_tune")["rows"]}
    full = rows.pop("full")
    head = ("tables", "times smaller", "fitted at 90%", "then the last 10%", "from scratch: first 10%", "all rows")
    keys = ("fitted at 90%", "fitted at 100%", "scratch at 10%", "scratch at 100%")

    def loss(entry: dict[str, float]) -> str:
        return f"{entry['mean']:.4f} ± {entry['deviation']:.4f}"

    lines = [("full", "1", loss(full["at 90%"]), loss(full["at 100%"]), "", "")]
    for name, row in rows.items():
        lines.append((name, f"{row['times smaller']['mean']:.1f}", *(loss(row[key]) for key in keys)))
    return markdown(head, *lines)


def fits() -> str:
    """Time and memory of fits, from ``fit.json``."""
    head = ("scheme", "frequencies", "seconds", "CPU seconds", "MB beside the tables")
    rows = []
    for row in results("fit")["rows"]:
        numbers = (f"{row['seconds']:.0f}", f"{row['cpu_seconds']:.0f}", f"{row['extra_mb']}")
        rows.append((f"`{row['scheme']}`", "yes" if row["frequencies"] else "no", *numbers))
    return markdown(head, *rows)


def serve_load() -> str:
    """Latencies of ``examples/serve.py`` on loopback."""
    rows = [("rows of a request", "clients", "p50", "p99", "rows a second", "p50 without HTTP")]
    for case in results("serve")["cases"]:
        times = [f"{short(ms)} ms" for ms in (case["p50_ms"], case["p99_ms"], case["in_process"]["p50_ms"])]
        rows.append((str(case["rows"]), str(case["clients"]), *times[:2], f"{case['rows_per_second']:,}", times[2]))
    return markdown(*rows)


def serve_onnx() -> str:
    """Exported lookups against the same written by hand."""
    rows = [("bits", "B", "exported", "by hand", "ratio")]
    for case in results("serving")["onnx"]:
        times = [f"{short(case[name])} us" for name in ("exported_us", "by_hand_us")]
        rows.append((str(case["bits"]), str(case["batch"]), *times, f"{case['ratio']:.2f}"))
    return markdown(*rows)
