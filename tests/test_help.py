"""``help`` of a public name shows every argument, inherited ones too, and an example; fixed choices are ``Literal``."""

import doctest
import inspect
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, get_args

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import quorem
from quorem import data
from quorem.data.config import PrepareConfig
from quorem.data.criteo import prepare_criteo
from quorem.data.raw import write_raw
from quorem.data.table import prepare_table
from quorem.experiments.figures import Axes, Point
from quorem.integrations import dlrm, lightning
from quorem.serving.inspection import inspect as inspect_file
from quorem.serving.predict import predict
from quorem.serving.scorer import Scorer
from quorem.training.config import RunConfig
from quorem.training.loop import Options, train, train_many

PUBLIC = {name: getattr(quorem, name) for name in quorem.__all__ if not inspect.ismodule(getattr(quorem, name))}
PUBLIC |= {f"optim.{name}": getattr(quorem.optim, name) for name in quorem.optim.__all__}
PUBLIC |= {f"models.{name}": getattr(quorem.models, name) for name in ("DCN", "DLRM", "DeepFM", "build")}
PUBLIC |= {f"schemes.{name}": getattr(quorem.schemes, name) for name in ("Ranks", "RawCounts")}
PUBLIC |= {
    f"partitions.{name}": getattr(quorem.partitions, name)
    for name in (
        *("Partition", "ExplicitPartition", "naive", "hashing", "quotient_remainder", "chinese_remainder"),
        *("generalized_quotient_remainder", "balanced_sizes", "coprime_sizes", "is_complementary"),
    )
}
PUBLIC |= {f"hashing.{name}": getattr(quorem.hashing, name) for name in ("mix", "mixed_ids", "mixed_id", "as_int64")}
PUBLIC |= {
    f"{owner.__name__}.{name}": getattr(owner, name)
    for owner, names in (
        (quorem.Embedding, ("from_pretrained", "fit_", "grow_", "row_numbers", "score")),
        (quorem.EmbeddingBag, ("from_pretrained",)),
        (quorem.Scheme, ("spec",)),
    )
    for name in names
}
PUBLIC |= {
    owner.__name__: owner for owner in (data.Prepared, data.synthesize, prepare_criteo, prepare_table, write_raw)
}
PUBLIC |= {owner.__name__: owner for owner in (train, Scorer, predict, inspect_file)}
PUBLIC |= {owner.__name__: owner for owner in (dlrm.load_qr_embedding_bag, Axes, Point)}
PUBLIC |= {owner.__name__: owner for owner in (PrepareConfig, data.ClickLog, RunConfig, Options, train_many)}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_is_explained(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name])
    arguments = [a for a in inspect.signature(PUBLIC[name]).parameters if a not in ("_", "self")]
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
        (quorem.models.build, "preset", ("text", "table1")),
        (RunConfig, "optimizer", ("sgd", "adagrad", "rowwise_adagrad", "adam", "amsgrad", "adamw")),
        (RunConfig, "precision", ("float32", "tf32", "bfloat16")),
        (PrepareConfig, "ids", ("appearance", "frequency", "hash", "raw")),
    ],
)
def test_editors_complete_the_choices(owner: Any, option: str, choices: tuple[Any, ...]) -> None:
    assert set(get_args(inspect.signature(owner).parameters[option].annotation)) == set(choices)


def test_every_argument_of_torchrec_tables_is_explained() -> None:
    torchrec = pytest.importorskip("quorem.integrations.torchrec", reason="needs TorchRec", exc_type=ImportError)
    for owner in (getattr(torchrec, name) for name in torchrec.__all__):
        text = inspect.getdoc(owner)
        missing = [a for a in inspect.signature(owner).parameters if not re.search(rf"^    {a}: \S", text, re.M)]
        assert missing == [] and ">>> " in text


def run_example(function: Callable[..., Any]) -> None:
    """Run the example of a function, with the lines that pytest skips because they need more than torch."""
    text = (function.__doc__ or "").replace("# doctest: +SKIP", "")
    assert text != function.__doc__
    example = doctest.DocTestParser().get_doctest(text, dict(vars(sys.modules[function.__module__])), "", None, None)
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_example_of_a_callback_for_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["lightning.pytorch.callbacks"].Callback = object  # type: ignore[attr-defined]
    run_example(lightning.callback)
