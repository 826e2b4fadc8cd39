"""Networks of path-based tables in a state_dict: names that keep their meaning, and mismatches."""

from dataclasses import replace

import pytest
import torch
from oracles import CASES, D, N, fill_
from torch.nn.utils import prune

from quorem import Embedding, EmbeddingCollection, Path, Table

PATH, NARROW = Path(4, hidden=(5,), force=True), Path(4, hidden=(3,), force=True)


def paths(*names: str, **options: object) -> EmbeddingCollection:
    """Path-based tables; one whose name starts with "narrow" has networks of another shape."""
    tables = [Table(name, N, D, NARROW if name.startswith("narrow") else PATH) for name in names]
    return EmbeddingCollection([Table("plain", N, D), *tables], **options)


def test_networks_keep_their_meaning_where_tables_come_go_and_change_places() -> None:
    """As tables do: they are saved by the name of their table, whatever the groups are that they run in."""
    saved = fill_(paths("user", "narrow", "0", "item.id"))
    state, dense = saved.state_dict(), saved.to_dense()
    for name in ("paths.user.0.0.weight", "paths.0.0.0.weight", "paths.item.id.0.0.weight"):
        assert state[name].shape == (4, D, 5)
    for names in (["item.id", "user", "0", "narrow"], ["narrow", "0"], ["narrow b", "item.id", "more", "user"]):
        module = fill_(paths(*names), 1)
        before = module.to_dense()
        missing = module.load_state_dict(state, strict=set(names) == {"item.id", "user", "0", "narrow"}).missing_keys
        assert all(
            key.startswith(("tables.more.", "paths.more.", "tables.narrow b.", "paths.narrow b.")) for key in missing
        )
        for name, table in module.to_dense().items():
            assert torch.equal(table, dense[name] if name in dense else before[name]), name


@pytest.mark.parametrize("assign", [False, True])
def test_networks_that_were_saved_by_group_still_load(assign: bool) -> None:
    """A state of before: networks of all tables of a group in one tensor, in the order of the tables."""
    draw = torch.Generator().manual_seed(0)
    old = {f"tables.{name}.0": torch.randn(15, D, generator=draw) for name in ("user", "narrow", "0")}
    old["tables.plain.0"] = torch.randn(N, D, generator=draw)
    for group, count, width in ((0, 8, 5), (1, 4, 3)):
        sizes = {"weights.0": (D, width), "biases.0": (width,), "weights.1": (width, D), "biases.1": (D,)}
        old |= {f"paths.{group}.{name}": torch.randn(count, *size, generator=draw) for name, size in sizes.items()}
    module = paths("user", "narrow", "0", device="meta" if assign else None)
    module.load_state_dict(old, assign=assign)
    for name, group, first in (("user", 0, 0), ("narrow", 1, 0), ("0", 0, 4)):
        ids = torch.arange(N)
        network = first + ids // 15
        w0, b0, w1, b1 = (old[f"paths.{group}.{kind}.{i}"] for i in (0, 1) for kind in ("weights", "biases"))
        hidden = torch.relu((old[f"tables.{name}.0"][ids % 15][:, None] @ w0[network])[:, 0] + b0[network])
        torch.testing.assert_close(module.to_dense()[name], (hidden[:, None] @ w1[network])[:, 0] + b1[network])
        assert torch.equal(module.state_dict()[f"paths.{name}.0.1.bias"], b1[first : first + 4])
    with pytest.raises(RuntimeError, match=r"size mismatch for paths.0.weights.0"):
        paths("user", "narrow").load_state_dict({k: v for k, v in old.items() if k != "tables.0.0"})


def test_networks_of_another_shape_and_on_meta_are_refused() -> None:
    state = paths("user").state_dict()
    wider = {**state, "paths.user.0.0.weight": torch.zeros(4, D, 7)}
    with pytest.raises(RuntimeError, match=r"paths.user.0.0.weight is \(4, 12, 7\) in the checkpoint and \(4, 12, 5\)"):
        paths("user").load_state_dict(wider)
    del state["paths.user.0.0.weight"]
    with pytest.raises(RuntimeError, match=r"paths.0.weights.0 is on the meta device: it takes all its networks"):
        paths("user", "item", device="meta").load_state_dict(
            {"paths.user.0.0.weight": torch.zeros(4, D, 5)}, strict=False, assign=True
        )


def test_pruned_networks_are_saved() -> None:
    saved, module = (fill_(paths("user", "item"), seed) for seed in (0, 1))
    for each in (saved, module):
        prune.l1_unstructured(each.paths[0].weights, "0", amount=0.5)
    assert "paths.0.weights.0_orig" in saved.state_dict() and "paths.user.0.1.weight" in saved.state_dict()
    module.load_state_dict(saved.state_dict())
    for name, value in module.state_dict().items():
        assert torch.equal(value, saved.state_dict()[name]), name


def test_another_activation_is_another_scheme() -> None:
    first, second = (Embedding(N, D, replace(CASES["path-mlp"], activation=name)) for name in ("relu", "sigmoid"))
    with pytest.raises(RuntimeError, match="holds sigmoid path of 1:15, 15:4 in the checkpoint and relu path"):
        first.load_state_dict(second.state_dict())
    first.load_state_dict(second.state_dict(destination={}))
