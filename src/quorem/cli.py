"""The ``quorem`` command. Each command imports what it runs, so that ``quorem --help`` is quick."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError:
    sys.exit("quorem: the command needs typer and rich: pip install typer rich")

from .version import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"quorem {__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Compositional embeddings over complementary partitions."""  # with it, a single command keeps its name


def _present(device: str | None) -> str | None:
    """A device that is here, or a usage error."""
    if device is not None:
        import torch

        try:
            kind = torch.device(device).type
        except RuntimeError:
            kind = "unknown"
        if kind not in ("cpu", "cuda"):
            raise typer.BadParameter(f"device ({device!r}) must be cpu or cuda")
        if kind == "cuda" and not torch.cuda.is_available():
            raise typer.BadParameter(f"device ({device!r}) must be 'cpu' here: there is no GPU")
    return device


Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.", callback=_present)]


@app.command()
def demo(
    data: Annotated[Path | None, typer.Option(help="Prepared data; by default a click log is made up.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("runs/demo"),
    rows: Annotated[
        int | None, typer.Option(min=1000, help="Rows to make up (by default 250,000), or to train on at most.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of every random draw.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.", callback=_present)] = "cpu",
) -> None:
    """Train DLRM with full, hashed and composed tables; print what each costs and write a page with plots."""
    with _plain_errors():
        from .experiments import demo

        demo.show(Console(), out, data=data, seed=seed, rows=rows, device=device)


@app.command()
def train(
    data: Annotated[Path, typer.Option(help="Prepared data.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; one that was interrupted goes on.")],
    scheme: Annotated[
        str, typer.Option(help="full, hash, mult, add, concat, feature, path, or a scheme's JSON.")
    ] = "mult",
    collisions: Annotated[int, typer.Option(min=1, help="Ids that share a row, for a scheme given by name.")] = 4,
    threshold: Annotated[int, typer.Option(min=0, help="Tables of at most this many ids stay full.")] = 0,
    network: Annotated[Literal["dlrm", "dcn"], typer.Option(help="The network.")] = "dlrm",
    preset: Annotated[Literal["text", "table1"], typer.Option(help="Its architecture.")] = "text",
    dim: Annotated[int, typer.Option(min=1, help="Width of a stored row.")] = 16,
    optimizer: Annotated[Literal["adagrad", "amsgrad"], typer.Option(help="The optimizer.")] = "adagrad",
    lr: Annotated[float | None, typer.Option(help="Learning rate; by default torch's.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 128,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training rows.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the start and of a shuffle.")] = 0,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Train in a random order.")] = False,
    precision: Annotated[Literal["float32", "tf32", "bfloat16"], typer.Option(help="Of matrix products.")] = "float32",
    validate_every: Annotated[int | None, typer.Option(min=1, help="Steps between two validations.")] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Train on the first rows only.")] = None,
    device: Device = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch on the CPU.")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="The same bits on a GPU too.")] = False,
    checkpoint_seconds: Annotated[float, typer.Option(min=0, help="Least time between two checkpoints.")] = 60,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write metrics for TensorBoard too.")] = False,
) -> None:
    """Train one model on prepared data, resumable at any moment; Ctrl-C saves it and exits with 130."""
    with _plain_errors():
        from .experiments import train

        train.run(
            data,
            out,
            scheme=train.scheme_from(scheme, collisions),
            options={
                **{"network": network, "preset": preset, "threshold": threshold, "embedding_dim": dim, "lr": lr},
                **{"optimizer": optimizer, "batch_size": batch_size, "epochs": epochs, "seed": seed},
                **{"shuffle": shuffle, "precision": precision, "validate_every": validate_every, "max_rows": max_rows},
            },
            device=device,
            threads=threads,
            deterministic=deterministic,
            checkpoint_seconds=checkpoint_seconds,
            tensorboard=tensorboard,
            console=Console(),
        )


prepare = typer.Typer(no_args_is_help=True, help="Turn a click log into memory-mapped arrays, once.")
app.add_typer(prepare, name="prepare")

Ids = Annotated[Literal["appearance", "frequency", "hash"], typer.Option(help="Order of the ids.")]
Buckets = Annotated[int | None, typer.Option(min=1, help="Hashed ids of each feature, with --ids hash.")]
Vocabulary = Annotated[
    Literal["all", "train"], typer.Option(help="Tokens of all days, or of the training days and one for unknown ones.")
]
Days = Annotated[int, typer.Option(min=2, help="Equal parts; all but the last train, the last is halved.")]
MaxMalformed = Annotated[int, typer.Option(min=0, help="Malformed lines left out before the run stops.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what OUT names.")]


@prepare.command("criteo")
def prepare_criteo(
    raw: Annotated[Path, typer.Argument(help="The Kaggle train.txt, plain or gzip.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    ids: Ids = "appearance",
    buckets: Buckets = None,
    vocabulary: Vocabulary = "all",
    days: Days = 7,
    max_malformed: MaxMalformed = 10,
    overwrite: Overwrite = False,
) -> None:
    """The Criteo Kaggle display advertising file."""
    from .experiments import preparing

    options = {"ids": ids, "buckets": buckets, "vocabulary": vocabulary, "days": days, "max_malformed": max_malformed}
    with _plain_errors():
        preparing.criteo(raw, out, options, overwrite=overwrite, console=Console())


@prepare.command("table")
def prepare_table(
    file: Annotated[Path, typer.Argument(help="CSV with a header line (plain or gzip), or .parquet.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    label: Annotated[str, typer.Option(help="Column of 0 and 1.")],
    categorical: Annotated[list[str], typer.Option(help="Columns of categories, with commas between; repeatable.")],
    dense: Annotated[list[str] | None, typer.Option(help="Columns of numbers, likewise.")] = None,
    multi: Annotated[list[str] | None, typer.Option(help="Those of --categorical with several values a row.")] = None,
    separator: Annotated[str, typer.Option(help="Between the fields of a CSV file.")] = ",",
    multi_separator: Annotated[str, typer.Option(help="Between the values of a multi-valued field.")] = "|",
    raw_dense: Annotated[bool, typer.Option("--raw-dense", help="Keep numbers, without log(x + 1).")] = False,
    ids: Ids = "appearance",
    buckets: Buckets = None,
    vocabulary: Vocabulary = "all",
    days: Days = 7,
    max_malformed: MaxMalformed = 10,
    overwrite: Overwrite = False,
) -> None:
    """Any CSV or Parquet file, multi-valued columns included."""
    from .experiments import preparing

    options = {"ids": ids, "buckets": buckets, "vocabulary": vocabulary, "days": days, "max_malformed": max_malformed}
    with _plain_errors():
        preparing.table(
            file,
            out,
            {k: preparing.names(v) for k, v in {"dense": dense, "categorical": categorical, "multi": multi}.items()},
            {**options, "log_dense": not raw_dense},
            label=label,
            separator=separator,
            multi_separator=multi_separator,
            overwrite=overwrite,
            console=Console(),
        )


@app.command()
def synthesize(
    out: Annotated[Path, typer.Argument(help="Folder to write, or file with --raw.")],
    rows: Annotated[int, typer.Option(min=1, help="Rows of the log.")] = 1_000_000,
    scale: Annotated[float, typer.Option(help="Of Criteo's cardinalities; 1 has all 33.8 million ids.")] = 0.001,
    click_rate: Annotated[float, typer.Option(help="Mean probability of a click.")] = 0.25,
    seed: Annotated[int, typer.Option(min=0, help="Of everything.")] = 0,
    days: Days = 7,
    raw: Annotated[bool, typer.Option("--raw", help="Text as the Criteo file; .gz is compressed.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Make up a click log of Criteo's shape with a planted signal."""
    from .data.shape import scaled_cardinalities
    from .data.synthetic import ClickLog
    from .experiments import preparing

    with _plain_errors():
        log = ClickLog(cardinalities=scaled_cardinalities(scale), click_rate=click_rate, seed=seed)
        preparing.synthetic(log, rows, out, days=days, raw=raw, overwrite=overwrite, console=Console())


Runs = Annotated[Path, typer.Option("--out", help="Folder of the runs; what is finished there is not trained again.")]
Trials = Annotated[int, typer.Option(min=1, help="Seeds of each setting.")]
Optimizers = Annotated[str, typer.Option(help="Of adagrad, amsgrad; the better by validation loss is shown.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes; by default one a core, or one for a GPU.")]
TrainOnly = Annotated[bool, typer.Option("--train-only", help="Leave pictures and page to quorem report.")]


@app.command()
def reproduce(
    what: Annotated[
        Literal["figure4", "figure5", "figure6", "figure7", "table1", "all", "budgets"],
        typer.Argument(help="Figure or table of the paper; budgets goes beyond it."),
    ],
    data: Annotated[Path | None, typer.Option(help="Prepared data.")] = None,
    out: Runs = Path("runs/reproduce"),
    trials: Trials = 5,
    networks: Annotated[str, typer.Option(help="Networks, with commas.")] = "dcn,dlrm",
    optimizers: Optimizers = "adagrad,amsgrad",
    rows: Annotated[int | None, typer.Option(min=1, help="Train on the first rows only.")] = None,
    collisions: Annotated[str, typer.Option(help="Of figure 5, with commas.")] = "2,3,4,5,6,7,60",
    device: Device = None,
    workers: Workers = None,
    train_only: TrainOnly = False,
    params_only: Annotated[
        bool, typer.Option("--params-only", help="Count table 1's parameters; train nothing.")
    ] = False,
) -> None:
    """Train what a figure of the paper needs; write its numbers, its picture and the page. Goes on if interrupted."""
    with _plain_errors():
        from .experiments import reproduce, table1

        if params_only:
            if what != "table1":
                raise typer.BadParameter(f"--params-only is for table1 (figure7 counts parameters), not {what}")
            for (network, hidden), count in table1.parameter_counts().items():
                typer.echo(f"{network},{hidden},{count}")
            return
        if data is None:
            raise typer.BadParameter("--data must name prepared data (quorem prepare)")
        how: dict[str, Any] = {"trials": trials, "optimizers": optimizers.split(","), "command": _command()}
        names = list(reproduce.PAPER) if what == "all" else [what]
        study = {"networks": networks.split(","), "max_rows": rows, "collisions": _integers("collisions", collisions)}
        plans = reproduce.plans_of(names, data, study, how)
        reproduce.run(plans, out, device=device, workers=workers, train_only=train_only, console=Console())


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="Python file that defines POINTS, and AXES if wanted.", exists=True)],
    data: Annotated[Path | None, typer.Option(help="Prepared data, for points that name none.")] = None,
    out: Runs = Path("runs/sweep"),
    trials: Trials = 5,
    optimizers: Optimizers = "adagrad,amsgrad",
    device: Device = None,
    workers: Workers = None,
    train_only: TrainOnly = False,
) -> None:
    """Train a grid of your own, as reproduce does with the paper's. The file is run as Python."""
    with _plain_errors():
        from .experiments import reproduce

        how: dict[str, Any] = {"trials": trials, "optimizers": optimizers.split(","), "command": _command()}
        plans = [reproduce.from_file(file, data, **how)]
        reproduce.run(plans, out, device=device, workers=workers, train_only=train_only, console=Console())


@app.command()
def report(
    runs: Annotated[Path, typer.Argument(help="Folder of reproduce or sweep, or of figures as JSON.", exists=True)],
    out: Annotated[Path | None, typer.Option(help="The page; by default report.html in the folder.")] = None,
    table: Annotated[str | None, typer.Option(help="Print the numbers of a figure as Markdown; write nothing.")] = None,
) -> None:
    """Write one page about the runs that are finished: figures, trade-offs, and every point with its command."""
    with _plain_errors():
        from .experiments import reproduce
        from .experiments.markdown import markdown

        figures = reproduce.figures_in(runs)
        if table is not None:
            for figure in figures:
                if figure.axes.name == table:
                    typer.echo(markdown(figure), nl=False)
                    return
            raise ValueError(f"table ({table!r}) must be one of {', '.join(f.axes.name for f in figures)}")
        from .experiments.report import page

        if out is None and (runs / "plans").exists():
            reproduce.publish(figures, runs / "results")
        page(figures, out := out or runs / "report.html")
        typer.echo(out)


def _integers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise ValueError(f"{name} ({text!r}) must be whole numbers with commas") from None


def _command() -> str:
    return shlex.join(["quorem", *sys.argv[1:]])


@app.command()
def bench(
    preset: Annotated[str | None, typer.Option(help="cpu, h200 or full; by default that of the device.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="forward, step, step_amsgrad or dlrm; repeatable.")] = None,
    provider: Annotated[list[str] | None, typer.Option(help="Such as fused or fbgemm; repeatable.")] = None,
    scheme: Annotated[list[str] | None, typer.Option(help="Start of a scheme's name; repeatable.")] = None,
    ids: Annotated[list[str] | None, typer.Option(help="zipf or uniform; repeatable.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch size; repeatable.")] = None,
    dim: Annotated[list[int] | None, typer.Option(min=1, help="Width of the vectors; repeatable.")] = None,
    device: Device = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch on the CPU.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the CSV file and the plot.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for the plot.")] = None,
    table: Annotated[
        Path | None, typer.Option(help="Print the tables of a CSV file; measure nothing.", exists=True, dir_okay=False)
    ] = None,
    value: Annotated[Literal["time", "floor", "memory"], typer.Option(help="What the tables show.")] = "time",
    quick: Annotated[
        bool, typer.Option("--quick", help="Small tables, few samples: only to see that it runs.")
    ] = False,
    quick_check: Annotated[
        bool,
        typer.Option("--quick-check", help="Before measuring compare kernels once instead of running their tests."),
    ] = False,
    commit: Annotated[str | None, typer.Option(help="For the CSV file, where there is no git.")] = None,
) -> None:
    """Measure lookups and training steps against other ways to do them, in one run on the same ids."""
    import torch

    from .experiments.bench import command, report

    axes = {"mode": mode, "provider": provider, "scheme": scheme, "ids": ids, "batch": batch, "dim": dim}
    options = {axis: values or [] for axis, values in axes.items()}
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        if table is None:
            grids = command.chosen(preset, on, options)
        else:
            rows = command.selected(report.read(table), options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if table is None:
        try:
            rows = command.run(
                grids,
                on,
                name=preset or on.type,
                out=out,
                plot=plot,
                quick=quick,
                quick_check=quick_check,
                command=shlex.join(["quorem", *sys.argv[1:]]),
                commit=commit,
                console=Console(stderr=True),
            )
        except command.WrongKernelsError as error:
            typer.echo(f"quorem: {error}", err=True)
            raise typer.Exit(1) from error
    elif plot is not None:
        report.plot(rows, plot)
    typer.echo(report.tables(rows, value), nl=False)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What a user can mend is told in one line, with exit code 1."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, FloatingPointError, ModuleNotFoundError) as error:
        typer.echo(f"quorem: {error}", err=True)
        raise typer.Exit(1) from error


def main() -> None:
    """Run the command; Ctrl-C exits with 130."""
    app()
