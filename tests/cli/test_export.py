"""``quorem export``: each format from a saved file, and its errors in a line."""

from pathlib import Path

import onnxruntime
import pytest
import torch
from commands import invoke

import quorem


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


def test_rows_of_fewer_bits(model: quorem.models.DLRM, tmp_path: Path) -> None:
    quorem.save(model, tmp_path / "model")
    invoke("export", tmp_path / "model", "--bits", "4", "--format", "safetensors", "--out", tmp_path / "small")
    invoke("export", tmp_path / "small", "--bits", "4", "--out", tmp_path / "small.onnx")  # in 4 bits already
    small = quorem.load(tmp_path / "small")
    assert small.embeddings.bits == 4
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx")
    logits = session.run(["logits"], {"dense": DENSE[:2].numpy(), "ids": IDS[:2].numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(logits), small(DENSE[:2], IDS[:2]).detach())


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
