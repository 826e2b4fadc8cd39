"""The ``quorem`` command, run in this process."""

from click.testing import Result
from typer.testing import CliRunner

from quorem.cli import app


def invoke(*arguments: object, code: int = 0) -> Result:
    """What a command printed, which must have exited with this code; lines are long enough for any table."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done
