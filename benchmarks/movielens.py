"""MovieLens-100k as one CSV file, to try plans on a log whose ids are all seen often.

    pip download --no-deps recbole && unzip recbole-*.whl
    python benchmarks/movielens.py recbole/dataset_example/ml-100k ml.csv
    quorem prepare table ml.csv data/ml --label rating --positive ">=4" --categorical COLUMNS  # as printed
    python benchmarks/plan_quality.py data/ml --out benchmarks/results/movielens.json --networks dlrm --sizes 2 4 16 60

Each rating has the user's and the film's attributes beside it. Rows keep the order of the file, which is random.
"""

import argparse
from pathlib import Path

import polars as pl


def attributes(path: Path) -> pl.DataFrame:
    """A file of RecBole, whose header has the type of each column after its name."""
    frame = pl.read_csv(path, separator="\t", infer_schema_length=0, quote_char=None)
    return frame.rename({name: name.split(":")[0] for name in frame.columns})


def main() -> None:
    """Read the command line, join, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with ml-100k.inter, ml-100k.user and ml-100k.item")
    parser.add_argument("out", type=Path, help="CSV file to write")
    arguments = parser.parse_args()
    ratings, users, items = (attributes(arguments.folder / f"ml-100k.{kind}") for kind in ("inter", "user", "item"))
    rows = ratings.join(users, on="user_id", how="left").join(items, on="item_id", how="left").drop("timestamp")
    rows.write_csv(arguments.out)
    print(",".join(name for name in rows.columns if name != "rating"))


if __name__ == "__main__":
    main()
