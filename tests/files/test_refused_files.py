"""What ``quorem.save`` and ``quorem.load`` refuse by name; ``test_damaged_files`` has files that are damaged."""

import json
from pathlib import Path

import pytest
import torch
from oracles import D, N
from torch import nn

from quorem import QR, Embedding
from quorem.files import saved_model
from quorem.files import tensors as tensor_file
from quorem.files.saved_model import KIND, load, save
from quorem.files.tensors import TensorFile
from quorem.models import DLRM


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(Embedding(N, D, QR(4)), tmp_path / "table")
    before = (tmp_path / "table").read_bytes()

    def fails(tensor: object) -> list[bytes]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_file, "checksum", lambda tensor: 0)
    monkeypatch.setattr(tensor_file, "byte_blocks", fails)
    with pytest.raises(OSError, match="disk full"):
        save(Embedding(N, D, QR(6)), tmp_path / "table")
    assert (tmp_path / "table").read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["table"]


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Embedding(N, D, QR(4))


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (OwnModel(), "OwnModel"),
        (nn.Embedding(3, 4), "Embedding"),
        (DLRM(nn.Embedding(3, 4), embedding_dims=(4,)), "Emb"),
    ],
)
def test_models_of_other_classes_are_refused(model: nn.Module, kind: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=rf"model \({kind}.*\) must be an Embedding, EmbeddingBag, EmbeddingColl"):
        save(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_there_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing")


def test_foreign_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    module, path = Embedding(N, D, QR(4)), tmp_path / "file"
    torch.save(module.state_dict(), path)
    with pytest.raises(ValueError, match=r"file is a zip archive, such as torch.save writes.*it is not unpickled"):
        load(path)
    save_file(module.state_dict(), path)
    with pytest.raises(ValueError, match=r"file is a safetensors file of something else: it says 'no format'"):
        load(path)
    save_file(module.state_dict(), path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"file is a safetensors file of something else: it says 'pt' and must say"):
        load(path)
    for data in (b'{"json": "of 20 bytes"}', b"\x80\x04\x95" + bytes(100), b"label,user\n1,2\n" * 10):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"file is damaged, or not a quorem-model file: .* header"):
            load(path)
    for data in (b"", b"PK"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"file is damaged, or not a quorem-model file: .*header too small"):
            load(path)


def test_another_version_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(saved_model, "KIND", KIND._replace(version=7))
        save(Embedding(N, D, QR(4)), tmp_path / "table")
    with pytest.raises(ValueError, match=r"table has format version '7', but this quorem reads 1"):
        load(tmp_path / "table")


def test_an_option_that_is_not_known_is_not_ignored(tmp_path: Path) -> None:
    save(Embedding(N, D, QR(4)), tmp_path / "table")
    file = TensorFile(tmp_path / "table", KIND)
    tensors = {name: tensor.clone() for name, tensor in file.tensors.items()}
    changed = json.loads(json.dumps(file.description))
    changed["embeddings"]["tables"][0]["rotation"] = 3
    tensor_file.write_tensors(tmp_path / "table", KIND, tensors, changed)
    with pytest.raises(ValueError, match=r"embeddings.tables.0..rotation is not known: SavedTable has"):
        load(tmp_path / "table")
