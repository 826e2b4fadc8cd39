"""A language model of transformers with a tied head, compressed in its constructor: saved and loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason='needs transformers: pip install "quorem[dev]"')

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import quorem
from quorem.planner import Plan

KINDS = ("qr", "counts", "quantized")
COUNTS = (9000 / torch.arange(1, 901)).long().flip(0)


class Compressed(GPT2LMHeadModel):
    """The road to ``from_pretrained``: a subclass whose constructor compresses what it has built."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        plan = config.quorem_plan
        width = 4 if config.quorem_bits else None
        quorem.compress_(self, Plan.from_json(plan) if plan else quorem.QR(4, operation=config.operation, width=width))
        if config.quorem_bits:
            quorem.quantize_(self, config.quorem_bits)


def config(**options: object) -> GPT2Config:
    sizes = {"vocab_size": 900, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2Config(**sizes, **{"quorem_plan": "", "quorem_bits": 0, "operation": "mult"} | options)


def answers(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(torch.arange(0, 900, 60)[None]).logits.detach()


def test_a_model_comes_back_in_a_process_without_data(tmp_path: Path) -> None:
    for kind in KINDS:
        plan = ""
        if kind == "counts":
            planned = quorem.plan(GPT2LMHeadModel(config()), 40_000, frequencies={"transformer.wte": COUNTS})
            plan = planned.to_json()
        model = Compressed(config(quorem_plan=plan, quorem_bits=8 if kind == "quantized" else 0))
        if kind == "counts":
            model = GPT2LMHeadModel(config(quorem_plan=plan))
            quorem.compress_(model, planned, frequencies={"transformer.wte": COUNTS})
        model.save_pretrained(tmp_path / kind)
        torch.save(answers(model), tmp_path / f"{kind}.pt")
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_rows_that_mean_something_else_are_refused(tmp_path: Path) -> None:
    """transformers sets parameters and buffers one by one, so the first lookup finds it."""
    Compressed(config()).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"table holds mult of .* in the checkpoint and add of"):
        answers(Compressed.from_pretrained(tmp_path, config=config(operation="add")))


if __name__ == "__main__":
    for kind in KINDS:
        loaded = Compressed.from_pretrained(Path(sys.argv[1]) / kind, dtype=torch.float32)  # not the matrices' bfloat16
        assert torch.equal(answers(loaded), torch.load(Path(sys.argv[1]) / f"{kind}.pt")), kind
