"""``quorem prepare`` and ``quorem synthesize``."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .options import Days, Overwrite
from .terminal import terminal

TEXT_SUFFIXES = (".txt", ".tsv", ".gz", ".parquet")  # names of files; synthesize writes a folder
commands = typer.Typer()
prepare = typer.Typer(
    no_args_is_help=True,
    help="Turn a click log into memory-mapped arrays, once.",
    epilog="Example: quorem prepare criteo train.txt data/criteo",
)
commands.add_typer(prepare, name="prepare")

Ids = Annotated[
    Literal["frequency", "appearance", "raw"],
    typer.Option(
        help="By falling frequency in training, by first appearance; or raw, 64-bit hashes without a vocabulary."
    ),
]
Vocabulary = Annotated[
    Literal["all", "train"], typer.Option(help="Tokens of all days, or of the training days and one for unknown ones.")
]
MaxMalformed = Annotated[int, typer.Option(min=0, help="Malformed lines left out before the run stops.")]


@prepare.command("criteo", epilog="Example: quorem prepare criteo train.txt data/criteo")
def prepare_criteo(
    raw: Annotated[Path, typer.Argument(help="The Kaggle train.txt, plain or gzip.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    ids: Ids = "frequency",
    vocabulary: Vocabulary = "all",
    days: Days = 7,
    max_malformed: MaxMalformed = 10,
    overwrite: Overwrite = False,
) -> None:
    """The Criteo Kaggle display advertising file."""
    from ..data.config import PrepareConfig
    from ..data.criteo import prepare_criteo
    from . import preparing

    config = PrepareConfig(ids=ids, vocabulary=vocabulary, days=days, max_malformed=max_malformed)
    console = terminal()
    with preparing.bar(console) as report:
        prepared = prepare_criteo(raw, out, config, overwrite=overwrite, progress=report)
    preparing.show(prepared, console)


@prepare.command(
    "table", epilog="Example: quorem prepare table clicks.csv data/clicks --label click --time when --drop row"
)
def prepare_table(
    file: Annotated[Path, typer.Argument(help="CSV with a header line (plain or gzip), or .parquet.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    label: Annotated[str, typer.Option(help="Column of 0 and 1, or of true and false; of others with --positive.")],
    categorical: Annotated[
        list[str] | None, typer.Option(help="Columns of categories, with commas between; repeatable.")
    ] = None,
    dense: Annotated[list[str] | None, typer.Option(help="Columns of numbers, likewise.")] = None,
    multi: Annotated[list[str] | None, typer.Option(help="Columns of categories, several values a row.")] = None,
    infer: Annotated[
        bool, typer.Option("--infer", help="Take the columns that are not named too, for what they look like.")
    ] = False,
    drop: Annotated[list[str] | None, typer.Option(help="Columns to leave out, likewise.")] = None,
    time: Annotated[
        str | None, typer.Option(help="Column of numbers or ISO times, by which the rows are split.")
    ] = None,
    positive: Annotated[
        str | None, typer.Option(help='The value of the label that is a click, such as yes; or a bound, as in ">=4".')
    ] = None,
    missing: Annotated[
        list[str] | None,
        typer.Option(help="Text of a missing value, besides the empty one; repeatable. By default NA, nan, null, ..."),
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option(
            help="Between the fields of a CSV file; by default whichever of , ; tab | makes the label a column."
        ),
    ] = None,
    multi_separator: Annotated[str, typer.Option(help="Between the values of a multi-valued field.")] = "|",
    transform: Annotated[
        list[str] | None,
        typer.Option(help="signed_log (the default), log or none for numbers; or COLUMN=TRANSFORM; repeatable."),
    ] = None,
    ids: Ids = "frequency",
    vocabulary: Vocabulary = "all",
    days: Days = 7,
    max_malformed: MaxMalformed = 10,
    overwrite: Overwrite = False,
) -> None:
    """Any CSV or Parquet file. Without --dense and --categorical, columns are taken for what they look like."""
    from ..data.columns import Columns, choose_columns
    from ..data.config import PrepareConfig
    from ..data.source import open_source
    from ..data.table import prepare_columns
    from ..data.values import MISSING
    from . import preparing

    kinds: list[tuple[str, str, Any]] = [name.rpartition("=") for name in _names(transform)]
    whole = [kind for column, _, kind in kinds if not column]
    config = PrepareConfig(
        ids=ids,
        vocabulary=vocabulary,
        days=days,
        max_malformed=max_malformed,
        transform=whole[-1] if whole else None,
        transforms={column: kind for column, _, kind in kinds if column},
    )
    console = terminal()
    source = open_source(file, separator, label)
    if separator is None and source.separator != ",":
        console.print(f"fields are separated by {source.separator!r}")
    features = (_names(dense), _names(categorical), _names(multi))
    texts = MISSING if missing is None else tuple(missing)
    named = Columns(label, *features, time, multi_separator, positive, texts)
    chosen = choose_columns(source, named, drop=_names(drop), infer_others=infer)
    if chosen.inferred:
        preparing.show_inferred(chosen.inferred, console)
    elif chosen.left_out:
        names = ", ".join(chosen.left_out[:10]) + ", ..." * (len(chosen.left_out) > 10)
        console.print(f"left out, since no option names them (--infer takes them too): {names}", soft_wrap=True)
    with preparing.bar(console) as report:
        prepared = prepare_columns(source, out, chosen.columns, config, overwrite=overwrite, progress=report)
    preparing.show(prepared, console)


def _names(values: list[str] | None) -> tuple[str, ...]:
    """Column names from an option that may be repeated, and may hold several names separated by commas."""
    return tuple(name for value in values or [] for name in value.split(",") if name)


@commands.command(epilog="Example: quorem synthesize data/log --rows 1000000 --scale 0.01")
def synthesize(
    out: Annotated[Path, typer.Argument(help="Folder to write; or a file: NAME.csv, or any name with --raw.")],
    rows: Annotated[int, typer.Option(min=1, help="Rows of the log.")] = 1_000_000,
    scale: Annotated[float, typer.Option(help="Of Criteo's cardinalities; 1 has all 33.8 million ids.")] = 0.001,
    click_rate: Annotated[float, typer.Option(help="Mean probability of a click.")] = 0.25,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")] = 0,
    days: Days = 7,
    raw: Annotated[bool, typer.Option("--raw", help="Text as the Criteo file; .gz is compressed.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Make up a click log of Criteo's shape with a planted signal."""
    from ..data.shape import scaled_cardinalities
    from ..data.synthetic import ClickLog, synthesize
    from . import preparing

    is_text = raw or out.name.endswith((".csv", ".csv.gz"))
    if out.suffix in TEXT_SUFFIXES and not is_text:
        raise ValueError(f"out ({out}) must be a folder or a .csv file: --raw writes text of Criteo's form")
    log = ClickLog(cardinalities=scaled_cardinalities(scale), click_rate=click_rate, seed=seed)
    console = terminal()
    with preparing.bar(console) as report:
        if is_text:
            from ..data.raw import write_raw

            write_raw(log, rows, out, overwrite=overwrite, progress=report)
            console.print(f"{out}: {rows:,} lines, {out.stat().st_size:,} bytes", soft_wrap=True)
            return
        prepared = synthesize(log, rows, out, days=days, overwrite=overwrite, progress=report)
    preparing.show(prepared, console)
