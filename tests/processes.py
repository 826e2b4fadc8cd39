"""Python in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def python(*arguments: object, env: Mapping[str, str] | None = None, **options: Any) -> str:
    """What it prints, where modules are found as in this process; it must end well."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | dict(env or {})
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    return done.stdout
