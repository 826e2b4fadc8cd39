"""Networks of one's own: a function in a Python file."""

import pytest
import torch
from torch import nn

import quorem
from quorem import models

TEXT = """
from torch import nn

class Wide(nn.Module):
    def __init__(self, embeddings, num_dense, device):
        super().__init__()
        self.embeddings = embeddings
        self.output = nn.Linear(num_dense + sum(embeddings.embedding_dims), 1, device=device)

    def forward(self, dense, *ids):
        import torch
        return self.output(torch.cat([dense, self.embeddings(*ids).flatten(1)], 1)).squeeze(1)

def build(embeddings, *, num_dense, device=None):
    return Wide(embeddings, num_dense, device)

def number(embeddings, *, num_dense, device=None):
    return 3

def other(embeddings, *, num_dense, device=None):
    return nn.Linear(num_dense, 1)

value = 5
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(TEXT)
    return path


def embeddings():
    return quorem.EmbeddingCollection([quorem.Table("a", 50, 4, quorem.QR(4)), quorem.Table("b", 7, 4)])


def test_a_function_in_a_file_is_a_network(file):
    model = models.build(f"{file}:build", embeddings(), num_dense=3)
    assert model(torch.zeros(2, 3), torch.tensor([[49, 0], [5, 6]])).shape == (2,)
    half = models.build(f"{file}:build", embeddings(), num_dense=3, dtype=torch.bfloat16)
    assert half.output.weight.dtype == torch.bfloat16


def test_a_name_is_pinned_to_the_text_of_its_file(file):
    name = models.pinned(f"{file}:build")
    assert name.startswith(f"{file}:build#") and models.pinned(name) == name and models.pinned("dlrm") == "dlrm"
    assert isinstance(models.build(name, embeddings(), num_dense=3), nn.Module)
    file.write_text(TEXT + "# another\n")
    with pytest.raises(ValueError, match=r"my_model.py has changed since the run began"):
        models.build(name, embeddings(), num_dense=3)


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        ("nothing", ValueError, r"my_model.py must define the function nothing"),
        ("value", ValueError, r"my_model.py must define the function value"),
        ("number", TypeError, r"returned int and must return a module"),
        ("other", ValueError, r"must return a module that holds the embeddings it is given"),
    ],
)
def test_what_is_no_network_is_refused(file, function, error, match):
    with pytest.raises(error, match=match):
        models.build(f"{file}:{function}", embeddings(), num_dense=3)


def test_a_file_that_does_not_run_is_told_in_a_line(file):
    file.write_text("import nowhere_to_be_found\n")
    with pytest.raises(ValueError, match=r"my_model.py: ModuleNotFoundError: No module named 'nowhere_to_be_found'"):
        models.build(f"{file}:build", embeddings(), num_dense=3)
    with pytest.raises(ValueError, match=r"preset \('table1'\) must be 'text' for network"):
        models.build(f"{file}:build", embeddings(), preset="table1")
    with pytest.raises(FileNotFoundError):
        models.pinned(f"{file.parent / 'absent.py'}:build")
