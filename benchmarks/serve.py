"""How long ``examples/serve.py`` takes to answer, on loopback, by rows of a request.

    python benchmarks/serve.py --seconds 3 --out benchmarks/results/serve.json

DLRM with 26 features of Criteo's cardinalities, scaled, rows in 8 bits, exported to ONNX. The server is one process
with one thread of ONNX Runtime; the client is another process with one connection. A request has rows of raw values,
13 numbers and 26 ids. ``in_process`` is the session alone on encoded rows, without HTTP and JSON.
"""

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import result_file
import torch

import quorem
from quorem.data.shape import CATEGORICAL_NAMES, DENSE_NAMES, scaled_cardinalities
from quorem.experiments.bench.grid import draw_ids
from quorem.files.provenance import commit, versions
from quorem.serving.named import export_named

EXAMPLE = Path(__file__).parents[1] / "examples" / "serve.py"
CASES = (1, 32, 1024)  # rows of a request
STARTS_WITHIN = 120  # seconds
BODIES = 32  # requests that the client goes through, again and again


def main() -> None:
    parser = result_file.parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case")
    parser.add_argument("--scale", type=float, default=0.01, help="of Criteo's cardinalities")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder) / "model.onnx", options.seconds, options.scale)
    result |= {"cores": os.cpu_count(), "versions": versions("onnxruntime", "starlette", "uvicorn"), "commit": commit()}
    print(json.dumps(result, indent=1))
    result_file.write(options.out, result)


def measure(path: Path, seconds: float, scale: float) -> dict[str, Any]:
    sizes = scaled_cardinalities(scale)
    tables = [quorem.Table(name, n, 16, quorem.QR(4)) for name, n in zip(CATEGORICAL_NAMES, sizes, strict=True)]
    model = quorem.quantize_(quorem.models.DLRM(quorem.EmbeddingCollection(tables)), 8)
    export_named(model, path)
    write_rules(path.with_suffix(".json"), sizes)
    result = {"scale": scale, "ids": sum(sizes), "bytes": path.stat().st_size, "seconds": seconds, "cases": []}
    port = free_port()
    server = subprocess.Popen([sys.executable, str(EXAMPLE), str(path), "--port", str(port)])
    try:
        wait_for(port, server)
        for rows in CASES:
            bodies = [request(rows, sizes, seed) for seed in range(BODIES)]
            answered(port, bodies, 0.5)  # connections, caches
            case = {
                "rows": rows,
                **answered(port, bodies, seconds),
                "in_process": in_process(path, bodies, seconds / 3),
            }
            result["cases"].append(case)
    finally:
        server.terminate()
        server.wait()
    return result


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            connection.getresponse().read()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


def write_rules(path: Path, sizes: Any) -> None:
    """The rules by which the server encodes rows; the values of made-up columns are the ids themselves."""
    categorical = [
        {"name": name, "size": size, "multi": False, "unknown": None}
        for name, size in zip(CATEGORICAL_NAMES, sizes, strict=True)
    ]
    dense = [{"name": name, "transform": "signed_log"} for name in DENSE_NAMES]
    rules = {"jagged": False, "dense": dense, "categorical": categorical, "ids": "none", "first_token": 0}
    path.write_text(json.dumps(rules | {"missing": [""], "missing_id": 0, "missing_number": 0.0}), encoding="utf-8")


def request(rows: int, sizes: Any, seed: int) -> bytes:
    dense = torch.rand(rows, 13, generator=torch.Generator().manual_seed(seed)).tolist()
    ids = draw_ids("zipf", sizes, rows, seed).tolist()
    names = (*DENSE_NAMES, *CATEGORICAL_NAMES)
    return json.dumps([dict(zip(names, [*d, *i], strict=True)) for d, i in zip(dense, ids, strict=True)]).encode()


def answered(port: int, bodies: list[bytes], seconds: float) -> dict[str, Any]:
    """Requests one after another, for so long."""
    connection = http.client.HTTPConnection("127.0.0.1", port)

    def ask(number: int) -> None:
        connection.request("POST", "/score", bodies[number % len(bodies)])
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200 or b"null" in body:
            raise RuntimeError(body[:200])

    return latencies(ask, seconds)


def in_process(path: Path, bodies: list[bytes], seconds: float) -> dict[str, Any]:
    """The same rows by the session alone, encoded before."""
    scorer = session(path)
    inputs = [
        {
            "dense": np.array([[row[name] for name in DENSE_NAMES] for row in json.loads(body)], np.float32),
            "ids": np.array([[row[name] for name in CATEGORICAL_NAMES] for row in json.loads(body)], np.int64),
        }
        for body in bodies
    ]
    return latencies(lambda number: scorer.run(["probabilities"], inputs[number % len(inputs)]), seconds)


def session(path: Path) -> onnxruntime.InferenceSession:
    """ONNX Runtime on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def latencies(call: Callable[[int], object], seconds: float) -> dict[str, Any]:
    """How long a call takes; it is called with 0, 1, 2, ... for so many seconds."""
    times: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(times) < 2:
        start = time.perf_counter()
        call(len(times))
        times.append(time.perf_counter() - start)
    cuts = statistics.quantiles(times, n=100)
    return {"requests": len(times), "p50_ms": round(1000 * cuts[49], 3), "p99_ms": round(1000 * cuts[98], 3)}


if __name__ == "__main__":
    main()
