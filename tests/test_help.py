"""``help`` of a public name shows every argument, or names the class that has the same ones; and an example."""

import inspect
import pkgutil
import re

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import quorem

NAMES = """
models:DCN models:DLRM models:build paper.schemes:Ranks paper.schemes:RawCounts paper.hashing:mix
paper.hashing:mixed_ids paper.hashing:as_int64 api:Path api:Scheme.spec api:EmbeddingBag.from_pretrained
api:Embedding.from_pretrained api:Embedding.fit_ api:Embedding.grow_ api:Embedding.row_numbers api:Embedding.score
data:Prepared data:ClickLog data:synthesize paper.partitions:Partition paper.partitions:ExplicitPartition
paper.partitions:naive paper.partitions:hashing paper.partitions:quotient_remainder paper.partitions:chinese_remainder
paper.partitions:is_complementary paper.partitions:generalized_quotient_remainder paper.partitions:balanced_sizes
paper.partitions:coprime_sizes data.config:PrepareConfig data.criteo:prepare_criteo data.raw:write_raw
data.table:prepare_table experiments.figures:Axes experiments.figures:Point serving.inspection:inspect
serving.predict:predict serving.scorer:Scorer training.config:RunConfig training.loop:Options training.loop:train
training.loop:train_many
"""
PUBLIC = {name: pkgutil.resolve_name(f"quorem.{name}") for name in NAMES.split()}
for module in (quorem, quorem.optim):
    PUBLIC |= {name: getattr(module, name) for name in module.__all__ if not inspect.ismodule(getattr(module, name))}


def check(public: object) -> None:
    text = inspect.getdoc(public)
    if same := re.search(r"arguments\s+are\s+those\s+of\s+``(\w+)``", text):
        text += inspect.getdoc(getattr(inspect.getmodule(public), same[1]))
    arguments = [a for a in inspect.signature(public).parameters if a not in ("_", "self")]
    assert [a for a in arguments if not re.search(rf"^    {a}: \S", text, re.M)] == []
    assert ">>> " in text


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_is_explained(name: str) -> None:
    check(PUBLIC[name])


def test_every_argument_of_torchrec_tables_is_explained() -> None:
    torchrec = pytest.importorskip("quorem.integrations.torchrec", reason="needs TorchRec", exc_type=ImportError)
    for name in torchrec.__all__:
        check(getattr(torchrec, name))
