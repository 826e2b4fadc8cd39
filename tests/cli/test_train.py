"""``quorem train``: a run on the terminal, interrupted and resumed, and its errors."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnxruntime
import pytest
import torch
from commands import invoke
from runs_of_training import assert_same_model, small_run

import quorem
from quorem import load
from quorem.cli import terminal
from quorem.cli.terminal import command
from quorem.cli.training import scheme_from
from quorem.experiments.reproduce import figures_in
from quorem.training import loop, run
from quorem.training.config import RunConfig
from quorem.training.loop import train

SMALL = ["--dim", "4", "--batch-size", "64", "--threads", "1", "--device", "cpu"]


def test_options_make_the_configuration(log, tmp_path):
    options = ["--scheme", "hash", "--collisions", "8", "--threshold", "5", "--network", "dcn", "--preset", "table1"]
    options += ["--optimizer", "amsgrad", "--lr", "0.002", "--epochs", "2", "--seed", "3", "--shuffle"]
    options += ["--precision", "bfloat16", "--validate-every", "30", "--rows", "2000"]
    done = invoke("train", "--data", log.path, "--out", tmp_path / "run", *SMALL, *options)
    expected = small_run(
        log, scheme=scheme_from("hash", 8), threshold=5, network="dcn", preset="table1", optimizer="amsgrad", lr=0.002,
        epochs=2, seed=3, shuffle=True, precision="bfloat16", validate_every=30, max_rows=2000,
    )  # fmt: skip
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert RunConfig.from_json(json.dumps(result["config"])) == expected
    assert f"test: log loss {result['test']['log_loss']:.5f}, AUC {result['test']['auc']:.5f}" in done.output


def test_a_run_has_a_header_and_a_finished_one_says_so(log, tmp_path):
    out = tmp_path / "run"
    first = invoke("train", "--data", log.path, "--out", out, "--rows", 64, *SMALL)
    again = invoke("train", "--data", log.path, "--out", out, "--rows", 64, *SMALL)
    for done in (first, again):
        assert f"data      {log.path}: 3,429 train, 286 validation and 285 test rows;" in done.output
        assert " of 4 tables stay full, which would not shrink (--force compresses them too)\n" in done.output
        assert done.output.endswith(f"\nNext: {command('report', out)}\n")
    forced = invoke("train", "--data", log.path, "--out", tmp_path / "forced", "--rows", 64, "--force", *SMALL)
    assert "stay full" not in forced.output
    finished = f"{out} is finished: nothing is trained again."
    assert finished not in first.output and finished in again.output and "rows/s" not in again.output


@pytest.mark.parametrize("validated", [True, False])
def test_one_run_has_a_report(log, tmp_path, validated):
    pytest.importorskip("matplotlib", reason='needs matplotlib: pip install "quorem[report]"')
    out = tmp_path / "run"
    options = ["--validate-every", 5] if validated else ["--epochs", 6]
    invoke("train", "--data", log.path, "--out", out, *SMALL, *options)
    assert invoke("report", out).output == f"{out / 'report.html'}\n"
    (figure,) = figures_in(out)
    (point,) = figure.points
    result = json.loads((out / "result.json").read_text())
    assert (point.test_mean, point.test_sd, point.trials) == (result["test"]["log_loss"], None, 1)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    curve = [(x["step"], x["validation"]["log_loss"], None) for x in lines if "validation" in x]
    assert point.curve == curve and len(curve) > 2
    invoke("train", "--data", log.path, "--out", out, *SMALL, *options)  # the page is no stranger in the folder


def test_a_run_that_is_not_finished_has_no_report(log, tmp_path):
    config = small_run(log)
    (tmp_path / "run.json").write_text(config.to_json())
    done = invoke("report", tmp_path, code=1)
    assert "holds a run that is not finished" in done.stderr and done.stderr.count("\n") == 1


def test_without_a_terminal_there_are_lines_at_intervals(log, tmp_path, monkeypatch):
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    done = invoke("train", "--data", log.path, "--out", tmp_path / "run", "--rows", 256, *SMALL)
    lines = [line for line in done.output.splitlines() if line.startswith("DLRM: ")]
    assert [line.split(",")[:2] for line in lines] == [[f"DLRM: {25 * k}%", f" step {k} of 4"] for k in (1, 2, 3, 4)]
    assert all("rows/s" in line for line in lines)


def test_ctrl_c_saves_and_exits_with_130_and_the_same_command_goes_on(log, tmp_path):
    out = tmp_path / "cut"
    options = ["--data", str(log.path), *SMALL, "--epochs", "12"]
    arguments = [sys.executable, "-m", "quorem", "train", "--out", str(out), *options]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = out / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "quorem: interrupted; the same command goes on" in printed
    (step, _), *_ = run.saved_checkpoints(out / "checkpoints")
    assert step > 0
    assert f"goes on from step {step:,} of " in invoke("train", "--out", out, *options).output
    result = json.loads((out / "result.json").read_text())
    config = RunConfig.from_json(json.dumps(result["config"]))
    train(config, log, tmp_path / "whole")
    assert_same_model(out, tmp_path / "whole")


WRONG_JSON = ("{}", '{"scheme": "QR", "num_collisions": "4"}', '{"scheme": 5}', '{"scheme": "QR"')


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scheme", "fold"], "scheme ('fold') must be one of"),
        *((["--scheme", text], f"scheme ({text}) must be the JSON of a scheme: ") for text in WRONG_JSON),
        (["--lr", "0"], "lr (0.0) must be above 0"),
    ],
)
def test_a_mistake_is_one_line(log, tmp_path, options, message):
    done = invoke("train", "--data", log.path, "--out", tmp_path / "run", *SMALL, *options, code=1)
    assert done.stderr.startswith("quorem: ") and message in done.stderr and done.stderr.count("\n") == 1


NETWORK = (Path(__file__).parents[2] / "examples" / "my_model.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("network", ["dcn", "own"])
def test_other_networks_train_and_resume(log, tmp_path, network):
    file = tmp_path / "my_model.py"
    file.write_text(NETWORK)
    name = f"{file}:build" if network == "own" else network
    options = ["--data", log.path, "--network", name, *SMALL, "--rows", 640]
    done = invoke("train", "--out", tmp_path / "run", *options)
    assert f"model     {'DCN' if network == 'dcn' else name}, " in done.output
    assert "is finished: nothing is trained again" in invoke("train", "--out", tmp_path / "run", *options).output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    metrics = load(tmp_path / "run").evaluate(log)  # the trained model, from its files
    assert metrics.log_loss == pytest.approx(result["test"]["log_loss"], rel=1e-6)
    file_of_quorem = ("--out", tmp_path / "file", "--format", "safetensors")
    exported = invoke("export", tmp_path / "run", *file_of_quorem, code=int(network == "own"))
    assert ("is a run with a network of your own" in exported.stderr) is (network == "own")
    invoke("export", tmp_path / "run", "--out", tmp_path / "model.pt2")
    model = load(tmp_path / "run").model.eval()
    dense, ids = torch.rand(5, 3), (torch.arange(5)[:, None] % 2).repeat(1, len(log.names))
    logits = torch.export.load(tmp_path / "model.pt2").module()(dense, ids)["logits"]
    torch.testing.assert_close(logits.detach(), model(dense, ids).detach())
    file.write_text(NETWORK + "# another network\n")
    again = invoke("train", "--out", tmp_path / "run", *options, code=int(network == "own"))
    if network == "own":
        assert again.stderr.startswith(f"quorem: {tmp_path / 'run'} holds another run: network is")
        assert again.stderr.count("\n") == 1 and "is finished" not in again.stdout
        with pytest.raises(ValueError, match=r"my_model.py has changed since the run began"):
            load(tmp_path / "run")


def test_a_report_compares_any_finished_runs(log, tmp_path):
    pytest.importorskip("matplotlib", reason='needs matplotlib: pip install "quorem[report]"')
    for name, scheme, seed in (("full", "full", 0), ("small", "mult", 0), ("deep/again", "mult", 1)):
        options = ["--scheme", scheme, "--seed", seed]
        invoke("train", "--data", log.path, "--out", tmp_path / name, *SMALL, *options)
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "run.json").write_text((tmp_path / "full" / "run.json").read_text())
    invoke("report", tmp_path)
    (figure,) = figures_in(tmp_path)
    assert {point.series: point.runs for point in figure.points} == {"full": ["full"], "mult": ["deep/again", "small"]}
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("deep/again", "small")]
    mean = sum(result["test"]["log_loss"] for result in results) / 2
    page = (tmp_path / "report.html").read_text()
    assert f"{mean:.5f} ± " in page and "deep/again, small" in page
    assert "What a byte buys" in page and "Finished runs" in page and page.count("<svg") == 2

    options = ["--scheme", "mult", "--epochs", 40, "--patience", 1, "--lr", 1]  # other epochs, and stopped early
    done = invoke("train", "--data", log.path, "--out", tmp_path / "longer", *SMALL, *options)
    best = json.loads((tmp_path / "longer" / "result.json").read_text())["best_epoch"]
    assert f"Stopped after epoch {best + 1} of 40: --patience 1." in done.output
    assert f"Kept: epoch {best}, the best of {best + 1} by validation loss." in done.output
    invoke("report", tmp_path)
    (figure,) = figures_in(tmp_path)
    assert len(figure.points) == 3
    assert figure.made.data.rows == {"train": json.loads((tmp_path / "full" / "result.json").read_text())["rows"]}


@pytest.fixture
def model() -> quorem.models.DLRM:
    tables = [quorem.Table("user", 1000, 16, quorem.QR(4)), quorem.Table("day", 7, 16)]
    return quorem.models.DLRM(quorem.EmbeddingCollection(tables), num_dense=3, bottom=(8,), top=(8,))


IDS, DENSE = torch.tensor([[999, 6], [5, 0], [3, 7]]), torch.rand(3, 3)  # the last day does not exist


def test_formats(model: quorem.models.DLRM, tmp_path: Path) -> None:
    quorem.save(model, tmp_path / "model")
    expected = model(DENSE[:2], IDS[:2]).detach()
    assert "DLRM, onnx, " in invoke("export", tmp_path / "model", "--out", tmp_path / "model.onnx").output
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    logits = torch.from_numpy(session.run(["logits"], {"dense": DENSE.numpy(), "ids": IDS.numpy()})[0])
    torch.testing.assert_close(logits[:2], expected)
    assert logits[2].isnan()
    options = ("--format", "torch-export", "--unknown", "zeros")
    invoke("export", tmp_path / "model", *options, "--out", tmp_path / "model.pt2")
    logits = torch.export.load(tmp_path / "model.pt2").module()(DENSE, IDS)["logits"]
    torch.testing.assert_close(logits[:2].detach(), expected)
    assert logits.isfinite().all()
    invoke("export", tmp_path / "model", "--format", "safetensors", "--out", tmp_path / "copy")
    torch.testing.assert_close(quorem.load(tmp_path / "copy")(DENSE[:2], IDS[:2]).detach(), expected)


def test_errors_are_a_line(model: quorem.models.DLRM, tmp_path: Path) -> None:
    quorem.save(model, tmp_path / "model")
    (tmp_path / "other").write_text("nothing")
    zeros = ("--format", "safetensors", "--unknown", "zeros")
    for arguments, message in [
        ((tmp_path / "other",), "other is damaged"),
        ((tmp_path,), "has no model.safetensors: it is no finished run"),
        ((tmp_path / "model", *zeros), "--unknown and --jagged are for graphs"),
    ]:
        done = invoke("export", *arguments, "--out", tmp_path / "out.onnx", code=1)
        assert message in done.output and "Traceback" not in done.output
    assert not (tmp_path / "out.onnx").exists()
