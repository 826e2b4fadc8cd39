"""The networks by name, in the two readings of the paper."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from .dcn import DCN
from .dlrm import DLRM

# "text" is section 5.1 as written. Only "table1" gives table 1's parameter counts: DCN without its layer of 64, and
# the dense features instead of the bottom's output beside DLRM's dot products.
PRESETS: dict[str, dict[str, Callable[..., nn.Module]]] = {
    "text": {"dcn": DCN, "dlrm": DLRM},
    "table1": {"dcn": partial(DCN, deep=(512, 256)), "dlrm": partial(DLRM, raw_dense=True)},
}
NETWORKS = tuple(PRESETS["text"])


def build(
    network: str,
    embeddings: nn.Module,
    *,
    num_dense: int = 13,
    preset: str = "text",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """The paper's ``"dcn"`` or ``"dlrm"`` around ``embeddings`` (section 5.1).

    Args:
        network: which one.
        embeddings: as each network takes them.
        num_dense: number of dense features.
        preset: ``"text"`` is the architecture of section 5.1, ``"table1"`` the one whose parameters table 1 counts.
        device: of the network; the embeddings stay where they are.
        dtype: of the network.

    Raises:
        ValueError: if ``network`` or ``preset`` is unknown.
    """
    if network not in NETWORKS:
        raise ValueError(f"network ({network!r}) must be one of {', '.join(map(repr, NETWORKS))}")
    if preset not in PRESETS:
        raise ValueError(f"preset ({preset!r}) must be one of {', '.join(map(repr, PRESETS))}")
    return PRESETS[preset][network](embeddings, num_dense=num_dense, device=device, dtype=dtype)
