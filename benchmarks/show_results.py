"""Write the tables of the result files into the documents, where a comment names the command that prints them.

    <!-- quorem bench --table benchmarks/results/cpu.csv --mode step -->
    (whatever stands here is replaced)
    <!-- end -->

A long command may be broken over several lines. Tables of ``result_tables`` stand between ``<!-- name -->`` and
``<!-- /name -->``.

Run from the root of a checkout after a new benchmark.
"""

import re
import shlex
from pathlib import Path

from result_tables import TABLES
from typer.testing import CliRunner

from quorem.cli import app


def main() -> None:
    for path in [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        shown = re.sub(
            r"(<!-- (quorem bench (?:(?!-->).)*?--table (?:(?!-->).)*?)\s-->\n).*?(<!-- end -->\n)",
            filled,
            text,
            flags=re.DOTALL,
        )
        for name, (document, table) in TABLES.items():
            if Path(document) == path:
                before, _, rest = shown.partition(f"<!-- {name} -->\n")
                _, end, after = rest.partition(f"<!-- /{name} -->\n")
                if not end:
                    raise SystemExit(f"{document}: <!-- {name} --> and <!-- /{name} --> must stand in it")
                shown = f"{before}<!-- {name} -->\n{table()}{end}{after}"
        if shown != text:
            path.write_text(shown, encoding="utf-8")


def filled(match: re.Match[str]) -> str:
    done = CliRunner().invoke(app, shlex.split(match[2])[1:])
    if done.exit_code:
        raise SystemExit(f"{match[2]}: {done.output}")
    return match[1] + done.output + match[3]


if __name__ == "__main__":
    main()
