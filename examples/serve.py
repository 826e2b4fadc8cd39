"""Scores of an exported DLRM behind HTTP: ONNX Runtime, Starlette and uvicorn.

    pip install "quorem[serve]"
    quorem export runs/first --format onnx --bits 8 --out model.onnx
    python examples/serve.py model.onnx --port 8000
    curl http://127.0.0.1:8000/score -d '{"dense": [[0.5, ...]], "ids": [[17, ...]]}'

The answer is ``{"probabilities": [0.21]}``, with null for a row whose score is NaN: it has an id that its table does
not have. Ids are those of the data (docs/serve.md); a model with raw ids takes ``quorem.hash_strings`` of the tokens.
The process needs neither torch nor quorem. For more cores start more processes behind a balancer, one thread each.
"""

import argparse
import math
from typing import Any

import numpy as np
import onnxruntime
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

MOST_ROWS = 65_536  # of a request


class Model:
    """An exported network."""

    def __init__(self, path: str, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.widths = {given.name: given.shape[-1] for given in self.session.get_inputs()}
        if self.widths.keys() != {"dense", "ids"}:
            raise SystemExit(f"{path} takes {', '.join(self.widths)} and must take dense and ids: export a DLRM")

    def inputs(self, body: Any) -> dict[str, np.ndarray]:
        """The arrays of a request.

        Raises:
            ValueError: if they are not what the network takes.
        """
        if not isinstance(body, dict) or body.keys() != self.widths.keys():
            raise ValueError("the body must be an object of dense and ids")
        arrays = {"dense": np.asarray(body["dense"], np.float32), "ids": int64(body["ids"])}
        for name, array in arrays.items():
            if array.ndim != 2 or array.shape[1] != self.widths[name] or len(array) > MOST_ROWS:
                raise ValueError(
                    f"{name} has shape {array.shape} and must be rows of {self.widths[name]}, at most {MOST_ROWS}"
                )
        if len(arrays["dense"]) != len(arrays["ids"]):
            raise ValueError("dense and ids must have as many rows")
        return arrays

    def probabilities(self, inputs: dict[str, np.ndarray]) -> list[float | None]:
        """One a row; None where it is NaN."""
        (scores,) = self.session.run(["probabilities"], inputs)
        return [None if math.isnan(score) else score for score in scores.tolist()]


def int64(values: Any) -> np.ndarray:
    """Nested lists of integers as an array; unsigned ones, which raw ids may be, by their bits."""
    ids = np.asarray(values)
    if ids.dtype == np.int64:
        return ids
    ids = np.asarray(values, object)
    if not all(type(i) is int and -(2**63) <= i < 2**64 for i in ids.flat):
        raise ValueError("ids must be integers of 64 bits")
    return np.array([i % 2**64 for i in ids.flat], np.uint64).view(np.int64).reshape(ids.shape)


def app(path: str, threads: int = 1) -> Starlette:
    """The service of one model: POST /score, GET /health."""
    model = Model(path, threads)

    async def score(request: Request) -> JSONResponse:
        try:
            inputs = model.inputs(await request.json())
        except (ValueError, TypeError, RecursionError) as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({"probabilities": await run_in_threadpool(model.probabilities, inputs)})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"inputs": model.widths})

    return Starlette(routes=[Route("/score", score, methods=["POST"]), Route("/health", health)])


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a network that quorem export wrote")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime")
    options = parser.parse_args()
    service = app(options.model, options.threads)
    uvicorn.run(service, host=options.host, port=options.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
