"""Runs of training: steps and epochs on a GPU and a CPU, and losses on the Criteo sample."""

from typing import Any

from quorem.dense.limits import LARGEST_BATCH

from .files import NAMES, markdown, results, short

Setting = tuple[str, str, str, int]  # network, tables, optimizer, batch


def gpu_steps(name: str = "train_gpu") -> dict[Setting, dict[str, dict[str, Any]]]:
    """The measured steps by network, tables, optimizer and batch, then by fused or plain layers."""
    steps: dict[Setting, dict[str, dict[str, Any]]] = {}
    for r in results(name)["time"]:
        steps.setdefault((r["network"], r["scheme"], r["optimizer"], r["batch"]), {})[r["layers"]] = r
    return steps


def trained(steps: dict[str, dict[str, Any]], batch: int) -> dict[str, Any] | None:
    """The step that training takes at a batch size."""
    return steps.get("fused" if batch <= LARGEST_BATCH else "plain")


def train_gpu() -> str:
    rows = []
    for (*names, batch), steps in gpu_steps().items():
        us = [f"{short(steps[layers]['step_us'])}" if layers in steps else "" for layers in ("fused", "plain")]
        taken = trained(steps, batch)
        rows.append((*(NAMES[name] for name in names), f"{batch}", *us, f"{taken['epoch_s']:.1f}" if taken else ""))
    head = ("network", "tables", "optimizer", "batch", "fused layers, us", "plain layers, us", "an epoch, s")
    return markdown(head, *rows)


def train_gpu_targets() -> str:
    rows = []
    for network, scheme, batch, must in (
        ("dlrm", "QR(4)", 128, 60),
        ("dlrm", "full", 128, 90),
        ("dcn", "QR(4)", 128, 60),
        ("dcn", "full", 128, 90),
        ("dlrm", "QR(4)", 16384, 6),
        ("dcn", "QR(4)", 16384, 6),
    ):
        setting = (network, scheme, "adagrad", batch)
        file = next(name for name in ("train_gpu", "train_gpu_first") if setting in gpu_steps(name))
        step = trained(gpu_steps(file)[setting], batch)
        assert step is not None
        reached = (f"{must} s", f"{step['epoch_s']:.1f} s", "yes" if step["epoch_s"] < must else "**no**")
        rows.append((NAMES[network], NAMES[scheme], f"{batch}", *reached, f"`{file}.json`"))
    return markdown(("network", "tables", "batch", "must", "an epoch", "reached", "file"), *rows)


def dense_steps() -> str:
    """Steps of batch 128, the graph alone, before and after the tiles were chosen."""
    rows = []
    files = gpu_steps("train_gpu_first"), gpu_steps()
    for network in ("dlrm", "dcn"):
        for optimizer in ("adagrad", "amsgrad"):
            settings = [steps[network, "QR(4)", optimizer, 128] for steps in files]
            us = [short(by_layers[layers]["graph_us"]) for by_layers in settings for layers in ("plain", "fused")]
            rows.append((NAMES[network], NAMES[optimizer], *us))
    head = ("network", "optimizer", "plain, before", "fused, before", "plain", "fused")
    return markdown(head, *rows)


def _launches(kernel: dict[str, Any] | None) -> str:
    return f"{kernel['launches']:.0f} x {short(kernel['us_each'])}" if kernel else ""


def dense_profile() -> str:
    """The launches of a fused step of batch 128 under Adagrad."""
    profiles = {
        r["network"]: r
        for r in results("train_gpu_first")["profile"]
        if (r["layers"], r["optimizer"]) == ("fused", "adagrad")
    }
    kernels = {n: {k["kernel"]: k for k in profiles[n]["kernels"]} for n in ("dlrm", "dcn")}
    rows = [
        (
            f"`{name}`" if name.endswith("_kernel") else "a fill",
            *(_launches(by_name.get(name)) for by_name in kernels.values()),
        )
        for name in dict.fromkeys(name for by_name in kernels.values() for name in by_name)
    ]
    totals = (f"{profiles[n]['launches']:.0f} launches, {short(profiles[n]['busy_us'])} us" for n in kernels)
    rows.append(("all", *totals))
    return markdown(("kernel", *(NAMES[n] for n in kernels)), *rows)


def train_cpu() -> str:
    head = ("step", "provider", "threads", "rows a second", "times the loop")
    rows = [
        (r["mode"], r["provider"], str(r["threads"]), f"{r['rows_per_second']:,}", f"{r['times_the_loop']}x")
        for r in results("train_cpu")["rows"]
    ]
    return markdown(head, *rows)


def criteo_sample() -> str:
    runs = {(r["scheme"], r["optimizer"]): r for r in results("criteo_sample")["rows"]}
    rows = []
    for scheme in dict.fromkeys(scheme for scheme, _ in runs):
        pair = [runs[scheme, optimizer] for optimizer in ("adagrad", "amsgrad")]
        losses = (f"{r['test_log_loss']:.4f} ± {r['deviation']:.4f}" for r in pair)
        rows.append((scheme, f"{pair[0]['embedding_parameters']:,}", *losses))
    return markdown(("tables", "parameters", "Adagrad", "AMSGrad"), *rows)
