"""``quorem prepare`` and ``quorem synthesize``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from typer import Argument, Option

from .options import Days, Overwrite
from .terminal import command, print_table, stages, terminal

if TYPE_CHECKING:
    from ..data.prepared import Prepared

TEXT_SUFFIXES = (".txt", ".tsv", ".gz", ".parquet")  # names of files; synthesize writes a folder
commands = typer.Typer()
CRITEO = "Example: quorem prepare criteo train.txt data/criteo"
prepare = typer.Typer(no_args_is_help=True, help="Turn a click log into memory-mapped arrays, once.", epilog=CRITEO)
commands.add_typer(prepare, name="prepare")

Ids = Annotated[
    Literal["frequency", "appearance"], Option(help="By falling frequency in training, or by first appearance.")
]
Vocabulary = Annotated[
    Literal["all", "train"], Option(help="Tokens of all days, or of the training days and one for unknown ones.")
]
MaxMalformed = Annotated[int, Option(min=0, help="Malformed lines left out before the run stops.")]
Names = list[str] | None


@prepare.command("criteo", epilog=CRITEO)
def prepare_criteo(
    raw: Annotated[Path, Argument(help="The Kaggle train.txt, plain or gzip.")],
    out: Annotated[Path, Argument(help="Folder to write.")],
    ids: Ids = "frequency",
    vocabulary: Vocabulary = "all",
    days: Days = 7,
    max_malformed: MaxMalformed = 10,
    overwrite: Overwrite = False,
) -> None:
    """The Criteo Kaggle display advertising file."""
    from ..data.config import PrepareConfig
    from ..data.criteo import prepare_criteo

    config = PrepareConfig(ids=ids, vocabulary=vocabulary, days=days, max_malformed=max_malformed)
    console = terminal()
    with stages(console) as report:
        prepared = prepare_criteo(raw, out, config, overwrite=overwrite, progress=report)
    _show(prepared, console)


@prepare.command("table", epilog="Example: quorem prepare table clicks.csv data/clicks --label click --time when")
def prepare_table(
    file: Annotated[Path, Argument(help="CSV with a header line (plain or gzip), or .parquet.")],
    out: Annotated[Path, Argument(help="Folder to write.")],
    label: Annotated[str, Option(help="Column of 0 and 1, or of true and false; of others with --positive.")],
    categorical: Annotated[Names, Option(help="Columns of categories, with commas between; repeatable.")] = None,
    dense: Annotated[Names, Option(help="Columns of numbers, likewise.")] = None,
    multi: Annotated[Names, Option(help="Columns of categories, several values a row.")] = None,
    infer: Annotated[bool, Option("--infer", help="Take other columns too, for what they look like.")] = False,
    drop: Annotated[Names, Option(help="Columns to leave out, likewise.")] = None,
    time: Annotated[str | None, Option(help="Column of numbers or ISO times, by which the rows are split.")] = None,
    positive: Annotated[
        str | None, Option(help='The value of the label that is a click, such as yes; or the least one, as in ">=4".')
    ] = None,
    missing: Annotated[
        Names, Option(help="A missing value, besides ''; repeatable. Default: NA, nan, null ...")
    ] = None,
    separator: Annotated[str | None, Option(help="Of a CSV file; default: that of , ; tab | which fits.")] = None,
    multi_separator: Annotated[str, Option(help="Between the values of a multi-valued field.")] = "|",
    transform: Annotated[
        Names, Option(help="signed_log (the default), log or none, for all numbers; or COLUMN=TRANSFORM; repeatable.")
    ] = None,
    ids: Ids = "frequency",
    vocabulary: Vocabulary = "all",
    days: Days = 7,
    max_malformed: MaxMalformed = 10,
    overwrite: Overwrite = False,
) -> None:
    """Any CSV or Parquet file. Without --dense and --categorical, columns are taken for what they look like."""
    from ..data.config import PrepareConfig
    from ..data.infer import choose_columns
    from ..data.meta import MISSING, Columns
    from ..data.prepare import prepare_columns
    from ..data.source import open_source

    kinds: dict[str, Any] = {column: kind for column, _, kind in (each.rpartition("=") for each in _names(transform))}
    options: dict[str, Any] = {"ids": ids, "vocabulary": vocabulary, "days": days, "max_malformed": max_malformed}
    config = PrepareConfig(transform=kinds.pop("", None), transforms=kinds, **options)
    console = terminal()
    source = open_source(file, separator, label)
    if separator is None and source.separator != ",":
        console.print(f"fields are separated by {source.separator!r}")
    features = (_names(dense), _names(categorical), _names(multi))
    texts = MISSING if missing is None else tuple(missing)
    named = Columns(label, *features, multi_separator, positive, texts, time)
    columns, inferred, left_out = choose_columns(source, named, drop=_names(drop), infer_others=infer)
    if inferred:
        words = {"number": "numbers", "category": "categories", "list": "lists", "none": "nothing, left out"}
        rows = [{"column": name, "taken for": words[kind], "why": reason} for name, kind, reason in inferred]
        print_table(console, rows, "taken for", "why")
        rule = "To take a column for something else, name it in --dense, --categorical, --multi or --drop"
        console.print(f"{rule}, and add --infer.", soft_wrap=True)
    elif left_out:
        names = ", ".join(left_out[:10]) + ", ..." * (len(left_out) > 10)
        console.print(f"left out, since no option names them (--infer takes them too): {names}", soft_wrap=True)
    with stages(console) as report:
        prepared = prepare_columns(source, out, columns, config, overwrite=overwrite, progress=report)
    _show(prepared, console)


def _names(values: list[str] | None) -> tuple[str, ...]:
    """Column names from an option that may be repeated, and may hold several names separated by commas."""
    return tuple(name for value in values or [] for name in value.split(",") if name)


@commands.command(epilog="Example: quorem synthesize data/log --rows 1000000 --scale 0.01")
def synthesize(
    out: Annotated[Path, Argument(help="Folder to write; or a file: NAME.csv, or any name with --raw.")],
    rows: Annotated[int, Option(min=1, help="Rows of the log.")] = 1_000_000,
    scale: Annotated[float, Option(help="Of Criteo's cardinalities; 1 has all 33.8 million ids.")] = 0.001,
    click_rate: Annotated[float, Option(help="Mean probability of a click.")] = 0.25,
    seed: Annotated[int, Option(min=0, help="Seed of all random numbers.")] = 0,
    days: Days = 7,
    raw: Annotated[bool, Option("--raw", help="Text as the Criteo file; .gz is compressed.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Make up a click log of Criteo's shape with a planted signal."""
    from ..data.shape import scaled_cardinalities
    from ..data.synthetic import ClickLog, synthesize

    is_text = raw or out.name.endswith((".csv", ".csv.gz"))
    if out.suffix in TEXT_SUFFIXES and not is_text:
        raise ValueError(f"out ({out}) must be a folder or a .csv file: --raw writes text of Criteo's form")
    log = ClickLog(cardinalities=scaled_cardinalities(scale), click_rate=click_rate, seed=seed)
    console = terminal()
    with stages(console) as report:
        if is_text:
            from ..data.raw import write_raw

            write_raw(log, rows, out, overwrite=overwrite, progress=report)
            console.print(f"{out}: {rows:,} lines, {out.stat().st_size:,} bytes", soft_wrap=True)
            return
        prepared = synthesize(log, rows, out, days=days, overwrite=overwrite, progress=report)
    _show(prepared, console)


def _show(prepared: "Prepared", console: Console) -> None:
    """Print what was prepared, and the command to run next; or why it cannot be trained on."""
    print_summary(prepared, console)
    labels = prepared.all.labels
    if labels.min() == labels.max():
        console.print(f"warning: every label is {labels[0]}: there is nothing to learn")
    if empty := [name for name, rows in prepared.meta.rows.items() if not rows]:
        console.print(f"warning: no rows for {' and '.join(empty)}: train needs some of each, so prepare more rows")
        return
    quarter = max(32 * sum(prepared.cardinalities) // 1000, 100)  # of full tables of width 16 with their Adagrad state
    following = ["train", "--data", prepared.path, "--budget", f"{quarter}kB", "--out", "runs/first"]
    console.print(f"Next: {command(*following)}", soft_wrap=True)


def print_summary(prepared: "Prepared", console: Console) -> None:
    """Print rows, splits, ids and malformed lines of prepared data."""
    meta = prepared.meta
    split = ", ".join(f"{name} {rows:,}" for name, rows in meta.rows.items())
    size = sum(path.stat().st_size for path in prepared.path.rglob("*") if path.is_file())
    ids = sum(prepared.cardinalities)
    lines = [
        f"{prepared.path}: {prepared.num_rows:,} rows ({split}), {size:,} bytes",
        f"dense features: {len(prepared.dense_names)}; categorical ones: {len(prepared.names)} with {ids:,} ids",
    ]
    if meta.malformed["count"]:
        shown = "; ".join(f"{number}: {reason}" for number, reason in meta.malformed["first"])
        lines.append(f"malformed lines left out: {meta.malformed['count']}, the first: {shown}")
    if meta.time is not None:
        order = f"not in time order ({meta.steps_back:,} rows are earlier than the row before them), and was sorted"
        lines.append(f"split by {meta.time}: the file is {order if meta.steps_back else 'in time order'}")
    if meta.bayes_log_loss is not None:
        lines.append(f"best log loss of any model on the test rows: {meta.bayes_log_loss['test']:.5f}")
    console.print("\n".join(lines), soft_wrap=True)
