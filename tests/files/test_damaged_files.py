"""Saved models that are damaged or hostile: refused with a ValueError that names the file, whatever was done to them.

Hostile files have correct checksums. They are opened under a limit on memory, so that one that made the reader allocate
what it declares would fail with a MemoryError.
"""

import copy
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import CASES, fill_

from quorem import (
    QR,
    ChineseRemainder,
    Custom,
    Embedding,
    EmbeddingCollection,
    GeneralizedQR,
    HotCold,
    Pool,
    Table,
    quantize_,
)
from quorem.files import tensors as tensor_file
from quorem.files.atomic import sealed, unsealed
from quorem.files.saved_model import KIND, load, save
from quorem.files.tensors import TensorFile
from quorem.models import DCN, DLRM
from quorem.paper.partitions import ExplicitPartition
from quorem.paper.schemes import RawCounts

SPARE_BYTES = 256 << 20  # far more than the small files here need, far less than the sizes they declare


def network() -> DLRM:
    cars = Custom((ExplicitPartition([0, 1, 0, 1, 2, 2]),), check=False)
    tables = [
        Table("user", 60, 4, QR(4, permute=1)),
        Table("path", 60, 4, CASES["path-mlp"]),
        Table("car", 6, 4, cars, padding_idx=1),
        Table("item", 60, 4, ChineseRemainder(2, operation="concat")),
        Table("hot", 60, 4, HotCold(5, cold=Pool(20), num_rest=10), frequencies=torch.arange(60)),
    ]
    return DLRM(fill_(EmbeddingCollection(tables)), num_dense=2, bottom=(3,), top=(3,))


def raw_and_pooled() -> EmbeddingCollection:
    """Raw ids with hot and cold ones, and two tables that share a pool."""
    seen, counts = RawCounts(torch.tensor([-5, 3, 2**62]), torch.tensor([7, 2, 9])), torch.arange(60)
    tables = [
        Table("word", 2**40, 4, HotCold(2, cold=GeneralizedQR(4, operation="add")), raw_ids=True, frequencies=seen),
        Table("user", 60, 4, HotCold(5, cold=Pool(30), num_rest=10), frequencies=counts, unknown="rest"),
        Table("item", 60, 4, HotCold(3, cold=Pool(30)), frequencies=counts, unknown="hash"),
    ]
    return fill_(EmbeddingCollection(tables))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model"
    save(network(), path)
    return path


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of small files: whether they outlast a power failure is of no interest here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@contextmanager
def limited_memory() -> Iterator[None]:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


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
            file.verify()
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


# Descriptions that do not describe what the file holds, with correct checksums.

WRONG = (None, True, -1, 0, 2**40, 2**70, 1.5, "x", [], [1], {"x": 1})


def places(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of nested JSON."""
    if path:
        yield path
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def replaced(values: Any, path: tuple[Any, ...], value: Any) -> Any:
    result = copy.deepcopy(values)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return result


def refused(path: Path) -> bool:
    """Whether a file is refused in the right way; a change without a meaning may load."""
    with limited_memory():
        try:
            load(path)
        except ValueError as error:
            assert "hostile" in str(error)
            return True
    return False


@pytest.mark.parametrize("kind", ["network", "table", "raw"])
def test_wrong_values_in_the_description(kind: str, saved: Path, tmp_path: Path) -> None:
    source, path = saved, tmp_path / "hostile"
    if kind == "table":
        source = tmp_path / "table"
        save(quantize_(Embedding(60, 6, CASES["path-levels"], padding_idx=3), 4), source)
    elif kind == "raw":
        source = tmp_path / "raw"
        save(quantize_(raw_and_pooled(), 8), source)
    file = TensorFile(source, KIND)
    tensors = {name: tensor.clone() for name, tensor in file.tensors.items()}
    accepted = set()
    for place in places(file.description):
        if place[0] == "versions":
            continue
        for wrong in WRONG:
            tensor_file.write_tensors(path, KIND, tensors, replaced(file.description, place, wrong))
            if not refused(path) and replaced(file.description, place, wrong) != file.description:
                accepted.add(place[-1])
    # Other values of these describe the same file: ids in another order, another padding id, options of no shape.
    harmless = {"padding_idx", "num_embeddings", "sparse", "frozen", "num_collisions", "name"}
    assert accepted <= harmless | {"check", "force", "features", "raw_ids", 0}


@pytest.mark.parametrize("name", ["embeddings", "frozen", "versions", "network"])
def test_values_that_are_missing(name: str, saved: Path, tmp_path: Path) -> None:
    file = TensorFile(saved, KIND)
    values = {key: value for key, value in file.description.items() if key != name}
    tensor_file.write_tensors(tmp_path / "hostile", KIND, file.tensors, values)
    with pytest.raises(ValueError, match=f"hostile is damaged: {name} is missing"):
        load(tmp_path / "hostile")


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(path: Path, header: dict[str, Any], data: bytes) -> None:
    """A file with any header, whose checksums fit it."""
    with suppress(TypeError, KeyError, ValueError):  # some headers cannot be sealed
        values = unsealed(json.loads(header["__metadata__"][tensor_file.METADATA]))
        for name, fact in values["tensors"].items():
            fact[:2] = header[name]["dtype"], header[name]["shape"]
        header["__metadata__"][tensor_file.METADATA] = json.dumps(sealed(values))
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_wrong_values_in_the_header(saved: Path, tmp_path: Path) -> None:
    header, data = header_of(saved)
    path = tmp_path / "hostile"
    few = ("__metadata__", "embeddings.stored", "maps.2.0", "output.bias")
    for place in places({name: header[name] for name in few}):
        for wrong in (*WRONG, [2**40, 2**40], [0, 2**62], [-4, 0], "I64", "F8_E4M3"):
            changed = replaced(header, place, wrong)
            if changed == header:
                continue
            write_header(path, changed, data)
            assert refused(path), (place, wrong)


def test_a_tensor_that_overlaps_another(saved: Path, tmp_path: Path) -> None:
    header, data = header_of(saved)
    header["output.bias"]["data_offsets"] = header["output.weight"]["data_offsets"]
    header["output.bias"]["shape"] = header["output.weight"]["shape"]
    write_header(tmp_path / "hostile", header, data)
    with pytest.raises(ValueError, match=r"hostile is damaged, or not a quorem-model file: .*invalid offset"):
        load(tmp_path / "hostile")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"[" * 100_000, "invalid JSON in header"),
        (b"{}", "is a safetensors file of something else"),
        (b"[]", "invalid JSON in header"),
        (b'{"__metadata__": {"quorem": "' + b"[" * 100_000 + b'"}}', "maximum recursion depth"),
        (b'{"__metadata__": {"quorem": "[]"}}', "its metadata is not a JSON object"),
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
        assert refused(tmp_path / "hostile")


def test_many_tables_do_not_ask_for_their_pairs(tmp_path: Path) -> None:
    """DLRM's dot products of V vectors are V squared numbers, of which the file must show the weights first."""
    source = tmp_path / "net"
    save(DCN(EmbeddingCollection([Table(f"t{i}", 2, 1) for i in range(200)]), num_dense=1, deep=(1,)), source)
    file = TensorFile(source, KIND)
    tensors = {name: t.clone() for name, t in file.tensors.items() if name.startswith("embeddings.")}
    dlrm = {"type": "DLRM", "num_dense": 1, "embedding_dims": [1] * 2**17, "raw_dense": False, "bottom": [], "top": [1]}
    tensor_file.write_tensors(tmp_path / "hostile", KIND, tensors, file.description | {"network": dlrm})
    assert refused(tmp_path / "hostile")
