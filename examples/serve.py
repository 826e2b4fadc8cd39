"""Scores of raw rows behind HTTP: an exported run, ONNX Runtime, Starlette and uvicorn.

    pip install "quorem[serve]"
    quorem export runs/first --bits 8 --out model.onnx                  # and model.json, by which rows are encoded
    python examples/serve.py model.onnx --port 8000
    curl http://127.0.0.1:8000/score -d '[{"price": 2.5, "user": "u7", "tags": "red|small"}]'

The body is a row (an object of column -> value) or a list of rows; values are as in a CSV file, or JSON's own. The
answer is ``{"probabilities": [0.21]}``, with null for a score that is NaN. The process needs neither torch nor quorem.
For more cores start more processes behind a balancer, one thread each.
"""

import argparse
import math
import os
from pathlib import Path
from typing import Any

import onnxruntime
import uvicorn
from encode_row import encode, read_rules
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

MOST_ROWS = 65_536  # of a request


def rows_of(body: Any) -> list[dict[str, Any]]:
    """The rows of a request.

    Raises:
        ValueError: if it has another form.
    """
    rows = body if isinstance(body, list) else [body]
    if not rows or len(rows) > MOST_ROWS or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"the body must be a row (an object of column -> value), or a list of 1 to {MOST_ROWS} rows")
    return rows


def app(path: str | os.PathLike[str], threads: int = 1, unknown: str = "error") -> Starlette:
    """The service of one model: POST /score; GET /health, or /, names the columns of a row."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    rules = read_rules(Path(path).with_suffix(".json"))
    columns = [column["name"] for column in rules["dense"] + rules["categorical"]]

    def probabilities(body: Any) -> list[float | None]:
        (scores,) = session.run(["probabilities"], encode(rules, rows_of(body), unknown))
        return [None if math.isnan(score) else score for score in scores.tolist()]

    async def score(request: Request) -> JSONResponse:
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            return JSONResponse({"error": f"the body must be JSON: {error}"}, 400)
        try:
            return JSONResponse({"probabilities": await run_in_threadpool(probabilities, body)})
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"columns": columns, "usage": "POST /score with a row, or a list of rows, as JSON"})

    routes = [Route("/score", score, methods=["POST"]), Route("/health", health), Route("/", health)]
    return Starlette(routes=routes)


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run that quorem export wrote; its rules (.json) are beside it")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime")
    parser.add_argument("--unknown", choices=["error", "missing"], default="error", help="values training never saw")
    options = parser.parse_args()
    for file in (Path(options.model), Path(options.model).with_suffix(".json")):
        if not file.is_file():
            parser.error(f"{file} is not a file: quorem export RUN --out model.onnx writes model.onnx and model.json")
    service = app(options.model, options.threads, options.unknown)
    print(f"http://{options.host}:{options.port} scores rows (POST /score); Ctrl-C stops it", flush=True)
    uvicorn.run(service, host=options.host, port=options.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
