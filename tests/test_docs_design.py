"""docs/design.md follows one batch hop by hop; the calls are the hops."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import quorem
from quorem import QR, EmbeddingCollection, Table, optim
from quorem.ops import cpu

# Up to Python 3.11, sys.setprofile sees calls of what Numba has compiled.
COMPILED = () if sys.version_info < (3, 12) else ("lookup_kernel", "sum_slots", "adagrad")
DOCUMENT = (Path(__file__).parents[1] / "docs" / "design.md").read_text()
SOURCE = Path(quorem.__file__).parent


def hops(name: str) -> list[tuple[str, str]]:
    """File and function of each hop of a table of the document."""
    (table,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- end -->", DOCUMENT, re.S)
    return re.findall(r"`([\w/]+\.py)` `([\w.<>]+)`", table)


def calls(function: Callable[[], object]) -> list[tuple[str, str]]:
    """File and function of every call of quorem's, in order."""
    seen = []

    def note(frame, event, argument):  # type: ignore[no-untyped-def]
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(SOURCE):
            seen.append((file.relative_to(SOURCE).as_posix(), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.skipif(not cpu.kernels(), reason="the page follows the kernels of Numba: pip install quorem[cpu]")
def test_a_batch_takes_the_hops_of_the_page() -> None:
    collection = EmbeddingCollection([Table("a", 1000, 8, QR(4)), Table("b", 50, 8, QR(4, operation="add"))])
    optim.apply_in_backward(collection, optim.Adagrad, lr=0.1)
    ids = torch.randint(0, 50, (8, 2))
    collection(ids).sum().backward()  # compiles
    out = []
    forward = calls(lambda: out.append(collection(ids)))
    backward = calls(lambda: out[0].sum().backward())
    for name, made in (("forward", forward), ("backward", backward)):
        rest = iter(made)
        for hop in hops(name):
            assert hop[1] in COMPILED or hop in rest, (name, hop, made)
        assert len(hops(name)) == {"forward": 7, "backward": 9}[name]
        (files,) = re.findall(rf"(\d+) files {name}", DOCUMENT)
        assert len({file for file, _ in made}) <= int(files), (name, made)


@pytest.mark.parametrize("folder", ["", "ops"])
def test_the_tree_names_every_file_and_folder(folder: str) -> None:
    (tree,) = re.findall(r"```\nsrc/quorem/\n(.*?)```", DOCUMENT, re.S)
    paths = [path for path in (SOURCE / folder).iterdir() if not path.name.startswith(("_", "py.typed"))]
    names = [f"{path.name}/" if path.is_dir() else path.name.removesuffix(".py") for path in paths]
    named = {word.removesuffix(".py") for word in tree.split()}
    assert sorted(set(names) - named - {"version"}) == []
