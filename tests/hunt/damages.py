"""Ways to damage a file: bytes that change by accident, and files that lie about what they hold."""

import ast
import copy
import io
import json
import os
import pickle
import random
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quorem.files import atomic as files
from quorem.files import tensors as tensor_file

EXECUTED = Path(tempfile.gettempdir()) / f"quorem-hunt-{os.getpid()}"  # is there if a file made its reader run code
WRONG = [None, True, -1, 0.5, 1e308, 10**400, 2**40, 2**62, "", "x", [], {}, [1], {"a": 1}, "é\0"]


def flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def garble(data: bytes, rng: random.Random) -> bytes:
    at, size = rng.randrange(len(data)), rng.choice([1, 2, 8, 100])
    return data[:at] + rng.randbytes(size) + data[at + size :]


def zero(data: bytes, rng: random.Random) -> bytes:
    at, size = rng.randrange(len(data)), rng.choice([1, 16, 4096])
    return data[:at] + bytes(len(data[at : at + size])) + data[at + size :]


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.choice([len(data), rng.randrange(len(data))])
    return data[:at] + rng.choice([b"\n", b"\0", b'"', rng.randbytes(9), data[:50]]) + data[at:]


def change_value(values: Any, rng: random.Random) -> None:
    """Another value, or none, somewhere in nested JSON."""
    while True:
        keys = list(values) if isinstance(values, dict) else list(range(len(values)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(values[key], dict | list) and values[key] and rng.random() < 0.7:
            values = values[key]
            continue
        if rng.random() < 0.3:
            del values[key]
        else:
            values[key] = rng.choice(WRONG)
        return


def change_json(data: bytes, rng: random.Random) -> bytes:
    """Another value, or none, somewhere in a JSON object, its checksum made to fit: as a hand or another version would.

    What is no JSON object is garbled. Of several lines one is changed.
    """
    lines = data.split(b"\n")
    at = rng.randrange(len(lines)) if len(lines) > 2 and data.startswith(b'{"') else None
    try:
        values = json.loads(data if at is None else lines[at])
        sealed = files.CHECKSUM in values
        values = files.unsealed(values)
    except (ValueError, TypeError):
        return garble(data, rng)
    change_value(values, rng)
    text = json.dumps(files.sealed(values) if sealed else values).encode()
    return text if at is None else b"\n".join([*lines[:at], text, *lines[at + 1 :]])


def change_header(data: bytes, rng: random.Random) -> bytes:
    """Another value in the header of a safetensors or ``.npy`` file, checksum made to fit; of other files, in JSON."""
    if data.startswith(b"\x93NUMPY"):
        return _change_array_header(data, rng)
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
        values = files.unsealed(json.loads(header["__metadata__"][tensor_file.METADATA]))
        old = copy.deepcopy(header)
    except (ValueError, TypeError, KeyError):
        return change_json(data, rng)
    if rng.random() < 0.7:
        change_value(values["description"], rng)
    else:
        change_value(header, rng)
        dtypes = {name: dtype for dtype, name in tensor_file.NAME_OF_DTYPE.items()}
        for name in values["checksums"]:
            if isinstance(entry := header.get(name), dict) and (dtype := dtypes.get(str(entry.get("dtype")))):
                about = f"{dtype} {entry.get('shape')}".encode()
                content = data[8 + length :][slice(*old[name]["data_offsets"])]
                values["checksums"][name] = zlib.crc32(content, zlib.crc32(about))
    if isinstance(header.get("__metadata__"), dict):
        header["__metadata__"][tensor_file.METADATA] = json.dumps(files.sealed(values))
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % rng.choice([1, 64]))
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _change_array_header(data: bytes, rng: random.Random) -> bytes:
    """Another dtype or shape in a ``.npy`` file."""
    length = int.from_bytes(data[8:10], "little")
    header = ast.literal_eval(data[10 : 10 + length].decode())
    if rng.random() < 0.5:
        header["descr"] = rng.choice(["|O", "<f8", "<i4", "|V0", "<U1", ">i8", "<m8", "x", [("a", "<i8")], None])
    else:
        header["shape"] = rng.choice([(), (0,), (2**40,), (2**62, 4), (-1,), (1.5,), [3], None, (2**70,)])
    text = repr(header).encode()
    text += b" " * (-(11 + len(text)) % 64) + b"\n"
    return data[:8] + len(text).to_bytes(2, "little") + text + data[10 + length :]


class Call:
    """Unpickling it makes a folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(EXECUTED),)


def pickled(data: bytes, rng: random.Random) -> bytes:
    """A pickle that makes a folder when it is loaded: alone, in a ``.npy`` file, or as ``torch.save`` writes it."""
    file = io.BytesIO()
    kind = rng.randrange(3)
    if kind == 0:
        pickle.dump(Call(), file)
    elif kind == 1:
        np.save(file, np.array([Call()], dtype=object), allow_pickle=True)
    else:
        torch.save({"weight": Call()}, file)
    return file.getvalue()


DAMAGES = {f.__name__: f for f in (flip, garble, zero, cut, insert, change_json, change_header, pickled)}
