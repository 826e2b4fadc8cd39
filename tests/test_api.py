"""What ``help`` shows of the public classes."""

import inspect

import pytest

import quorem
from quorem import optim

CLASSES = [
    value
    for module in (quorem, optim)
    for value in (getattr(module, name) for name in module.__all__)
    if inspect.isclass(value) and value not in (quorem.Scheme, quorem.TableSpec, optim.RowOptimizer)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_help_shows_every_argument_and_an_example(cls):
    """Inherited arguments too."""
    doc = inspect.getdoc(cls)
    assert cls.__doc__ is not None and ">>> " in doc
    shown = [line.strip().split(":")[0] for line in doc.splitlines() if ": " in line]
    assert [name for name in inspect.signature(cls).parameters if name not in shown] == []
