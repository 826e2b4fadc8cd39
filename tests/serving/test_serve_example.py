"""examples/serve.py on a free port: the scores of the model, null for unknown ids, and 400 for what it cannot take."""

import http.client
import importlib.util
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason='needs uvicorn: pip install "quorem[serve]"')

import torch
import uvicorn

import quorem
from quorem.serving.onnx_export import export_onnx

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve.py"
SIZES = (50, 20, 7)


def model() -> torch.nn.Module:
    tables = [quorem.Table(f"t{i}", n, 8, quorem.QR(4)) for i, n in enumerate(SIZES)]
    torch.manual_seed(0)
    return quorem.models.DLRM(quorem.EmbeddingCollection(tables), num_dense=4, bottom=(8,), top=(8,)).eval()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = tmp_path_factory.mktemp("serve") / "model.onnx"
    export_onnx(model(), path)
    spec = importlib.util.spec_from_file_location("serve_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(example.app(str(path)), log_level="error"))
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


def test_scores(port: int) -> None:
    dense, ids = torch.rand(5, 4), torch.stack([torch.randint(n, (5,)) for n in SIZES], 1)
    status, answer = post(port, {"dense": dense.tolist(), "ids": ids.tolist()})
    assert status == 200
    expected = model()(dense, ids).sigmoid().detach()
    torch.testing.assert_close(torch.tensor(answer["probabilities"]), expected)
    for unknown in (-1, 2**64 - 1):
        rows = ids.tolist()
        rows[1][2] = unknown
        answer = post(port, {"dense": dense.tolist(), "ids": rows})[1]
        assert [score is None for score in answer["probabilities"]] == [False, True, False, False, False]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "Expecting"),
        ([], "must be an object of dense and ids"),
        ({"dense": [[1, 2, 3, 4]]}, "must be an object of dense and ids"),
        ({"dense": [[1, 2]], "ids": [[1, 2, 3]]}, "must be rows of 4"),
        ({"dense": [[1, 2, 3, 4]], "ids": [[1, 2, 3]] * 2}, "as many rows"),
        ({"dense": [[1, 2, 3, "x"]], "ids": [[1, 2, 3]]}, "could not convert"),
        ({"dense": [[1, 2, 3, 4]], "ids": [[1, 2, 2**64]]}, "must be integers of 64 bits"),
        ({"dense": [[1, 2, 3, 4]], "ids": [[1, 2, 2.5]]}, "must be integers of 64 bits"),
        (b"[" * 10**5, "recursion"),
    ],
)
def test_what_it_cannot_take(body: Any, reason: str, port: int) -> None:
    status, answer = post(port, body)
    assert status == 400 and reason in answer["error"]


def test_it_needs_neither_torch_nor_quorem() -> None:
    lines = [
        "import runpy, sys",
        f"runpy.run_path({str(EXAMPLE)!r})",
        "assert 'torch' not in sys.modules and 'quorem' not in sys.modules",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True)
