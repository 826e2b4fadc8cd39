"""``help`` of a public name shows every argument, inherited ones too, and an example; fixed choices are ``Literal``."""

import inspect
import re
from typing import Any, get_args

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import quorem
from quorem.data.ids import IdConfig
from quorem.training.config import RunConfig

PUBLIC = {name: getattr(quorem, name) for name in quorem.__all__ if not inspect.ismodule(getattr(quorem, name))}
PUBLIC |= {f"optim.{name}": getattr(quorem.optim, name) for name in quorem.optim.__all__}
PUBLIC |= {f"models.{network.__name__}": network for network in (quorem.models.DCN, quorem.models.DLRM)}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_is_explained(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name])
    arguments = [argument for argument in inspect.signature(PUBLIC[name]).parameters if argument != "_"]
    assert [a for a in arguments if not re.search(rf"^    {a}: \S", text, re.M)] == []
    assert ">>> " in text


@pytest.mark.parametrize(
    ("owner", "option", "choices"),
    [
        (quorem.QR, "operation", ("concat", "add", "mult", "feature")),
        (quorem.QR, "large", ("remainder", "quotient")),
        (quorem.Path, "activation", ("relu", "sigmoid")),
        (quorem.Embedding, "on_invalid_id", ("warn", "raise", "trust")),
        (quorem.EmbeddingBag, "mode", ("sum", "mean", "max")),
        (quorem.quantize_, "bits", (8, 4)),
        (quorem.load, "unknown", ("error", "missing")),
        (RunConfig, "optimizer", ("adagrad", "amsgrad")),
        (RunConfig, "precision", ("float32", "tf32", "bfloat16")),
        (IdConfig, "ids", ("appearance", "frequency", "hash", "raw")),
    ],
)
def test_editors_complete_the_choices(owner: Any, option: str, choices: tuple[Any, ...]) -> None:
    assert set(get_args(inspect.signature(owner).parameters[option].annotation)) == set(choices)
