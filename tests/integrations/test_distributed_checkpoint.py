"""Compressed models in checkpoints of torch.distributed; tests/replicas.py has two processes and ``fully_shard``."""

from pathlib import Path

import torch.distributed.checkpoint as dcp
from foreign_model import check_tool
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict


def save(model: nn.Module, folder: Path) -> None:
    dcp.save(get_model_state_dict(model), checkpoint_id=folder / "state", no_dist=True)


def load(model: nn.Module, folder: Path) -> None:
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder / "state", no_dist=True)
    set_model_state_dict(model, state)


def test_models_come_back_in_a_process_without_data(tmp_path: Path) -> None:
    check_tool(__file__, save, tmp_path)
