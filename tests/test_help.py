"""``help`` of a public name shows every argument, or names the class that has the same ones; and an example."""

import inspect
import re

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import quorem
from quorem import data
from quorem.data.config import PrepareConfig
from quorem.data.criteo import prepare_criteo
from quorem.data.raw import write_raw
from quorem.data.table import prepare_table
from quorem.experiments.figures import Axes, Point
from quorem.serving.inspection import inspect as inspect_file
from quorem.serving.predict import predict
from quorem.serving.scorer import Scorer
from quorem.training.config import RunConfig
from quorem.training.loop import Options, train, train_many

PARTITIONS = "Partition ExplicitPartition naive hashing quotient_remainder chinese_remainder is_complementary"
NAMES = {
    quorem: [name for name in (*quorem.__all__, "Path") if not inspect.ismodule(getattr(quorem, name))],
    quorem.optim: quorem.optim.__all__,
    quorem.models: ["DCN", "DLRM", "build"],
    quorem.schemes: ["Ranks", "RawCounts"],
    quorem.partitions: [*PARTITIONS.split(), "generalized_quotient_remainder", "balanced_sizes", "coprime_sizes"],
    quorem.hashing: ["mix", "mixed_ids", "as_int64"],
    quorem.Embedding: ["from_pretrained", "fit_", "grow_", "row_numbers", "score"],
    quorem.EmbeddingBag: ["from_pretrained"],
    quorem.Scheme: ["spec"],
    data: ["Prepared", "ClickLog", "synthesize"],
}
PUBLIC = {f"{owner.__name__}.{name}": getattr(owner, name) for owner, names in NAMES.items() for name in names}
PREPARING = (PrepareConfig, prepare_criteo, prepare_table, write_raw)
PUBLIC |= {o.__name__: o for o in (*PREPARING, RunConfig, Options, train, train_many, Scorer, predict, inspect_file)}
PUBLIC |= {owner.__name__: owner for owner in (Axes, Point)}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_is_explained(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name])
    if same := re.search(r"arguments\s+are\s+those\s+of\s+``(\w+)``", text):
        text += inspect.getdoc(getattr(inspect.getmodule(PUBLIC[name]), same[1]))
    arguments = [a for a in inspect.signature(PUBLIC[name]).parameters if a not in ("_", "self")]
    assert [a for a in arguments if not re.search(rf"^    {a}: \S", text, re.M)] == []
    assert ">>> " in text


def test_every_argument_of_torchrec_tables_is_explained() -> None:
    torchrec = pytest.importorskip("quorem.integrations.torchrec", reason="needs TorchRec", exc_type=ImportError)
    for owner in (getattr(torchrec, name) for name in torchrec.__all__):
        text = inspect.getdoc(owner)
        missing = [a for a in inspect.signature(owner).parameters if not re.search(rf"^    {a}: \S", text, re.M)]
        assert missing == [] and ">>> " in text
