"""``compress_`` and ``decompress_`` of models with TorchRec's collections."""

import copy

import pytest
import torch
from processes import python
from torch import Tensor, nn

import quorem

pytest.importorskip("torchrec", reason="needs TorchRec: `make install`, or the line in docs/torchrec.md")

from torchrec.models.dlrm import DLRM
from torchrec.modules import embedding_modules as stock
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from quorem.integrations import torchrec as integration

SIZES = {"user": 600, "item": 400, "day": 7}
FEATURES = {"user": ["viewer", "author"], "item": ["item"], "day": ["day"]}
KEYS = ["viewer", "author", "item", "day"]
SUMS = quorem.QR(4, operation="add")


def configs(kind: type = EmbeddingBagConfig, **options: object) -> list:
    return [
        kind(name=name, num_embeddings=n, embedding_dim=8, feature_names=list(FEATURES[name]), **options)
        for name, n in SIZES.items()
    ]


class Model(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.sparse = stock.EmbeddingBagCollection(configs(**options))
        self.history = stock.EmbeddingCollection(configs(EmbeddingConfig))
        self.other = nn.Embedding(500, 8)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        vectors = self.history(features)
        pooled = [vectors[key].values().sum(0, keepdim=True).expand(features.stride(), -1) for key in KEYS]
        return torch.cat([self.sparse(features).values(), *pooled], 1)


def batch() -> KeyedJaggedTensor:
    lengths = torch.tensor([2, 1, 0, 1, 1, 2, 1, 1])
    return KeyedJaggedTensor(KEYS, torch.arange(9) % 7, lengths=lengths)


def exactly_composed_(model: nn.Module) -> None:
    """Fill all tables with sums that ``QR(4, operation="add")`` can hold."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            n, d = module.weight.shape
            rows = quorem.Embedding(n, d, SUMS)
            nn.init.normal_(rows.stored)
            module.weight.data.copy_(rows.to_dense())


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_fitted_collections_give_what_the_trained_gave_and_go_back(pooling: PoolingType) -> None:
    torch.manual_seed(0)
    model = Model(pooling=pooling)
    exactly_composed_(model)
    before, names = model(batch()).detach(), [name for name, _ in model.named_parameters()]
    report = quorem.compress_(model, SUMS, threshold=10, fit=True)
    assert isinstance(model.sparse, integration.EmbeddingBagCollection)
    assert isinstance(model.history, integration.EmbeddingCollection)
    torch.testing.assert_close(model(batch()), before, rtol=1e-4, atol=1e-5)
    assert report.swapped == [
        *("sparse.embedding_bags.user", "sparse.embedding_bags.item"),
        *("history.embeddings.user", "history.embeddings.item", "other"),
    ]
    assert report.left["sparse.embedding_bags.day"] == "7 ids are at most the threshold (10)"
    assert not report.references, "nothing holds the old tables"
    tables = sum(p.nbytes for part in (model.sparse, model.history) for p in part.parameters())
    other = next(entry.bytes_after for entry in report.entries if entry.name == "other")
    assert report.bytes_after == tables + other
    assert not quorem.compress_(model, SUMS).entries, "composed tables are left alone"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    back = quorem.decompress_(model)
    assert type(model.sparse) is stock.EmbeddingBagCollection and type(model.history) is stock.EmbeddingCollection
    assert back.swapped[:3] == ["other", "sparse.user", "sparse.item"]
    assert [name for name, _ in model.named_parameters()] == names
    assert set(optimizer.param_groups[0]["params"]) == set(model.parameters())
    torch.testing.assert_close(model(batch()), before, rtol=1e-4, atol=1e-5)


def test_collections_without_an_equivalent_of_torchrecs_stay() -> None:
    tables = [quorem.Table("user", 100, 8, SUMS, padding_idx=0)]
    model = nn.Sequential(integration.EmbeddingBagCollection(tables, mode="mean"))
    assert quorem.decompress_(model).left == {
        "0.user": "TorchRec's tables have no padding id, which a mean does not count (user)"
    }
    assert isinstance(model[0], integration.EmbeddingBagCollection)


def test_tables_are_drawn_with_the_deviation_of_the_trained() -> None:
    model = Model()
    model.sparse.embedding_bags["user"].weight.data.mul_(100)
    wanted = {name: bag.weight.std().item() for name, bag in model.sparse.embedding_bags.items()}
    quorem.compress_(model, quorem.QR(4), threshold=10)
    dense = integration.to_collection(model.sparse).to_dense()
    for name, std in wanted.items():
        assert dense[name].std().item() == pytest.approx(std, rel=0.2), name


def test_a_pool_is_shared_within_a_collection_and_fitted_to_all_its_tables() -> None:
    torch.manual_seed(0)
    model = Model()
    pool = quorem.HotCold(30, cold=quorem.Pool(120), num_rest=10)
    counts = {f"sparse.embedding_bags.{name}": torch.randint(1, 99, (SIZES[name],)) for name in ("user", "item")}
    trained = {name: bag.weight.detach().clone() for name, bag in model.sparse.embedding_bags.items()}
    quorem.compress_(model, dict.fromkeys(counts, pool), frequencies=counts, fit=True)
    assert list(model.sparse.template.pools) == ["pool"]
    dense = integration.to_collection(model.sparse).to_dense()
    torch.testing.assert_close(dense["day"], trained["day"])
    for name in ("user", "item"):
        hot = counts[f"sparse.embedding_bags.{name}"].argsort(descending=True, stable=True)[:20]
        torch.testing.assert_close(dense[name][hot], trained[name][hot], rtol=1e-5, atol=1e-6)
    loss = torch.zeros(())  # of all ids of both tables
    for name, key in {"user": "viewer", "item": "item"}.items():
        ids, weights = torch.arange(SIZES[name]), counts[f"sparse.embedding_bags.{name}"].float()[:, None]
        lengths = torch.cat([torch.full((len(ids),), int(other == key)) for other in KEYS])
        vectors = model.sparse(KeyedJaggedTensor(KEYS, ids, lengths=lengths))[key]
        loss = loss + (weights * (vectors - trained[name]) ** 2).sum()
    slopes = torch.autograd.grad(loss, list(model.sparse.vectors.parameters()))
    assert max(slope.abs().max() for slope in slopes) < 1e-2 * loss.item(), "the fit is a minimum"


def test_a_budget_gives_a_collection_one_pool() -> None:
    model = Model()
    counts = {name: (1e4 / (1 + torch.arange(n))).long() for name, n in SIZES.items()}
    paths = {"sparse.embedding_bags": counts, "history.embeddings": counts}
    frequencies = {f"{path}.{name}": count for path, of in paths.items() for name, count in of.items()}
    frequencies["other"] = torch.arange(500)
    report = quorem.compress_(model, budget="40kB", optimizer="adagrad", frequencies=frequencies)
    assert sum(entry.bytes_after + entry.state_bytes for entry in report.entries) <= 40_000
    for collection in (model.sparse, model.history):
        assert len(collection.template.pools) == 1
        assert sum(spec.pool is not None for spec in collection.template.specs) > 1
    assert model(batch()).shape == (2, 64)


def test_an_optimizer_of_the_tables_is_refused() -> None:
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer \(Adagrad\) holds tables of sparse: make it after compress_"):
        quorem.compress_(model, SUMS)
    assert type(model.sparse) is stock.EmbeddingBagCollection and optimizer.param_groups


def test_narrow_rows_are_fitted_and_an_optimizer_moves_rows_and_matrix() -> None:
    torch.manual_seed(0)
    model = Model()
    for module in model.sparse.embedding_bags.values():  # what rows of four numbers and a matrix can hold
        n, d = module.weight.shape
        module.weight.data.copy_(torch.randn(n, 4) @ torch.randn(4, d))
    before = model.sparse(batch()).values().detach()
    report = quorem.compress_(model, quorem.Full(width=4), optimizer="adagrad", threshold=10, fit=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    torch.testing.assert_close(model.sparse(batch()).values(), before, rtol=1e-4, atol=1e-5)
    sizes = {entry.name: entry for entry in report.entries}
    assert sizes["sparse.embedding_bags.user"].bytes_after == (600 * 4 + 4 * 8) * 4
    assert sizes["sparse.embedding_bags.user"].state_bytes == (600 * 4 + 4 * 8) * 4
    matrices = list(model.sparse.compose.projections)
    kept = [p.detach().clone() for p in (*matrices, *model.sparse.vectors.parameters())]
    model(batch()).sum().backward()
    optimizer.step()
    moved = [*matrices, *model.sparse.vectors.parameters()]
    assert len(matrices) == 2 and not any(map(torch.equal, kept, moved))


def test_a_pool_of_ids_that_never_occurred_is_fitted() -> None:
    torch.manual_seed(0)
    model = Model()
    trained = model.sparse.embedding_bags["user"].weight.detach().clone()
    counts = {"sparse.embedding_bags.user": (torch.arange(600) < 20).long()}
    pool = quorem.HotCold(20, cold=quorem.Pool(598, num_partitions=2))
    quorem.compress_(model, dict.fromkeys(counts, pool), frequencies=counts, fit=True)
    dense = integration.to_collection(model.sparse).to_dense()["user"]
    torch.testing.assert_close(dense[:20], trained[:20])
    assert (dense - trained).norm() < 0.5 * trained.norm()


def test_a_model_on_the_meta_device_and_a_budget() -> None:
    bags = stock.EmbeddingBagCollection(configs(), device=torch.device("meta"))
    model = DLRM(bags, dense_in_features=4, dense_arch_layer_sizes=[8], over_arch_layer_sizes=[4, 1])
    report = quorem.compress_(model, budget="16kB")
    assert report.bytes_after <= 16_000 and len(report.swapped) == 2
    new = model.sparse_arch.embedding_bag_collection
    assert all(p.is_meta for p in new.vectors.parameters())
    assert [config.num_embeddings for config in new.embedding_bag_configs()] == list(SIZES.values())
    ours = integration.EmbeddingBagCollection(new.tables)
    scores = DLRM(ours, dense_in_features=4, dense_arch_layer_sizes=[8], over_arch_layer_sizes=[4, 1])
    assert scores(torch.zeros(2, 4), batch()).shape == (2, 1)


def odd(number: int, name: str, value: object) -> nn.Module:
    """A collection of which one table has another option."""
    tables = configs()
    setattr(tables[number], name, value)
    return stock.EmbeddingBagCollection(tables)


def with_positions() -> nn.Module:
    lengths = dict.fromkeys(KEYS, 3)
    bags = stock.EmbeddingBagCollection(configs(), is_weighted=True)
    return FeatureProcessedEmbeddingBagCollection(bags, PositionWeightedModuleCollection(lengths))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: odd(1, "pooling", PoolingType.MEAN), "tables of its collection are pooled in different ways"),
        (lambda: odd(1, "feature_names", ["viewer"]), "several tables of its collection read one feature"),
        (lambda: odd(2, "embedding_dim", 6), "the width (6) of day is no multiple of 4, as FBGEMM needs it"),
        (with_positions, "its collection belongs to a FeatureProcessedEmbeddingBagCollection, which needs TorchRec's"),
        (lambda: stock.EmbeddingCollection(configs(EmbeddingConfig), need_indices=True), "returns the ids too"),
    ],
)
def test_collections_that_cannot_be_replaced_stay_with_the_reason(make, reason) -> None:  # type: ignore[no-untyped-def]
    model = nn.Sequential(make())
    before = copy.deepcopy(model.state_dict())
    report = quorem.compress_(model, SUMS)
    assert not report.swapped and len(report.left) == 3
    assert all(reason in why for why in report.left.values()), report.left
    assert model.state_dict().keys() == before.keys()


def test_what_cannot_be_replaced_in_place_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model \(EmbeddingBagCollection\) must contain collections"):
        quorem.compress_(stock.EmbeddingBagCollection(configs()), SUMS)
    table = EmbeddingBagConfig(name="a", num_embeddings=90, embedding_dim=4)
    narrow = nn.Sequential(stock.EmbeddingBagCollection([table]))
    report = quorem.compress_(narrow, quorem.QR(4, operation="concat"))
    why = "its parts would be 2 wide, which is no multiple of 4, as FBGEMM needs it"
    assert report.left == {"0.embedding_bags.a": why}


def test_compression_does_not_load_torchrec() -> None:
    code = (
        "import sys, torch, quorem; model = torch.nn.Sequential(torch.nn.Embedding(1000, 8));"
        "quorem.compress_(model, quorem.QR(4)); quorem.decompress_(model); assert 'torchrec' not in sys.modules"
    )
    python("-c", code)
