"""The tables of the paper's experiments: methods, thresholds, widths, and the parameters they come to."""

import pytest
import torch

import quorem
from quorem import models
from quorem.data.shape import CARDINALITIES
from quorem.training.model import PAPER_METHODS, scheme_of, tables_of


def count(tables, network=None):
    embeddings = quorem.EmbeddingCollection(tables, device="meta")
    model = embeddings if network is None else models.build(network, embeddings, device="meta")
    return sum(p.numel() for p in model.parameters())


def ceil(a, b):
    return -(-a // b)


@pytest.mark.parametrize("collisions", [2, 3, 4, 5, 6, 7, 60])
def test_embedding_parameters_of_figure_5(collisions):
    remainders = sum(ceil(n, collisions) for n in CARDINALITIES)
    quotients = sum(ceil(n, ceil(n, collisions)) for n in CARDINALITIES)
    assert count(tables_of(CARDINALITIES, scheme_of("full", collisions))) == 16 * sum(CARDINALITIES)
    assert count(tables_of(CARDINALITIES, scheme_of("hash", collisions))) == 16 * remainders
    for method in ("feature", "concat", "add", "mult"):
        assert count(tables_of(CARDINALITIES, scheme_of(method, collisions))) == 16 * (remainders + quotients), method


def test_feature_generation_costs_dlrm_half_a_million_parameters():
    feature, mult = (tables_of(CARDINALITIES, scheme_of(method)) for method in ("feature", "mult"))
    extra = count(feature, "dlrm") - count(mult, "dlrm")
    assert extra == 525_824 == (53 * 52 // 2 - 27 * 26 // 2) * 512
    embeddings = quorem.EmbeddingCollection(feature, device="meta")
    assert embeddings.embedding_dims == (16,) * 52


@pytest.mark.parametrize("threshold", [0, 1, 20, 200, 2000, 20000, 10**8])
@pytest.mark.parametrize("method", PAPER_METHODS)
def test_tables_at_or_under_the_threshold_stay_full(method, threshold):
    tables = tables_of(CARDINALITIES, scheme_of(method), threshold=threshold)
    width = 32 if method == "concat" else 16
    embeddings = quorem.EmbeddingCollection(tables, device="meta")
    for table, spec, n in zip(tables, embeddings.specs, CARDINALITIES, strict=True):
        assert (table.num_embeddings, table.embedding_dim) == (n, width)
        full = n <= threshold or method == "full"
        assert spec.scheme == (quorem.Full() if full else scheme_of(method))
        assert spec.shapes[0] == ((n, width) if full else (ceil(n, 4), 16))
    compressed = sum(n > threshold for n in CARDINALITIES)
    assert len(embeddings.embedding_dims) == 26 + (compressed if method == "feature" else 0)


def test_concat_of_three_partitions_is_three_times_as_wide():
    scheme = quorem.GeneralizedQR(num_partitions=3, operation="concat")
    tables = tables_of((7, 1000), scheme, threshold=10, embedding_dim=4)
    assert [(table.name, table.embedding_dim) for table in tables] == [("C1", 12), ("C2", 12)]
    assert quorem.EmbeddingCollection(tables)(torch.tensor([[6, 999]])).shape == (1, 2, 12)
