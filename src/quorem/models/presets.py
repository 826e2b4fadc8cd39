"""The networks by name: the paper's, in two readings of it, and your own.

A network of your own is a function in a Python file, named ``FILE.py:FUNCTION``. It is called as
``FUNCTION(embeddings, num_dense=..., device=...)`` and returns a module that holds the embeddings and maps dense
features ``[B, num_dense]`` and ids to logits ``[B]``.
"""

import hashlib
import re
import runpy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from ..checks import check_choice
from .networks import DCN, DLRM

# "text" is section 5.1 as written. Only "table1" gives table 1's parameter counts: DCN without its layer of 64, and
# the dense features instead of the bottom's output beside DLRM's dot products.
PRESETS: dict[str, dict[str, Callable[..., nn.Module]]] = {
    "text": {"dcn": DCN, "dlrm": DLRM},
    "table1": {"dcn": partial(DCN, deep=(512, 256)), "dlrm": partial(DLRM, raw_dense=True)},
}
NETWORKS = tuple(PRESETS["text"])
HIDDEN = {"dcn": "deep", "dlrm": "top"}  # the argument that has the widths of the hidden layers
Preset = Literal["text", "table1"]
CUSTOM_NETWORK = re.compile(r"(?P<file>[^#]+\.py):(?P<function>[^\W\d]\w*)(#(?P<digest>[0-9a-f]{12}))?")


def build(
    network: str,
    embeddings: nn.Module,
    *,
    num_dense: int = 13,
    preset: Preset = "text",
    hidden: Sequence[int] | None = None,
    bottom: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """A network around ``embeddings``: the paper's ``"dcn"`` and ``"dlrm"`` (section 5.1), or your own.

    Args:
        network: name of the network; ``"FILE.py:FUNCTION"`` for your own (see ``models.presets``).
        preset: ``"text"`` is the architecture of section 5.1, ``"table1"`` the one whose parameters table 1 counts.
        hidden: widths of the hidden layers, of DLRM those of its top; None takes the preset's.
        bottom: widths of the hidden layers of DLRM's bottom; None takes the preset's.

    The other arguments are those of ``DCN``.

    Raises:
        ValueError: if ``network`` or ``preset`` is unknown, a network has no such preset or widths, or your own does
            not hold the embeddings.
        TypeError: if your own function returns no module.

    >>> from quorem import EmbeddingCollection, QR, Table
    >>> tables = EmbeddingCollection([Table("user", 1000, 16, QR(4)), Table("day", 7, 16)])
    >>> type(build("dlrm", tables, num_dense=3)).__name__
    'DLRM'
    """
    check_network(network, preset, hidden=hidden, bottom=bottom)
    if own := CUSTOM_NETWORK.fullmatch(network):
        made = _function_of(own)(embeddings, num_dense=num_dense, device=device)
        if not isinstance(made, nn.Module):
            raise TypeError(f"network ({network!r}) returned {type(made).__name__} and must return a module")
        if all(module is not embeddings for module in made.modules()):
            raise ValueError(f"network ({network!r}) must return a module that holds the embeddings it is given")
        return made if dtype is None else made.to(dtype)
    widths = {} if hidden is None else {HIDDEN[network]: hidden}
    widths |= {} if bottom is None else {"bottom": bottom}
    return PRESETS[preset][network](embeddings, num_dense=num_dense, device=device, dtype=dtype, **widths)


def check_network(
    network: str, preset: str = "text", *, hidden: Sequence[int] | None = None, bottom: Sequence[int] | None = None
) -> None:
    """Raise ValueError as ``build`` would for these names and widths, without building anything."""
    check_choice("preset", preset, Preset)
    if network not in NETWORKS and not is_custom(network):
        known = ", ".join(map(repr, NETWORKS))
        raise ValueError(f"network ({network!r}) must be one of {known}, or FILE.py:FUNCTION of your own")
    if is_custom(network) and preset != "text":
        raise ValueError(f"preset ({preset!r}) must be 'text' for network ({network!r})")
    for name, widths, networks in (("hidden", hidden, NETWORKS), ("bottom", bottom, ("dlrm",))):
        if widths is not None and (network not in networks or preset != "text"):
            raise ValueError(f"{name} ({widths}) must be None for network ({network!r}) with preset ({preset!r})")


def is_custom(network: str) -> bool:
    """Whether a network is named as ``FILE.py:FUNCTION``."""
    return CUSTOM_NETWORK.fullmatch(network) is not None


def pinned(network: str) -> str:
    """The name with a digest of the file, ``FILE.py:FUNCTION#DIGEST``; names of shipped networks as they are.

    A run is not resumed if the file has changed.
    """
    match = CUSTOM_NETWORK.fullmatch(network)
    if match is None or match["digest"]:
        return network
    return f"{network}#{_digest(Path(match['file']))}"


def _function_of(match: re.Match[str]) -> Callable[..., nn.Module]:
    """The function that a name stands for. The file is run as Python."""
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
