"""Saved models that are damaged or hostile: refused with a ValueError that names the file, whatever was done to them.

Hostile files have correct checksums. They are opened under a limit on memory, so that one that made the reader allocate
what it declares would fail with a MemoryError.
"""

import copy
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
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
    tensor_file,
)
from quorem.models import DCN, DLRM
from quorem.partitions import ExplicitPartition
from quorem.schemes import RawCounts
from quorem.store.model_file import KIND, load, save
from quorem.tensor_file import TensorFile

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
    file = TensorFile(path, KIND)
    first = path.stat().st_size - max(entry.stop for entry in file.entries.values())
    return sorted({0, 8, first, *(first + entry.stop for entry in file.entries.values())})


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
    with pytest.raises(ValueError, match=r"long is damaged: its tensors have [0-9,]+ bytes and [0-9,]+ are there"):
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
    data = bytearray(saved.read_bytes())
    data[-1] ^= 1
    (tmp_path / "flipped").write_bytes(data)
    last = max(TensorFile(saved, KIND).entries.items(), key=lambda item: item[1].stop)[0]
    with pytest.raises(ValueError, match=rf"flipped is damaged: {last} differ from their checksums"):
        load(tmp_path / "flipped")
    load(tmp_path / "flipped", table="user")  # whose own rows are whole
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
    tensors = {name: file.tensor(name).clone() for name in file.entries}
    accepted = set()
    for place in places(file.description):
        if place[0] == "versions":
            continue
        for wrong in WRONG:
            tensor_file.write_tensors(path, KIND, tensors, replaced(file.description, place, wrong))
            if not refused(path) and replaced(file.description, place, wrong) != file.description:
                accepted.add(place[-1])
    # Other values of these describe the same file: ids in another order, another padding id, options of no shape.
    harmless = {"padding_idx", "permutation", "num_embeddings", "sparse", "frozen", "num_collisions", "permute"}
    assert accepted <= harmless | {"check", "force", "stride", "features", "raw_ids", 0, 1}


@pytest.mark.parametrize("name", ["embeddings", "frozen", "versions", "type", "top"])
def test_values_that_are_missing(name: str, saved: Path, tmp_path: Path) -> None:
    file = TensorFile(saved, KIND)
    values = {key: value for key, value in file.description.items() if key != name}
    tensor_file.write_tensors(tmp_path / "hostile", KIND, {key: file.tensor(key) for key in file.entries}, values)
    with pytest.raises(ValueError, match=rf"hostile is damaged: {name} \(missing\) must be"):
        load(tmp_path / "hostile")


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(path: Path, header: dict[str, Any], data: bytes) -> None:
    """A file with any header, sealed as a correct one is."""
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict) and "header_checksum" in metadata:
        rest = {name: value for name, value in metadata.items() if name != "header_checksum"}
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        metadata["header_checksum"] = tensor_file._header_checksum(entries, rest)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_wrong_values_in_the_header(saved: Path, tmp_path: Path) -> None:
    header, data = header_of(saved)
    path = tmp_path / "hostile"
    few = ("__metadata__", "embeddings.tables.user.0", "maps.car.0", "output.bias")
    for place in places({name: header[name] for name in few}):
        for wrong in (*WRONG, [2**40, 2**40], [0, 2**62], [-4, 0], "I64", "F8_E4M3"):
            changed = replaced(header, place, wrong)
            if changed == header or place[-1] == "header_checksum":
                continue
            write_header(path, changed, data)
            assert refused(path), (place, wrong)


def test_a_tensor_that_overlaps_another(saved: Path, tmp_path: Path) -> None:
    header, data = header_of(saved)
    header["output.bias"]["data_offsets"] = header["output.weight"]["data_offsets"]
    header["output.bias"]["shape"] = header["output.weight"]["shape"]
    write_header(tmp_path / "hostile", header, data)
    with pytest.raises(ValueError, match=r"hostile is damaged: output.* starts at byte \d+ and must start at \d+"):
        load(tmp_path / "hostile")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"[" * 100_000, "header is nested too deeply"),
        (b"{}", "is a safetensors file of something else"),
        (b"[]", "header is not a JSON object"),
        (b'{"a": 1, "a": 2}', "a name stands twice in its header"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"", "damaged"),
    ],
    ids=["deep", "empty-object", "list", "twice", "digits", "not-utf8", "empty"],
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
    tensors = {name: file.tensor(name).clone() for name in file.entries if name.startswith("embeddings.")}
    dlrm = {"type": "DLRM", "num_dense": 1, "embedding_dims": [1] * 2**17, "raw_dense": False, "bottom": [], "top": [1]}
    values = dlrm | {name: file.description[name] for name in ("embeddings", "frozen", "versions")}
    tensor_file.write_tensors(tmp_path / "hostile", KIND, tensors, values)
    assert refused(tmp_path / "hostile")
