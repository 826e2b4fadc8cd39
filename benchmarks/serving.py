"""What serving costs: exported lookups against the same lookup written by hand in ONNX, and rows a second of predict.

    python benchmarks/serving.py --out benchmarks/results/serving.json

``onnx``: 26 features of Criteo's cardinalities, scaled, D = 16, one thread of ONNX Runtime. By hand is the least that
computes the same vectors: Mod, Div, Add, Gather and Mul, without a guard against ids that a table does not have, so its
graph reads other rows for such. Both run in turn, some hundred times; a ratio is that of the medians of one run.
``predict``: rows a second of ``quorem predict`` with DLRM in 8 bits on a made-up log. ``floor`` has the time of the
network's matrix products alone: no program that computes them in float32 on the same cores is faster.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import result_file
import torch
from onnx import TensorProto, helper, numpy_helper

import quorem
from quorem.data.config import PrepareConfig
from quorem.data.criteo import prepare_criteo
from quorem.data.raw import write_raw
from quorem.data.shape import CATEGORICAL_NAMES, scaled_cardinalities
from quorem.data.synthetic import ClickLog
from quorem.experiments.bench.grid import draw_ids
from quorem.files.provenance import commit, versions
from quorem.ops.codes import code_bytes
from quorem.serving.export import export_named
from quorem.serving.predict import predict
from quorem.serving.scorer import BATCH_ROWS, Scorer
from quorem.training.config import RunConfig
from quorem.training.loop import train
from quorem.training.model import data_identity

BATCHES = (1, 32, 1024)
WIDTH, COLLISIONS = 16, 4


def main() -> None:
    parser = result_file.parser_of(__doc__)
    parser.add_argument("--scale", type=float, default=0.01, help="of Criteo's cardinalities")
    parser.add_argument("--repeat", type=int, default=300, help="runs of each graph")
    parser.add_argument("--rows", type=int, default=200_000, help="that predict scores; 0 leaves it out")
    parser.add_argument("--threads", type=int, default=2, help="of predict")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, Any] = {"scale": options.scale, "onnx": lookups(Path(folder), options.scale, options.repeat)}
        if options.rows:
            torch.set_num_threads(options.threads)
            result["predict"] = predictions(Path(folder), options.rows, options.scale) | {"threads": options.threads}
    result |= {"cores": os.cpu_count(), "versions": versions("onnxruntime", "polars"), "commit": commit()}
    print(json.dumps(result, indent=1))
    result_file.write(options.out, result)


def lookups(folder: Path, scale: float, repeat: int) -> list[dict[str, Any]]:
    """Times of the exported graph and of one by hand, for rows of 32 and of 8 bits."""
    sizes = scaled_cardinalities(scale)
    cases = []
    for bits in (32, 8):
        tables = [
            quorem.Table(name, n, WIDTH, quorem.QR(COLLISIONS, force=True))
            for name, n in zip(CATEGORICAL_NAMES, sizes, strict=True)
        ]
        module = quorem.EmbeddingCollection(tables)
        if bits == 8:
            quorem.quantize_(module, 8)
        export_named(module, folder / "exported.onnx")
        onnx.save(by_hand(module), folder / "by_hand.onnx")
        sessions = {name: session(folder / f"{name}.onnx") for name in ("exported", "by_hand")}
        for batch in BATCHES:
            ids = [draw_ids("zipf", sizes, batch, seed).numpy().astype(np.int64) for seed in range(16)]
            outputs = {name: each.run(None, {"ids": ids[0]})[0] for name, each in sessions.items()}
            np.testing.assert_allclose(outputs["exported"], outputs["by_hand"], rtol=1e-6)
            cases.append({"bits": bits, "batch": batch, **times(sessions, ids, repeat)})
    return cases


def session(path: Path) -> onnxruntime.InferenceSession:
    """ONNX Runtime on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def times(sessions: dict[str, onnxruntime.InferenceSession], ids: list[np.ndarray], repeat: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in sessions}
    for number in range(repeat + 10):
        for name, each in sessions.items():
            began = time.perf_counter()
            each.run(None, {"ids": ids[number % len(ids)]})
            taken[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(own[10:]) for name, own in taken.items()}
    return {
        **{f"{name}_us": round(1e6 * value, 1) for name, value in medians.items()},
        "ratio": round(medians["exported"] / medians["by_hand"], 3),
    }


def by_hand(module: quorem.EmbeddingCollection) -> onnx.ModelProto:
    """ids [B, F] -> vectors [B, F, D]: remainder and quotient, a row of each table, and their product."""
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, np.ndarray] = {}

    def op(kind: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, list(inputs), [f"v{len(nodes)}"], **attributes))
        return f"v{len(nodes) - 1}"

    def weight(name: str, values: np.ndarray) -> str:
        weights[name] = values
        return name

    rows = []
    for j in range(2):
        parts = [spec.partitions[j] for spec in module.specs]
        stored = [extents[j].of(module.stored.detach()) for extents in module.extents]
        starts = np.cumsum([0, *(len(table) for table in stored[:-1])])
        row = "ids" if j == 0 else op("Div", "ids", weight("strides", np.array([p.stride for p in parts])))
        if j == 0:
            row = op("Mod", row, weight("sizes", np.array([p.size for p in parts])))
        row = op("Add", row, weight(f"starts{j}", starts))
        table = torch.cat(stored)
        if not module.bits:
            rows.append(op("Gather", weight(f"table{j}", table.numpy()), row, axis=0))
            continue
        size = code_bytes(WIDTH, 8)
        scale = table[:, size : size + 2].contiguous().view(torch.float16).float()
        zero = table[:, size + 2 :].contiguous().view(torch.int16).float()
        code = op("Gather", weight(f"codes{j}", table[:, :size].contiguous().numpy()), row, axis=0)
        code = op("Cast", code, to=TensorProto.FLOAT)
        zeros = op("Gather", weight(f"zeros{j}", zero.numpy()), row, axis=0)
        scales = op("Gather", weight(f"scales{j}", scale.numpy()), row, axis=0)
        rows.append(op("Mul", op("Sub", code, zeros), scales))
    nodes.append(helper.make_node("Mul", rows, ["vectors"]))
    features = len(module.specs)
    graph = helper.make_graph(
        nodes,
        "by_hand",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", features])],
        [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["batch", features, WIDTH])],
        [numpy_helper.from_array(values, name) for name, values in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def predictions(folder: Path, rows: int, scale: float) -> dict[str, Any]:
    """Rows a second of ``quorem predict``, and of the matrix products alone; the model is trained for a moment only."""
    write_raw(ClickLog(cardinalities=scaled_cardinalities(scale)), rows, folder / "log.txt")
    data = prepare_criteo(folder / "log.txt", folder / "log", PrepareConfig(days=7))
    config = RunConfig(data=data_identity(data), scheme=quorem.QR(COLLISIONS), max_rows=1024)
    train(config, data, folder / "run")
    scorer = Scorer(folder / "run")
    quorem.quantize_(scorer.model, 8)

    def rate(counted: int, work: Callable[[], object]) -> int:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return round(counted / min(times))

    predicted = rate(rows, lambda: predict(scorer, folder / "log.txt", folder / "scores.csv"))
    rates = {"predict int8": predicted, "floor": rate(BATCH_ROWS, products(scorer.model))}
    return {"rows": rows, "scale": scale, "ids": sum(data.cardinalities), "rows_per_second": rates}


def products(model: Any) -> Callable[[], object]:
    """The matrix products of DLRM for a batch: each layer's, and the dot products of all pairs."""
    widths = [
        [model.num_dense, *(layer.out_features for layer in model.bottom if hasattr(layer, "out_features"))],
        [model.top[0].in_features, *(layer.out_features for layer in model.top if hasattr(layer, "out_features")), 1],
    ]
    layers = [(torch.rand(BATCH_ROWS, i), torch.rand(i, o)) for sizes in widths for i, o in pairwise(sizes)]
    vectors = torch.rand(BATCH_ROWS, model.num_vectors, model.embedding_dim)
    return lambda: ([torch.mm(x, w) for x, w in layers], torch.bmm(vectors, vectors.mT))


if __name__ == "__main__":
    main()
