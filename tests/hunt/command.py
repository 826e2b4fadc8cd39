"""The command line of a hunt: it prints the figures as JSON, and fails if something was bad."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any


def main(hunt: Callable[..., dict[str, Any]], about: str | None, unit: str, count: int, **choices: list[str]) -> None:
    """Run ``hunt(count, seed)``; ``unit`` names the option for the count, and ``choices`` are further options."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{unit}", dest="count", type=int, default=count, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    for name, values in choices.items():
        parser.add_argument(f"--{name}", nargs="*", default=values, choices=values, help="which; by default all")
    options, began = vars(parser.parse_args()), time.monotonic()
    figures = hunt(**options)
    about_it = {unit: options["count"], "seed": options["seed"], "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps(about_it | figures, indent=1))
    sys.exit(bool(figures["bad"]))
