"""Networks of your own: a function in a Python file, named ``FILE.py:FUNCTION``.

The function is called as ``FUNCTION(embeddings, num_dense=..., device=...)`` and returns a module that holds the
embeddings and maps dense features ``[B, num_dense]`` and ids to logits ``[B]``.
"""

import hashlib
import re
import runpy
from collections.abc import Callable
from pathlib import Path

from torch import nn

CUSTOM_NETWORK = re.compile(r"(?P<file>[^#]+\.py):(?P<function>[^\W\d]\w*)(#(?P<digest>[0-9a-f]{12}))?")


def is_custom(network: str) -> bool:
    """Whether a network is named as ``FILE.py:FUNCTION``.

    >>> is_custom("nets/wide.py:build"), is_custom("dlrm")
    (True, False)
    """
    return CUSTOM_NETWORK.fullmatch(network) is not None


def pinned(network: str) -> str:
    """The name with a digest of the file, ``FILE.py:FUNCTION#DIGEST``; names of shipped networks as they are.

    A run is not resumed if the file has changed.
    """
    match = CUSTOM_NETWORK.fullmatch(network)
    if match is None or match["digest"]:
        return network
    return f"{network}#{_digest(Path(match['file']))}"


def load(network: str) -> Callable[..., nn.Module]:
    """The function that a name stands for. The file is run as Python."""
    match = CUSTOM_NETWORK.fullmatch(network)
    if match is None:
        raise ValueError(f"network ({network!r}) must be FILE.py:FUNCTION")
    path = Path(match["file"])
    if match["digest"] and match["digest"] != _digest(path):
        raise ValueError(f"{path} has changed since the run began: its network would be another")
    try:
        function = runpy.run_path(str(path)).get(match["function"])
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ValueError(f"{path} must define the function {match['function']}")
    return function


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
