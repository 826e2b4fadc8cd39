"""examples/serve.py on a free port: raw rows score as in quorem, and what it cannot take is answered by 400."""

import http.client
import importlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason='needs uvicorn: pip install "quorem[serve]"')
pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import torch
import uvicorn
from commands import invoke
from processes import python

import quorem

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve.py"


ROW = {"price": 2.5, "user": "user 7", "item": "4", "tags": "t0|t1"}


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    invoke("export", folder / "run", "--out", folder / "model.onnx")
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        example = importlib.import_module("serve")
    finally:
        sys.path.remove(str(EXAMPLE.parent))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(example.app(folder / "model.onnx"), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join()


def post(port: int, body: Any) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/score", body if isinstance(body, bytes) else json.dumps(body))
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_scores(folder: Path, port: int) -> None:
    rows = [ROW, {"price": "0.25", "user": "user 39", "item": 9, "tags": []}, dict.fromkeys(ROW)]
    status, answer = post(port, rows)
    assert status == 200
    values = {"price": [2.5, 0.25, None], "user": ["user 7", "user 39", None], "item": [4, 9, None]}
    expected = quorem.load(folder / "run")(values | {"tags": [["t0", "t1"], [], None]})
    torch.testing.assert_close(torch.tensor(answer["probabilities"]), expected)
    status, answer = post(port, rows[0])
    torch.testing.assert_close(torch.tensor(answer["probabilities"]), expected[:1])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "the body must be JSON: Expecting"),
        ([], "must be a row"),
        ([1], "must be a row"),
        ({"price": 1}, "the row has no column user"),
        (ROW | {"price": "x"}, "price ('x') must be a number"),
        (ROW | {"user": "somebody"}, "user ('somebody') is not in the vocabulary"),
        (b"[" * 10**5, "recursion"),
    ],
)
def test_what_it_cannot_take(body: Any, reason: str, port: int) -> None:
    status, answer = post(port, body)
    assert status == 400 and reason in answer["error"]


def test_it_needs_neither_torch_nor_quorem() -> None:
    lines = [
        f"import sys; sys.path.insert(0, {str(EXAMPLE.parent)!r})",
        "import serve",
        "assert 'torch' not in sys.modules and 'quorem' not in sys.modules",
    ]
    python("-c", "\n".join(lines))
