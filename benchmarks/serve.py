"""A load test of ``examples/serve.py`` on loopback: latencies and rows a second by rows of a request and clients.

    python benchmarks/serve.py --seconds 3 --out benchmarks/results/serve.json

DLRM with 26 features of Criteo's cardinalities, scaled, rows in 8 bits, exported to ONNX. The server is one process
with one thread of ONNX Runtime; the clients are threads of another process on the same machine, each with one
connection that sends a request when it has the answer to the last. A request has rows of raw values, 13 numbers and 26
ids. ``in_process`` is the session alone on encoded rows, without HTTP and JSON.
"""

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
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
CASES = ((1, 1), (1, 4), (32, 1), (32, 4), (1024, 1))  # rows of a request, clients
STARTS_WITHIN = 120  # seconds
BODIES = 32  # requests that a client goes through, again and again


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
        for rows, clients in CASES:
            bodies = [request(rows, sizes, seed) for seed in range(BODIES)]
            load(port, bodies, clients, 0.5)  # connections, caches
            case = {"rows": rows, "clients": clients, **load(port, bodies, clients, seconds)}
            case["in_process"] = in_process(path, bodies, seconds / 3)
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


def load(port: int, bodies: list[bytes], clients: int, seconds: float) -> dict[str, Any]:
    """Requests from so many clients at once, for so long."""
    latencies: list[list[float]] = [[] for _ in range(clients)]
    began = time.perf_counter()

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        count = number
        while time.perf_counter() - began < seconds:
            start = time.perf_counter()
            connection.request("POST", "/score", bodies[count % len(bodies)])
            answer = connection.getresponse()
            body = answer.read()
            latencies[number].append(time.perf_counter() - start)
            if answer.status != 200 or b"null" in body:
                raise RuntimeError(body[:200])
            count += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return summary([each for own in latencies for each in own], time.perf_counter() - began, len(json.loads(bodies[0])))


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
    latencies, began = [], time.perf_counter()
    while time.perf_counter() - began < seconds or not latencies:
        start = time.perf_counter()
        scorer.run(["probabilities"], inputs[len(latencies) % len(inputs)])
        latencies.append(time.perf_counter() - start)
    return summary(latencies, time.perf_counter() - began, len(inputs[0]["ids"]))


def session(path: Path) -> onnxruntime.InferenceSession:
    """ONNX Runtime on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def summary(latencies: list[float], seconds: float, rows: int) -> dict[str, Any]:
    cuts = statistics.quantiles(latencies, n=100) if len(latencies) > 1 else latencies * 99
    return {
        "requests": len(latencies),
        "rows_per_second": round(len(latencies) * rows / seconds),
        "p50_ms": round(1000 * cuts[49], 3),
        "p99_ms": round(1000 * cuts[98], 3),
    }


if __name__ == "__main__":
    main()
