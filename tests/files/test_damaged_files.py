"""Saved models that are damaged or of another kind: refused with a ValueError that names the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import limited_memory
from oracles import CASES, D, N, fill_
from torch import nn

import quorem
from quorem import QR, Custom, Embedding, EmbeddingCollection, HotCold, Pool, Table
from quorem.files import saved_model
from quorem.files import tensors as tensor_file
from quorem.files.saved_model import KIND, load, save
from quorem.files.tensors import TensorFile
from quorem.models import DLRM
from quorem.paper.partitions import ExplicitPartition

SPARE_BYTES = 256 << 20  # far more than the small files here need, far less than the sizes they declare


def network() -> DLRM:
    cars = Custom((ExplicitPartition([0, 1, 0, 1, 2, 2]),), check=False)
    tables = [
        Table("user", 60, 4, QR(4)),
        Table("path", 60, 4, CASES["path-mlp"]),
        Table("car", 6, 4, cars, padding_idx=1),
        Table("item", 60, 4, quorem.ChineseRemainder(2, operation="concat")),
        Table("hot", 60, 4, HotCold(5, cold=Pool(20), num_rest=10), frequencies=torch.arange(60)),
    ]
    return DLRM(fill_(EmbeddingCollection(tables)), num_dense=2, bottom=(3,), top=(3,))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model"
    save(network(), path)
    return path


def boundaries(path: Path) -> list[int]:
    """Where the parts of a file meet: the length, the header, each tensor."""
    header, data = header_of(path)
    first, ends = path.stat().st_size - len(data), [e["data_offsets"][1] for k, e in header.items() if k[0] != "_"]
    return sorted({0, 8, first, *(first + end for end in ends)})


def test_cut_anywhere(saved: Path, tmp_path: Path) -> None:
    data, path = saved.read_bytes(), tmp_path / "cut"
    near = {place + step for place in boundaries(saved) for step in (-1, 0, 1)}
    for size in sorted(near | set(range(0, len(data), 61))):
        if 0 <= size < len(data):
            path.write_bytes(data[:size])
            with pytest.raises(ValueError, match=r"cut is (cut off|damaged)"):
                load(path, verify=False)


def test_too_long(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(saved.read_bytes() + b"x")
    with pytest.raises(ValueError, match=r"long is damaged, or not a quorem-model file: .* file not fully covered"):
        load(tmp_path / "long")


def test_any_flipped_byte_is_seen(saved: Path, tmp_path: Path) -> None:
    data, path = saved.read_bytes(), tmp_path / "flipped"
    expected = TensorFile(saved, KIND).description
    for place in range(0, len(data), 5):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            file = TensorFile(path, KIND)
        except ValueError as error:
            assert "flipped" in str(error)
        else:  # a space of the header's padding became another blank
            assert chr(data[place]).isspace() and file.description == expected


def test_a_flipped_number_is_named(saved: Path, tmp_path: Path) -> None:
    data, (header, tensors) = bytearray(saved.read_bytes()), header_of(saved)
    data[len(data) - len(tensors) + header["embeddings.stored"]["data_offsets"][0]] ^= 1
    (tmp_path / "flipped").write_bytes(data)
    with pytest.raises(ValueError, match=r"flipped is damaged: embeddings.stored differ from their checksums"):
        load(tmp_path / "flipped")
    load(tmp_path / "flipped", verify=False)


def without(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(description: dict[str, Any], tensors: dict[str, Any]) -> None:
        del (description if name in description else tensors)[name]

    return change


def rotated(description: dict[str, Any], tensors: dict[str, Any]) -> None:
    description["tables"][0]["rotation"] = 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((without(name), f"{name} is missing") for name in ("tables", "frozen", "versions", "network")),
        (without("maps.0"), r"tables\[2\]\.scheme: .*index \('maps\.0'\) must be a list of buckets"),
        (without("embeddings.ranks"), r'Missing key\(s\) in state_dict: "embeddings\.ranks"'),
        (without("embeddings.stored"), r'Missing key\(s\) in state_dict: "embeddings\.stored"'),
        (rotated, r"tables.0..rotation is not known: Table has"),
    ],
)
def test_what_does_not_fit_though_its_checksums_do(change: Any, message: str, saved: Path, tmp_path: Path) -> None:
    file = TensorFile(saved, KIND)
    change(file.description, file.tensors)
    tensor_file.write_tensors(tmp_path / "hostile", KIND, file.tensors, file.description)
    with pytest.raises(ValueError, match=f"hostile is damaged: {message}"):
        load(tmp_path / "hostile")


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"[" * 100_000, "invalid JSON in header"),
        (b"{}", "is a safetensors file of something else"),
        (b"[]", "invalid JSON in header"),
        (b'{"__metadata__": {"quorem": "' + b"[" * 100_000 + b'"}}', "maximum recursion depth"),
        (b'{"__metadata__": {"quorem": "[]"}}', "'list' object has no attribute"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"", "damaged"),
    ],
    ids=["deep", "empty-object", "list", "deep-metadata", "metadata-list", "digits", "not-utf8", "empty"],
)
def test_headers_that_are_no_headers(text: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / "hostile").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match=match):
        load(tmp_path / "hostile")


def test_a_header_longer_than_the_file_is_not_read(tmp_path: Path) -> None:
    for length in (2**63, 2**64 - 1, 10**12, 1000):
        (tmp_path / "hostile").write_bytes(length.to_bytes(8, "little") + b"{}" * 10)
        with limited_memory(SPARE_BYTES), pytest.raises(ValueError, match="hostile"):
            load(tmp_path / "hostile")


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


def test_foreign_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    module, path = Embedding(N, D, QR(4)), tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        load(path)
    torch.save(module.state_dict(), path)
    with pytest.raises(ValueError, match=r"file is a zip archive, such as torch.save writes.*it is not unpickled"):
        load(path)
    for name, metadata in (("no format", None), ("pt", {"format": "pt"})):
        save_file(module.state_dict(), path, metadata)
        with pytest.raises(ValueError, match=f"file is a safetensors file of something else: it says '{name}'"):
            load(path)
    for data in (b'{"json": "of 20 bytes"}', b"\x80\x04\x95" + bytes(100), b"label,user\n1,2\n" * 10, b"", b"PK"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"file is damaged, or not a quorem-model file: .*header"):
            load(path)


def test_another_version_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(saved_model, "KIND", KIND._replace(version=7))
        save(Embedding(N, D, QR(4)), tmp_path / "table")
    with pytest.raises(ValueError, match=r"table has format version '7', but this quorem reads 4"):
        load(tmp_path / "table")
